"""Addresses as people write them (P-27: not split at the first colon)."""

import pytest

from lamina.spec.address import Address, parse_address
from lamina.spec.errors import InvalidConfig


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("  10.0.0.7:1 ", "10.0.0.7", 1),
        ("localhost:65535", "localhost", 65535),
        ("node-3.rack.example.org:50051", "node-3.rack.example.org", 50051),
        ("my_host:80", "my_host", 80),
        ("[::1]:50051", "::1", 50051),
        ("[2001:db8::8:800:200c:417a]:9", "2001:db8::8:800:200c:417a", 9),
        ("[::ffff:192.0.2.128]:9", "::ffff:192.0.2.128", 9),
        ("[fe80::1%25]:9", "fe80::1%25", 9),
    ],
)
def test_good(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        "a..b:50051",
        "a" * 64 + ".example.org:50051",
        ":50051",
        "::1",
        "::1:50051",
        "2001:db8::1",
        "[::1]",
        "[::1]:",
        "[localhost]:5",
        "[]:5",
        "[:::]:5",
        "[12345::]:5",
        "[1.2.3.4]:5",
        "host:12a",
        "host:-1",
        "host:1.5",
        "host:123456",
        "host:\u0663\u0663",
        "http://host:80",
        "host/path:80",
        "a b:80",
        "a:b:80",
        "host:80:90",
    ],
)
def test_refused_with_the_form(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"host:port or \[ipv6\]:port"):
        parse_address(text)


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_port_out_of_range(port: int) -> None:
    with pytest.raises(InvalidConfig, match=f"port {port} is not between 1 and 65535"):
        parse_address(f"host:{port}")


def test_port_zero_only_where_any_port_will_do() -> None:
    assert parse_address("127.0.0.1:0", allow_zero=True).port == 0


def test_default_port() -> None:
    assert parse_address("host", default_port=7) == Address("host", 7)
    assert parse_address("[::1]", default_port=7) == Address("::1", 7)
    assert parse_address("host:8", default_port=7).port == 8
    with pytest.raises(InvalidConfig):
        parse_address("::1", default_port=7)


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.3.4.5:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("192.168.0.2:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_loopback(text: str, is_loopback: bool) -> None:
    """Who may reach it decides whether --insecure must be said."""
    assert parse_address(text).is_loopback is is_loopback
