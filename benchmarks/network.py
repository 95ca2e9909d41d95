"""Two hosts on one machine: network namespaces joined by a veth pair of 1 Gbit/s, relays for the distance between them.

Needs root, `ip` and `tc` with tbf. What it makes it takes away again.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from contest import HERE, child_environment, stop_process

RATE = "1gbit"
DELAY_US = 150.0
_BURST = "256kb"
_SUBNET = "10.177.0"


class NoNetwork(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


@dataclass(slots=True)
class TwoHosts:
    """Namespaces A (address .1) and B (.2). `prefix` runs a command in one, `relay` leads from it to the other."""

    names: tuple[str, str] = field(default_factory=lambda: (f"lamina-a-{os.getpid()}", f"lamina-b-{os.getpid()}"))
    addresses: tuple[str, str] = (f"{_SUBNET}.1", f"{_SUBNET}.2")
    _relays: list["subprocess.Popen[str]"] = field(default_factory=list)
    _next_port: int = 21000

    def __enter__(self) -> "TwoHosts":
        if not hasattr(os, "geteuid") or os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
            raise NoNetwork("network namespaces need root, ip and tc")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NoNetwork(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._relays:
            stop_process(process)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _make(self) -> None:
        a, b = self.names
        ends = (f"lam{os.getpid() % 10**6}a", f"lam{os.getpid() % 10**6}b")
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", a, "type", "veth", "peer", "name", ends[1], "netns", b)
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            shaping = ["tbf", "rate", RATE, "burst", _BURST, "latency", "20ms"]
            _run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *shaping])

    def prefix(self, host: int) -> list[str]:
        """Put this before a command to run it on host 0 (A) or 1 (B)."""
        return ["ip", "netns", "exec", self.names[host]]

    def port(self) -> int:
        """A port that nobody on either host has."""
        self._next_port += 1
        return self._next_port

    def relay(self, host: int, port: int, delay_us: float = DELAY_US, entry_port: int = 0) -> str:
        """An address on `host` that leads, late, to `port` of the other host."""
        entry = f"{self.addresses[host]}:{entry_port or self.port()}"
        words = [sys.executable, str(HERE / "relay.py"), entry, f"{self.addresses[1 - host]}:{port}", str(delay_us)]
        self._relays.append(subprocess.Popen([*self.prefix(host), *words], text=True, env=child_environment()))
        return entry

    def wait_for(self, host: int, address: str, deadline_s: float = 20.0) -> None:
        """Until something accepts connections at `address`, as seen from `host`."""
        probe = [*self.prefix(host), sys.executable, "-c", _PROBE, *address.rsplit(":", 1)]
        end = time.monotonic() + deadline_s
        while subprocess.run(probe, capture_output=True, check=False).returncode:
            if time.monotonic() > end:
                raise NoNetwork(f"nothing listens on {address} after {deadline_s:g} s")
            time.sleep(0.1)

    def round_trip_us(self, num_pings: int = 200, delay_us: float = DELAY_US) -> float:
        """Median round trip of 8 KiB from A to B through a relay, to be quoted beside what is measured."""
        port = self.port()
        words = [*self.prefix(1), sys.executable, str(HERE / "network.py"), "echo", self.addresses[1], str(port)]
        echo = subprocess.Popen(words, text=True, env=child_environment())
        try:
            self.wait_for(0, f"{self.addresses[1]}:{port}")
            entry = self.relay(0, port, delay_us)
            self.wait_for(0, entry)
            ping = [*self.prefix(0), sys.executable, str(HERE / "network.py"), "ping", *entry.split(":")]
            return float(_run([*ping, str(num_pings)]))
        finally:
            stop_process(echo)


_PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"
_PING_BYTES = 8192


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(words: Sequence[str]) -> str:
    return subprocess.run(list(words), capture_output=True, text=True, check=True).stdout


def _echo(host: str, port: int) -> None:
    with socket.create_server((host, port)) as server:
        while True:
            end, _ = server.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with end:
                while chunk := end.recv(1 << 16):
                    end.sendall(chunk)


def _ping(host: str, port: int, num_pings: int) -> float:
    times = []
    with socket.create_connection((host, port)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_pings):
            start = time.perf_counter()
            end.sendall(bytes(_PING_BYTES))
            left = _PING_BYTES
            while left:
                left -= len(end.recv(left))
            times.append(time.perf_counter() - start)
    return sorted(times)[num_pings // 2] * 1e6


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _echo(sys.argv[2], int(sys.argv[3]))
    else:
        print(_ping(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
