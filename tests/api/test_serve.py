"""`coordinator serve` and the commands around it, as processes: loading, joining, losing a worker, draining, config."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cluster import ROOT, WorkerProcess, coordinator, running_workers
from support.server import running_cluster, running_server

pytestmark = pytest.mark.e2e

MODEL = ROOT / "tests/data/tiny_llama3.gguf"
TINY = ["--context", "256", "--parallel", "2"]


def test_answers_while_nobody_is_there_then_serves_who_joins() -> None:
    """503 loading from the first second; a worker that joins is used, one that joins after the split is said to idle.

    `status` and `devices` show them.
    """
    with running_server(str(MODEL), "--join-listen", "127.0.0.1:0", *TINY) as cluster:
        status, health = cluster.request("/health")
        assert (status, health["status"]) == (503, "loading")
        assert "join" in health["waiting_for"]
        assert cluster.request("/health/live")[0] == 200
        assert cluster.request("/v1/completions", {"prompt": "x"})[0] == 503
        join = cluster.server.wait_for(r"--join (\S+)")[1]
        cluster.server.wait_for(rf"waiting for 1 worker\(s\) to join at {join}: 0 of 1 have")
        with running_workers(1, "--join", join):
            cluster.wait_until_ready()
            status, answer = cluster.request("/v1/completions", {"prompt": "One, two,", "max_tokens": 3})
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
            shown = coordinator("status", "--url", cluster.url)
            assert ": ok" in shown.stdout
            assert "0-3" in shown.stdout
            listed = coordinator("devices", "--url", cluster.url, "--json")
            assert '"name": "w0"' in listed.stdout
            with late_worker(join) as late:
                told = cluster.server.wait_for(r"worker late at (\S+) holds no layers and idles")
                assert told[1] == late.address
                shown = coordinator("status", "--url", cluster.url)
                assert f"idle: worker late at {late.address} holds no layers" in shown.stdout
                end = time.monotonic() + 20  # until the next look at the workers
                while '"name": "late"' not in coordinator("devices", "--url", cluster.url, "--json").stdout:
                    assert time.monotonic() < end
            talk = coordinator("chat", "--url", cluster.url, "--max-tokens", "4", stdin="Hi\n/reset\nHi\n")
            assert talk.returncode == 0, talk.stderr
            assert len(talk.stdout.strip().splitlines()) >= 2
        port = cluster.url.rsplit(":", 1)[1]
        second = coordinator("serve", str(MODEL), "--port", port, "--join-listen", "127.0.0.1:0", timeout_s=30)
        assert second.returncode == 2
        assert "choose another --port" in second.stderr
        assert "Traceback" not in second.stderr


@contextmanager
def late_worker(join: str) -> Iterator[WorkerProcess]:
    """A worker that joins when the model has been split already."""
    worker = WorkerProcess("late", "--join", join)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        worker.stop()


def test_a_lost_worker_is_named_and_its_return_serves_again() -> None:
    """C-18, C-19: SIGKILL a worker; the server stays, says who is missing, serves again when it is back."""
    with running_cluster(MODEL, extra=TINY) as cluster:
        lost = cluster.workers[1]
        lost.kill()
        end = time.monotonic() + 10
        while cluster.request("/health")[0] == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert lost.address in cluster.request("/health")[1]["reason"]
        assert cluster.request("/v1/completions", {"prompt": "x"})[0] == 503
        again = WorkerProcess("w1", "--listen", lost.address)
        try:
            again.wait_until_ready()
            cluster.wait_until_ready()
            assert cluster.request("/v1/completions", {"prompt": "a prompt", "max_tokens": 4})[0] == 200
            time.sleep(2.5)  # the stages are looked at every two seconds
            metrics = cluster.text("/metrics")
            assert 'lamina_replans_total{reason="worker_lost"} 1.0' in metrics
            for worker, stage in (("w0", 0), ("w1", 1)):
                labels = f'stage="{stage}",worker="{worker}"'
                for name in (
                    f'lamina_stage_step_seconds_count{{phase="prefill",{labels}}}',
                    f'lamina_stage_step_seconds_count{{phase="decode",{labels}}}',
                    f"lamina_link_bytes_total{{{labels}}}",
                ):
                    assert float(metrics.split(f"{name} ")[1].split()[0]) > 0, name
        finally:
            again.stop()


def test_all_workers_lost_are_named_and_shown_as_down() -> None:
    with running_cluster(MODEL, extra=[*TINY, "--replan-after-s", "0"]) as cluster:
        gone = [worker.address for worker in cluster.workers]
        for worker in cluster.workers:
            worker.kill()
        cluster.server.wait_for(rf"w0 at {gone[0]} does not answer; worker w1 at {gone[1]} does not answer: start")
        reason = cluster.request("/health")[1]["reason"]
        assert all(address in reason for address in gone)
        end = time.monotonic() + 20  # until the next look at the workers
        while any(worker["up"] for worker in cluster.request("/admin/cluster")[1]["workers"]):
            assert time.monotonic() < end
            time.sleep(0.1)
        shown = coordinator("status", "--url", cluster.url).stdout
        assert re.findall(r"w(\d)/0 +no ", shown) == ["0", "1"]
        listed = coordinator("devices", "--url", cluster.url).stdout
        assert re.findall(r"w(\d) at \S+: down", listed) == ["0", "1"]


def test_a_worker_that_joined_and_is_gone_is_done_without() -> None:
    """Fewer than --num-workers carry on; whoever joins next makes up for it at the next loss."""
    options = ["--join-listen", "127.0.0.1:0", "--num-workers", "2", "--replan-after-s", "3"]
    with running_server(str(MODEL), *options, *TINY) as cluster:
        join = cluster.server.wait_for(r"--join (\S+)")[1]
        with running_workers(2, "--join", join) as workers:
            cluster.wait_until_ready()
            order = [stage["worker"] for stage in cluster.request("/admin/cluster")[1]["stages"]]
            workers[1].kill()
            cluster.server.wait_for(rf"worker w1 at {workers[1].address} does not answer; its layers go to w0")
            cluster.wait_until_ready()
            assert cluster.request("/v1/completions", {"prompt": "a prompt", "max_tokens": 4})[0] == 200
            assert sorted(order) == ["w0", "w1"]
            with late_worker(join) as late:
                cluster.server.wait_for(rf"worker late at {late.address} holds no layers and idles")
                workers[0].kill()
                cluster.server.wait_for(r"(?s)does not answer; its layers go to late.*ready")


def test_a_split_file_gives_layers_to_nobody_else(tmp_path: Path) -> None:
    with running_workers(2) as workers:
        split = tmp_path / "split.yaml"
        entries = [
            f"  - {{address: {worker.address}, layers: {2 * i}-{2 * i + 1}}}" for i, worker in enumerate(workers)
        ]
        split.write_text("\n".join(["workers:", *entries]))
        options = ["--split-file", str(split), "--replan-after-s", "0", *TINY]
        with running_server(str(MODEL), *options, workers=workers) as cluster:
            cluster.wait_until_ready()
            workers[0].kill()
            cluster.server.wait_for(
                r"w0 at \S+ does not answer: start it again, --split-file gives its layers to nobody"
            )
            assert "--split-file" in cluster.request("/health")[1]["reason"]


def test_sigterm_finishes_what_runs_and_an_impossible_split_ends_the_server() -> None:
    with running_cluster(MODEL, num_workers=1, extra=TINY) as cluster:
        answers: list[int] = []
        body = {"prompt": "One, two,", "max_tokens": 120, "ignore_eos": True}

        def ask() -> None:
            status, answer = cluster.request("/v1/completions", body)
            answers.extend((status, answer["usage"]["completion_tokens"]))

        asking = threading.Thread(target=ask)
        asking.start()
        end = time.monotonic() + 10
        while cluster.request("/admin/cluster")[1]["num_requests_running"] == 0:
            assert time.monotonic() < end
        assert cluster.server.stop(signal.SIGTERM) == 0
        asking.join(20)
        assert answers == [200, 120]
        (worker,) = cluster.workers
        assert worker.popen.poll() is None
        arguments = ["serve", str(MODEL), "--workers", worker.address, "--split", "0-1", "--port", "0"]
        impossible = coordinator(*arguments, timeout_s=30)
        assert impossible.returncode == 2
        assert "0-3" in impossible.stderr
