"""A worker dies while answers are under way: the streams stay open and go on, for as long as the operator allows."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.cluster import WorkerProcess, coordinator
from support.models import smollm2_path
from support.server import Cluster, running_cluster

pytestmark = pytest.mark.e2e

OPTIONS = ["--context", "1K", "--parallel", "2", "--ping-s", "0.5"]
BODY = {"prompt": "The sea is", "max_tokens": 200, "ignore_eos": True, "temperature": 0.8, "seed": 5, "stream": True}


class Stream:
    """A streamed completion, read on a thread."""

    def __init__(self, cluster: Cluster, **changes: object) -> None:
        self.text = ""
        self.num_pings = 0
        self.error: dict[str, Any] | None = None
        self.has_ended = False
        self._thread = threading.Thread(target=self._read, args=(cluster, {**BODY, **changes}))
        self._thread.start()

    def _read(self, cluster: Cluster, body: dict[str, object]) -> None:
        for line in cluster.lines("/v1/completions", body):
            self.num_pings += line.startswith(":")
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                self.has_ended = True
            elif data != line:
                event = json.loads(data)
                self.error = event.get("error")
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    def wait_for_text(self) -> None:
        end = time.monotonic() + 30
        while not self.text:
            assert time.monotonic() < end
            time.sleep(0.01)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def returned(lost: WorkerProcess, *options: str) -> Iterator[None]:
    """The worker again, where it was."""
    again = WorkerProcess("w1", "--listen", lost.address, *options)
    try:
        again.wait_until_ready()
        yield
    finally:
        again.stop()


def test_streams_outlive_a_lost_worker() -> None:
    """C-18: the text is the one that an undisturbed run gives, a grammar goes on, pings keep the connection alive."""
    array = {"type": "array", "items": {"type": "integer"}, "minItems": 100}  # not done before the worker is lost
    form = {"type": "json_schema", "json_schema": {"schema": array}}
    schema: dict[str, object] = {"response_format": form, "max_tokens": 150, "ignore_eos": False}
    with running_cluster(smollm2_path(), extra=OPTIONS) as cluster:
        whole = Stream(cluster)
        whole.join()
        streams = [Stream(cluster), Stream(cluster, **schema)]
        for stream in streams:
            stream.wait_for_text()
        lost = cluster.workers[1]
        lost.kill()
        cluster.server.wait_for(r"2 open request\(s\) wait up to 60 s")
        assert "2 open request(s) wait for the model" in coordinator("status", "--url", cluster.url).stdout
        assert "lamina_num_requests_open 2.0" in cluster.text("/metrics")
        assert cluster.request("/v1/completions", {"prompt": "x"})[0] == 503
        time.sleep(1.2)
        with returned(lost):
            for stream in streams:
                stream.join()
            assert [(stream.error, stream.has_ended) for stream in streams] == [(None, True)] * 2
            assert streams[0].text == whole.text
            assert streams[1].text.startswith("[")
            assert streams[0].num_pings > 0
            cluster.wait_until_ready()
            assert cluster.request("/admin/cluster")[1]["epoch"] == 2
            assert 'lamina_replans_total{reason="worker_lost"} 1.0' in cluster.text("/metrics")
        cluster.workers[0].wait_for(r"stage \S+#0 adopts layers")  # it was not read from the disk again


def test_a_worker_lost_for_good_is_done_without() -> None:
    """Its layers go to those that are left; when it comes back it idles, and no stream is disturbed."""
    with running_cluster(smollm2_path(), 3, extra=[*OPTIONS, "--replan-after-s", "5"]) as cluster:
        whole = Stream(cluster)
        whole.join()
        stream = Stream(cluster)
        stream.wait_for_text()
        lost = cluster.workers[1]
        lost.kill()
        cluster.server.wait_for(rf"worker w1 at {lost.address} does not answer; 5 s after the loss the others")
        assert lost.address in cluster.request("/health")[1]["reason"]
        stream.join()
        assert (stream.text, stream.error, stream.has_ended) == (whole.text, None, True)
        cluster.server.wait_for(rf"worker w1 at {lost.address} does not answer; its layers go to w0, w2")
        stages = cluster.request("/admin/cluster")[1]["stages"]
        assert [(stage["worker"], stage["num_layers"]) for stage in stages[:2]] == [("w0", 15), ("w2", 15)]
        end = time.monotonic() + 20  # until it has been dialled in vain
        while f"absent: the worker at {lost.address}" not in coordinator("status", "--url", cluster.url).stdout:
            assert time.monotonic() < end
        with returned(lost):
            idle = rf"worker w1 at {lost.address} holds no layers and idles: the split works without it; restart"
            cluster.server.wait_for(idle)
            shown = coordinator("status", "--url", cluster.url).stdout
            assert f"idle: worker w1 at {lost.address}" in shown
            assert "absent" not in shown
            after = Stream(cluster)
            after.join()
            assert after.text == whole.text
            assert cluster.request("/admin/cluster")[1]["epoch"] == 2
            cluster.workers[2].kill()  # the next load may use it
            cluster.server.wait_for(r"(?s)its layers go to w0, w1.*ready")
            assert {stage["worker"] for stage in cluster.request("/admin/cluster")[1]["stages"]} == {"w0", "w1"}


def test_what_is_left_has_no_room() -> None:
    """503 with the numbers and what to do, said once in the log; the worker's return serves again."""
    small = ("--max-memory", "120M")
    with running_cluster(smollm2_path(), options=small, extra=[*OPTIONS, "--replan-after-s", "0"]) as cluster:
        lost = cluster.workers[1]
        lost.kill()
        gone = rf"worker w1 at {lost.address} does not answer: start it again. Without it the model does not fit: "
        line = (
            gone + r"[\d.]+ MiB needed \(.*\), free MiB: w0/0 [\d.]+, less 5% in reserve: [\d.]+ MiB are missing; add"
        )
        cluster.server.wait_for(line)
        time.sleep(5)
        assert len(re.findall(gone, "".join(cluster.server.lines))) == 1
        status, answer = cluster.request("/v1/completions", {"prompt": "x"})
        assert status == 503
        assert re.search(line, answer["error"]["message"])
        with returned(lost, *small):
            cluster.wait_until_ready()


def test_waiting_is_bounded() -> None:
    with running_cluster(smollm2_path(), extra=[*OPTIONS, "--recover-s", "1"]) as cluster:
        stream = Stream(cluster, max_tokens=900)
        stream.wait_for_text()
        cluster.workers[1].kill()
        stream.join()
        assert stream.error is not None
        assert stream.error["code"] == "worker_lost"
        assert "not back within 1 s" in stream.error["message"]
        assert not stream.has_ended
