"""The peer end to end: generated files load in llama.cpp, locally and over RPC. Needs its environment (`make peer`)."""

import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import shapes
from contest import Contestant, ContestantFailed, child_environment, free_port, stop_process, wait_for_port
from peer import peer_python, server_command, start_peer

from support.models import smollm2_path


def _peer_is_here() -> bool:
    try:
        return bool(peer_python())
    except FileNotFoundError:
        return False


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not _peer_is_here(), reason="no llama.cpp: run `make peer`")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"layers": 4, "hidden": 256, "ff": 512, "heads": 4, "kv_heads": 2, "vocab": 49200, "context": 512}
    path = tmp_path_factory.mktemp("peer") / "small.gguf"
    shapes.write_shape(replace(shapes.SHAPES["llama1b"], **small), path, smollm2_path())
    return path


def _measure(peer: Contestant) -> list[float]:
    return [
        peer.ask("prefill", num_tokens=40, salt=1),
        peer.ask("decode", depth=40, num_tokens=4, salt=2),
        peer.ask("decode", depth=0, num_tokens=4, salt=2),
        peer.ask("streams", num_streams=3, num_tokens=4, salt=3),
    ]


def test_generated_file_runs_in_llama_cpp(model: Path) -> None:
    with closing(start_peer()) as peer:
        facts = peer.ask("load", model=str(model), threads=1, num_ctx=256)
        assert facts["layers"] == {"CPU": 5}
        assert all(rate > 0 for rate in _measure(peer))


def test_rpc_servers_get_the_layers(model: Path) -> None:
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [
        subprocess.Popen(server_command(endpoint, 1), text=True, env=child_environment()) for endpoint in endpoints
    ]
    try:
        for endpoint in endpoints:
            wait_for_port("127.0.0.1", int(endpoint.rpartition(":")[2]))
        with closing(start_peer()) as peer:
            facts = peer.ask("load", model=str(model), threads=1, servers=endpoints, num_ctx=256)
            assert set(facts["layers"]) == {"RPC0", "RPC1"}
            assert sum(facts["layers"].values()) == 5
            assert all(rate > 0 for rate in _measure(peer))
    finally:
        for server in servers:
            stop_process(server)


def test_a_file_it_cannot_load_is_said(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    with closing(start_peer()) as peer, pytest.raises(ContestantFailed, match="cannot load"):
        peer.ask("load", model=str(path), threads=1)
