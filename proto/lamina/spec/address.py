"""Where a process listens, as people write it."""

import ipaddress
import re
from dataclasses import dataclass

from lamina.spec.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port. Text form: `host:port`, IPv6 literals in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str, *, default_port: int | None = None, allow_zero: bool = False) -> Address:
    """`host:port`, `[v6]:port`, a bare host with `default_port`. Raises InvalidConfig."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]/]+))(?::([0-9]{1,5}))?", text.strip())
    is_host = match and (_is_ipv6(match[1]) if match[1] else is_host_name(match[2]))
    if not match or not is_host or (match[3] is None and default_port is None):
        raise InvalidConfig(f"address {text!r} is not of the form host:port or [ipv6]:port, like 192.168.1.10:50051")
    port = int(match[3]) if match[3] is not None else default_port or 0
    if not (0 if allow_zero else 1) <= port <= 65535:
        raise InvalidConfig(f"address {text!r}: port {port} is not between 1 and 65535")
    return Address(match[1] or match[2], port)


def is_host_name(text: str) -> bool:
    """Whether it can be looked up at all: no empty and no overlong part."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
