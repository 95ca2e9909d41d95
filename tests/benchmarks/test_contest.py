"""Contestants: commands in, results or errors out; a death is noticed."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contest import Contestant, ContestantFailed, Tail, random_ids
from local import Case, cases_of
from rpc import name_of

CHILD = """
import sys
sys.path.insert(0, {benchmarks!r})
from contest import serve_commands
def fail(): raise ValueError("no luck")
def noise():
    print("a library's chatter")
    return 1
serve_commands({{"double": lambda x: 2 * x, "fail": fail, "noise": noise, "die": lambda: sys.exit("gone"),
                 "sleep": lambda: __import__("time").sleep(5)}})
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Contestant]:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(benchmarks=str(Path(__file__).resolve().parents[2] / "benchmarks")))
    contestant = Contestant("child", [sys.executable, str(script)])
    yield contestant
    contestant.close()


def test_answers_come_back_one_by_one(child: Contestant) -> None:
    assert [child.ask("double", x=x) for x in (1, 2.5, "ab")] == [2, 5.0, "abab"]


def test_what_a_library_prints_is_no_answer(child: Contestant) -> None:
    assert child.ask("noise") == 1
    assert child.ask("double", x=3) == 6


def test_an_error_is_raised_here_and_the_child_goes_on(child: Contestant) -> None:
    with pytest.raises(ContestantFailed, match="child: fail: ValueError: no luck"):
        child.ask("fail")
    assert child.ask("double", x=4) == 8


def test_a_death_is_noticed_with_its_last_words(child: Contestant) -> None:
    with pytest.raises(ContestantFailed, match="died during die"):
        child.ask("die", timeout_s=10)
    with pytest.raises(ContestantFailed, match="gone"):
        child.ask("double", x=1)


def test_a_slow_answer_is_given_up(child: Contestant) -> None:
    start = time.monotonic()
    with pytest.raises(ContestantFailed, match=r"no answer to sleep within 0\.2 s"):
        child.ask("sleep", timeout_s=0.2)
    assert time.monotonic() - start < 3


def test_waiting_for_a_line_ends_with_the_pipe() -> None:
    import re

    tail = Tail()
    tail.follow(iter(["one\n", "listening on 127.0.0.1:5\n"]))
    assert tail.wait_for(re.compile(r"listening on (\S+)"), 5)[1] == "127.0.0.1:5"
    with pytest.raises(ContestantFailed, match="one"):
        tail.wait_for(re.compile("never"), 5)


def test_random_ids_are_the_same_on_both_sides_and_differ_by_salt() -> None:
    ids = random_ids(1000, 7)
    assert ids == random_ids(1000, 7)
    assert ids != random_ids(1000, 8)
    assert 300 <= min(ids) <= max(ids) < 49152
    assert len(set(ids)) > 900


def test_figures_are_named_as_agreed() -> None:
    quick = {case.name for model in ("smollm2", "qwen05b") for t in (1, 2) for case in cases_of(model, t, quick=True)}
    assert {"decode.smollm2.t1.d0", "prefill.qwen05b.t1.p128", "streams8.smollm2.t2"} <= quick
    full = {case.name for case in cases_of("llama1b", 2, quick=False)}
    assert {"decode.llama1b.t2.d4k", "decode.llama1b.t2.d1k", "prefill.llama1b.t2.p512", "streams16.llama1b.t2"} <= full
    assert name_of(Case("llama1b", 1, "decode", 0), "rpc") == "rpc.decode.llama1b.d0"
    assert name_of(Case("smollm2", 1, "prefill", 128), "rpc") == "rpc.prefill.smollm2.p128"
    assert name_of(Case("smollm2", 1, "streams", 8), "rpc") == "rpc.streams8.smollm2"
