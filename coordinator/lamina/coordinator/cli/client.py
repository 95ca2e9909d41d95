"""The running server as the command line sees it: JSON answers and event streams, over http.client."""

import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from lamina.spec.address import is_host_name
from lamina.spec.errors import InvalidConfig, LaminaError, Unavailable

Url = Annotated[str, typer.Option(help="Where `coordinator serve` answers.", envvar="LAMINA_URL")]
ApiKey = Annotated[str, typer.Option(help="Key of the server, if it wants one.", envvar="LAMINA_API_KEY")]

DEFAULT_URL = "http://127.0.0.1:8080"
_TIMEOUT_S = 600.0


class ServerClient:
    """Requests to one server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """At `url`, also the OpenAI base URL, which ends in /v1. Raises InvalidConfig if it is none."""
        url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(url)
            is_sound = parts.scheme in ("http", "https") and is_host_name(parts.hostname or "") and parts.port != 0
        except ValueError:  # a port beyond 65535, half a bracket
            is_sound = False
        if not is_sound:
            raise InvalidConfig(f"--url {url!r} is not of the form http://host:port")
        if not re.fullmatch(r"[\x20-\x7e]*", api_key):
            raise InvalidConfig("--api-key has characters that no key has")
        self._url = url
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises Unavailable if nobody answers, LaminaError with what an error answer says."""
        response = self._request("GET", path, None)
        return _read_object(response)

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The events of a stream as JSON objects. Raises as `get`; an error in the stream is a LaminaError."""
        response = self._request("POST", path, json.dumps(body))
        try:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue  # an empty line, a comment, the end
                event = json.loads(data)
                if "error" in event:
                    raise LaminaError(event["error"]["message"])
                yield event
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self._url}: the connection broke: {error}") from None
        finally:
            response.close()

    def _request(self, method: str, path: str, body: str | None) -> HTTPResponse:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_TIMEOUT_S)
        headers = {**self._headers, "Content-Type": "application/json"} if body is not None else self._headers
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
        except HTTPException:  # its text is what came, which may be anything
            raise Unavailable(f"{self._url} does not speak HTTP; is it the address of `coordinator serve`?") from None
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(f"{self._url} does not answer ({reason}); is `coordinator serve` running?") from None
        if response.status >= 400:
            raise _error_of(response, f"{self._url}{path}")
        return response


def _read_object(response: HTTPResponse) -> dict[str, Any]:
    value = json.loads(response.read())
    if not isinstance(value, dict):
        raise LaminaError("the server's answer is no JSON object; is it lamina's?")
    return value


def _error_of(response: HTTPResponse, where: str) -> LaminaError:
    text = response.read().decode("utf-8", "replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    hint = "; here: --api-key KEY" if response.status == HTTPStatus.UNAUTHORIZED else ""
    return LaminaError(f"{where}: {response.status}: {message}{hint}")
