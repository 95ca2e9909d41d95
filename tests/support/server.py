"""A whole cluster for tests: workers and `coordinator serve` as real processes on free loopback ports, always ended."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import Process, WorkerProcess, addresses, running_workers, start_coordinator

READY_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Running processes; `url` is the server's root."""

    url: str
    server: Process
    workers: Sequence[WorkerProcess]

    def request(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON body); an object as body makes it a POST."""
        data = None if body is None else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, all_headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def lines(self, path: str, body: object) -> Iterator[str]:
        """The lines of the answer to a POST as they come, without their ends."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                yield line.decode().rstrip("\n")

    def text(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def wait_until_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Until /health says ok."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and self.server.popen.poll() is None:
            if self.request("/health")[0] == 200:
                return
            time.sleep(0.05)
        raise AssertionError("the server did not become ready:\n" + "".join(self.server.lines))


@contextmanager
def running_server(*arguments: str, workers: Sequence[WorkerProcess] = ()) -> Iterator[Cluster]:
    """`coordinator serve` on a free port, as soon as it listens; it is ended on the way out."""
    server = start_coordinator("serve", *arguments, "--port", "0")
    try:
        yield Cluster(server.wait_for(r"at (http://\S+:\d+)")[1], server, workers)
    finally:
        server.stop()


@contextmanager
def running_cluster(
    model: Path,
    num_workers: int = 2,
    device: str = "cpu",
    extra: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Workers of one device each and a server that is ready; `extra` goes to `coordinator serve`, `options` to them."""
    with (
        running_workers(num_workers, *options, device=device) as workers,
        running_server(str(model), "--workers", addresses(workers), *extra, workers=workers) as cluster,
    ):
        cluster.wait_until_ready()
        yield cluster
