"""The load generator and the rates taken from arrival times."""

import json

import pytest
from load import Answer, request_bytes
from ours import common_rate
from relay import copy_late
from split import balanced, balanced_ranges, timed

from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from support.models import smollm2_path


def test_rate_counts_only_while_all_streams_run() -> None:
    """From 2.0 to 4.0 both run: tokens at 3, 4 of the first, 2.5, 3.5 of the second."""
    assert common_rate([[1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.5, 9.0]]) == pytest.approx(4 / 2.0)


def test_streams_that_never_meet_have_no_rate() -> None:
    with pytest.raises(RuntimeError, match="did not overlap"):
        common_rate([[1.0, 2.0], [3.0, 4.0]])


def test_split_by_measured_time() -> None:
    """Layers of 0.3 ms and a head of 2.4 ms: (30 layers and the head) / 2 = 5.7 ms = 19 layers."""
    assert timed("0-21,22-29", [0.3 * 22, 0.3 * 8 + 2.4]) == "0-18,19-29"
    assert timed("0-14,15-29", [0.3 * 15, 0.3 * 15 + 2.4]) == "0-18,19-29"
    assert timed("0-14,15-29", [0.3 * 15, 0.3 * 15 + 90.0]) == "0-28,29-29"  # a stage needs a layer


def test_request_is_http_with_the_prompt_as_ids() -> None:
    head, _, body = request_bytes("h:1", [1, 2], 5).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    document = json.loads(body)
    assert document["prompt"] == [1, 2]
    assert (document["max_tokens"], document["ignore_eos"], document["temperature"]) == (5, True, 0.0)


def test_tokens_are_what_the_server_says_it_made() -> None:
    answer = Answer(tail=b'data: {"choices":[],"usage":{"completion_tokens":17,"total_tokens":20}}\n\ndata: [DONE]\n\n')
    assert answer.num_tokens == 17
    with pytest.raises(RuntimeError, match="without usage, HTTP 429"):
        _ = Answer(status=429, tail=b'{"error":{}}').num_tokens


def test_split_balances_bytes_with_the_head() -> None:
    """SmolLM2's head weighs as much as 8.6 of its layers at Q8_0, so the last of two stages has fewer layers."""
    file = read_gguf(smollm2_path())
    spec = model_spec(file, model_digest(file))
    first, last = balanced_ranges(spec, file.tensors, 2)
    assert (first.start, first.stop, last.stop) == (0, last.start, 30)
    layer = sum(t.num_bytes for name, t in file.tensors.items() if name.startswith("blk.0."))
    head = file.tensors["token_embd.weight"].num_bytes
    loads = {k: max(k * layer, (30 - k) * layer + head) for k in range(1, 30)}
    assert len(first) == min(loads, key=loads.__getitem__)
    assert balanced(str(smollm2_path()), 1) == "0-29"
    assert [len(r) for r in balanced_ranges(spec, file.tensors, 30)] == [1] * 30


def test_relay_holds_bytes_for_the_delay_and_passes_the_end_on() -> None:
    import socket
    import threading
    import time

    near, source = socket.socketpair()
    target, far = socket.socketpair()
    threading.Thread(target=copy_late, args=(source, target, 0.05), daemon=True).start()
    start = time.perf_counter()
    near.sendall(b"abc")
    assert far.recv(10) == b"abc"
    assert 0.05 <= time.perf_counter() - start < 1.0
    near.shutdown(socket.SHUT_WR)
    assert far.recv(10) == b""
