"""Configuration and the order of waiting."""

import pytest

from lamina.coordinator.engine.policy import WaitingQueue
from lamina.coordinator.engine.sequence import RequestId, RequestRecord, Sequence
from lamina.spec.errors import InvalidConfig
from support.sim_engine import config, request


def sequence(arrival: int, num_tokens: int, scheduled_s: float | None = None) -> Sequence:
    record = RequestRecord(RequestId(arrival), num_tokens, 1, 0.0, scheduled_s)
    return Sequence(request(range(num_tokens)), record, list(range(num_tokens)), num_tokens)


def order(queue: WaitingQueue) -> list[int]:
    """Arrival numbers in the order in which the queue gives them away."""
    found = []
    while (seq := queue.first) is not None:
        found.append(seq.record.request_id)
        queue.remove(seq)
    return found


def test_fcfs_is_by_arrival_whoever_comes_back() -> None:
    """A-41: a preempted sequence, older than all that wait, is at the head again."""
    queue = WaitingQueue("fcfs")
    for seq in (sequence(5, 3), sequence(6, 90), sequence(2, 40, scheduled_s=1.0), sequence(1, 70, scheduled_s=1.0)):
        queue.add(seq)
    assert len(queue) == 4
    assert order(queue) == [1, 2, 5, 6]


def test_spf_is_by_length_after_those_that_have_run() -> None:
    """A-42: the fewest tokens first; of equals the earlier; preempted ones in front."""
    queue = WaitingQueue("spf")
    for seq in (sequence(5, 30), sequence(6, 9), sequence(4, 9), sequence(1, 70, scheduled_s=1.0)):
        queue.add(seq)
    assert order(queue) == [1, 4, 6, 5]


def test_remove_takes_the_very_sequence() -> None:
    queue = WaitingQueue("spf")
    sequences = [sequence(i, 9) for i in range(5)]
    for seq in sequences:
        queue.add(seq)
    queue.remove(sequences[2])
    assert order(queue) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"admission": "hope"}, "admission 'hope' is none of optimistic, reserve"),
        ({"policy": "lifo"}, "policy 'lifo' is none of fcfs, spf"),
        ({"num_blocks": ()}, "num_blocks names no cache group"),
        ({"num_blocks": (8, 0)}, "num_blocks must be at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens must be at least 1, got 0"),
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
    ],
)
def test_bad_configuration_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        config(**changes)


@pytest.mark.parametrize(("num_stages", "outstanding"), [(1, 2), (2, 4), (5, 10), (40, 64)])
def test_outstanding_steps_are_two_per_stage_within_the_contract(num_stages: int, outstanding: int) -> None:
    """Rule 2 and 3: each stage runs one and has one at hand; a stage holds back MAX_RUN_AHEAD at most."""
    assert config(num_stages=num_stages).max_outstanding == outstanding
