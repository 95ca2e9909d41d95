"""What the CUDA benchmarks make of what they measured; the measuring itself needs a card."""

import pytest
from cuda_all import JOBS, host_times, path_of_sources
from cuda_peer import PEER, peer_of
from cuda_worker import parser


def test_the_hosts_time_is_what_a_worker_takes_beyond_the_backend() -> None:
    """611 tokens/s through a worker, 628 of the recording alone: 1,636.7 and 1,592.4 us a token."""
    entries = [
        {"name": "cuda.backend.decode.qwen7b.b1.d0", "value": 628.0, "unit": "tokens/s"},
        {"name": "cuda.backend.decode.qwen7b.b8.d0", "value": 3672.0, "unit": "tokens/s"},
        {"name": "cuda.decode.qwen7b.b1.d0", "value": 611.0, "unit": "tokens/s"},
        {"name": "cuda.decode.qwen7b.b8.d0", "value": 3565.0, "unit": "tokens/s"},
        {"name": "cuda.backend.decode.llama8b.b1.d0", "value": 580.0, "unit": "tokens/s"},
    ]
    [found] = host_times(entries)
    assert (found["name"], found["unit"]) == ("cuda.host.decode.qwen7b", "us")
    assert found["value"] == pytest.approx(44.3, abs=0.05)


def test_the_backend_is_compared_with_the_same_peer_as_a_worker() -> None:
    assert peer_of("cuda.backend.prefill.qwen7b.p512") == peer_of("cuda.prefill.qwen7b.p512") == 9723.0
    assert peer_of("cuda.prefill.qwen7b.p2048") is None
    assert all(name.startswith("cuda.") and rate > 0 for name, rate in PEER.items())


def test_a_benchmark_runs_on_the_sources_it_lies_beside() -> None:
    first, *_ = path_of_sources().split(":")
    assert first.endswith("/proto")


def test_the_worker_benchmark_understands_what_it_is_asked() -> None:
    asked = {job.name: parser().parse_args(job.arguments[1:]) for job in JOBS if "cuda_worker" in job.arguments[0]}
    assert asked["worker.qwen7b"].only == [
        "cuda.decode.*",
        "cuda.prefill.*",
        "cuda.rpc.*",
        "cuda.stages2.*",
        "cuda.mixed.*",
    ]
    assert asked["worker.llama1b"].only == []
    assert asked["cards2.qwen7b"].devices == ["cuda:0", "cuda:1"]
