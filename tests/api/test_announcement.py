"""What `serve` prints when it listens: every line can be pasted as it stands."""

import ipaddress
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from lamina.coordinator.cli import announcement as module
from lamina.coordinator.cli.announcement import announcement, outgoing_host, reachable
from lamina.rpc_worker import command as worker_cli
from lamina.rpc_worker.settings import WorkerSettings
from lamina.spec.address import Address, parse_address


def routed(monkeypatch: pytest.MonkeyPatch, routes: dict[socket.AddressFamily, str]) -> None:
    """This machine has these addresses on its way out, and no other way."""
    monkeypatch.setattr(module, "outgoing_host", routes.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")


def test_the_way_out_is_an_address_or_nothing() -> None:
    host = outgoing_host(socket.AF_INET)
    assert host is None or not ipaddress.IPv4Address(host).is_unspecified


@pytest.mark.parametrize(
    ("host", "routes", "found"),
    [
        ("0.0.0.0", {socket.AF_INET: "10.0.0.7"}, "10.0.0.7"),
        ("0.0.0.0", {socket.AF_INET6: "fd00::7"}, "box"),
        ("::", {socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"}, "10.0.0.7"),
        ("::", {socket.AF_INET6: "fd00::7"}, "fd00::7"),
        ("0:0::0", {socket.AF_INET6: "fd00::7"}, "fd00::7"),
        ("::", {}, "box"),
        ("10.0.0.9", {}, "10.0.0.9"),
        ("127.0.0.1", {socket.AF_INET: "10.0.0.7"}, "127.0.0.1"),
        ("gpu-box.lan", {}, "gpu-box.lan"),
    ],
)
def test_a_wildcard_becomes_an_address_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, routes: dict[socket.AddressFamily, str], found: str
) -> None:
    routed(monkeypatch, routes)
    assert reachable(Address(host, 50050)) == Address(found, 50050)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "10.0.0.9"])
def test_the_worker_line_starts_a_worker(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """`rpc-worker` takes it, joins there, and is reached from where the coordinator is."""
    routed(monkeypatch, {socket.AF_INET6: "fd00::7"})
    listen = Address(host, 50050)
    lines = announcement("tiny", Address("127.0.0.1", 8080), listen)
    program, *arguments = lines[-1].partition("add a worker:")[2].split()
    assert program == "rpc-worker"
    started: list[WorkerSettings] = []

    async def run_worker(settings: Any) -> None:
        started.append(settings)

    monkeypatch.setattr(worker_cli, "run_worker", run_worker)
    result = CliRunner().invoke(worker_cli.app, arguments)
    assert result.exception is None
    assert started[0].join == reachable_join(host)
    assert started[0].listen.is_loopback == listen.is_loopback


def reachable_join(host: str) -> Address:
    return {"0.0.0.0": Address("box", 50050), "::": parse_address("[fd00::7]:50050")}.get(host, Address(host, 50050))


def test_without_joining_no_worker_line() -> None:
    lines = announcement("tiny", Address("127.0.0.1", 8080), None)
    assert lines[0] == "tiny at http://127.0.0.1:8080, OpenAI base URL http://127.0.0.1:8080/v1"
    assert not any("rpc-worker" in line for line in lines)
