"""The web page at `/`: its files, read once, under a policy that lets it load nothing from anywhere else.

The page itself holds nothing secret, so it is served without the API key, for which it then asks.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from fastapi import APIRouter, Request
from fastapi.responses import Response

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Trusted types: even a defect of the page's own scripts cannot turn a model's words into markup.
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


def _read_files() -> Mapping[str, PageFile]:
    """By URL path: the page at `/`, what it loads under `/page/`."""
    files = {}
    for entry in resources.files("lamina.coordinator.webui").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _MEDIA_TYPES:
            body = entry.read_bytes()
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            files[path] = PageFile(body, _MEDIA_TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return MappingProxyType(files)


PAGE_FILES = _read_files()


def page_routes() -> APIRouter:
    """The routes: one per file, nothing is looked up by what a client sends."""
    router = APIRouter()
    for path, file in PAGE_FILES.items():
        router.add_api_route(path, _sender_of(file), methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _sender_of(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)

    return send
