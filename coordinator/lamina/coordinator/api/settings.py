"""What the operator may set of the HTTP API. Free of the web framework, which takes half a second to import."""

from dataclasses import dataclass

MAX_BODY_BYTES = 16 * 2**20
PING_S = 15.0
MAX_CONNECTIONS = 1000


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """`api_key` "" lets everybody in."""

    api_key: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    ping_s: float = PING_S


OPEN = ApiSettings()
