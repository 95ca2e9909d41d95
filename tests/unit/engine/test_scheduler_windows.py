"""Cache groups with a sliding window: blocks that come back, hits, admission, on a pipeline that checks every read."""

import pytest

from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.spec.errors import InvalidConfig, InvalidRequest
from lamina.spec.ids import SeqId
from lamina.spec.memory import window_blocks
from lamina.spec.step import SampledToken, StepDone
from support.sim_engine import SimEngine, config, request

WINDOW = 18  # the first of two blocks that a block's first position sees is needed for one position only
CHUNK = 16
QUOTA = window_blocks(WINDOW, CHUNK)


def windowed(num_window_blocks: int, **changes: object) -> SchedulerConfig:
    """A group that keeps all positions of 64 blocks, and one with a window."""
    base: dict[str, object] = {
        "max_context": 1024,
        "num_blocks": (64, num_window_blocks),
        "windows": (None, WINDOW),
        "prefill_chunk_tokens": CHUNK,
        "run_ahead": 1,
    }
    return config(**(base | changes))


def text(length: int, family: int = 1) -> tuple[int, ...]:
    return tuple(1 + (i * i * family) % 199 for i in range(length))


def test_what_a_window_needs() -> None:
    """Rows of a chunk and what the first of them sees, wherever the chunk begins in a block."""
    for window in (1, 2, 15, 16, 17, 128):
        for rows in (1, 2, 15, 16, 17):
            spans = [(pos + rows - 1) // 16 - (pos - window + 1) // 16 + 1 for pos in range(1024, 1040)]
            assert max(spans) <= window_blocks(window, rows) <= max(spans) + 1


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_sequence_holds_its_window_however_long_its_context(num_stages: int) -> None:
    """900 positions through the fewest blocks that there can be, in chunks and token by token."""
    sim = SimEngine(windowed(QUOTA, num_stages=num_stages))
    sim.add(request(text(700), 200))
    most = 0
    while sim.issue_all() or sim.pipeline.answers:
        ledger = sim.scheduler.ledger
        most = max(most, ledger.num_window_by_state["used"])  # type: ignore[index]
        sim.check_blocks()
        sim.run_stages()
        sim.absorb()
    assert most == QUOTA
    assert sim.scheduler.num_preemptions == 0
    sim.check_outputs()
    sim.check_idle()


def test_a_prompt_of_100_000_tokens() -> None:
    """gpt-oss's shape: 128 tokens of window, two stages; chunks run ahead as far as the pool lets them."""
    limits = SchedulerConfig(
        num_stages=2,
        max_rows=512,
        max_seqs=1,
        max_logit_rows=1,
        max_context=131072,
        num_blocks=(8192, 170),
        windows=(None, 128),
        min_prefill_rows=512,
    )
    scheduler = Scheduler(limits)
    scheduler.add(request(range(100_000), 40), 0.0)
    pos, most_ahead = 100_000, 0
    outstanding = []
    while True:
        while (issue := scheduler.schedule(0.0)) is not None:
            outstanding.append(issue.plan)
        if not outstanding:
            break
        most_ahead = max(most_ahead, len(outstanding))
        plan = outstanding.pop(0)
        tokens = [SampledToken(piece.seq, piece.end, 7) for piece in plan.slices if piece.want_logits]
        pos += len(tokens)
        scheduler.absorb(StepDone(plan.epoch, plan.step, tuple(tokens)), 0.0)
    assert pos == 100_040
    assert most_ahead == 4
    assert not scheduler.num_running
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_each_admitted_sequence_is_entitled_to_its_window(admission: str) -> None:
    """Two long prompts fit, the third waits until one decodes and needs less; nobody is preempted."""
    sim = SimEngine(windowed(2 * QUOTA, admission=admission, max_rows=32))
    for family in (1, 3, 5):
        sim.add(request(text(200, family), 30))
    sim.issue()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 1)
    sim.drain()
    sim.check_outputs()
    sim.check_idle()
    assert sim.scheduler.num_preemptions == 0


def test_short_sequences_are_preempted_for_the_oldest() -> None:
    """Optimistic: short prompts in the pool of one long sequence; they grow, and the newest make room."""
    sim = SimEngine(windowed(window_blocks(100, CHUNK), windows=(None, 100)))
    for family in range(1, 6):
        sim.add(request(text(8, family), 60))
    sim.drain()
    sim.check_outputs()
    sim.check_idle()
    assert sim.scheduler.num_preemptions > 0


def test_a_pool_below_the_quota_bounds_the_context() -> None:
    """What needs no more blocks than there are can be served, the rest is refused."""
    sim = SimEngine(windowed(QUOTA - 1))
    assert sim.scheduler.capacity_tokens == 16 * (QUOTA - 1)
    with pytest.raises(InvalidRequest, match="at most 48 fit"):
        sim.add(request(text(49), 1))
    sim.add(request(text(36), 100))
    sim.drain()
    assert len(sim.outputs[0]) == 13
    sim.check_outputs()


def test_a_hit_needs_the_window_before_its_end() -> None:
    """Evicted windows make a shorter hit or none; whoever computes them anew brings them back."""
    sim = SimEngine(windowed(QUOTA + 4, prefill_chunk_tokens=CHUNK))
    shared = text(128)

    def cached(tail: int, length: int = 128) -> int:
        id_ = sim.add(request((*shared[:length], tail), 1))
        sim.drain()
        return sim.records[id_].num_cached_tokens

    assert cached(7) == 0
    assert cached(8) == 128
    assert cached(9, length=96) == 96
    sim.add(request(text(190, 3), 1))  # its windows take all blocks
    sim.drain()
    assert cached(10) == 0
    assert cached(11) == 128
    sim.check_outputs()
    sim.check_idle()


def test_windows_of_a_poisoned_sequence_are_not_found() -> None:
    """A-05: nobody has read them and got a finite answer."""
    sim = SimEngine(windowed(QUOTA + 8))
    id_ = sim.add(request(text(70), 4))
    sim.issue()
    sim.pipeline.nonfinite.add(sim.issues[0].plan.slices[0].seq)
    sim.drain()
    assert sim.outputs[id_] == []
    again = sim.add(request(text(70), 4))
    sim.drain()
    assert sim.records[again].num_cached_tokens == 0
    assert len(sim.outputs[again]) == 4


def test_windows_that_come_back_are_not_trusted_for_what_was_there() -> None:
    """A-05: a node that somebody reads, and has proven, gets its window from a sequence whose answer is not finite."""
    sim = SimEngine(windowed(2 * QUOTA))
    first = sim.add(request(text(65), 300))
    while len(sim.outputs[first]) < 200:
        sim.step()
    second = sim.add(request(text(65), 4))
    while sim.records[second].scheduled_s is None:
        sim.step()
    assert sim.records[second].num_cached_tokens == 0
    sim.pipeline.nonfinite.add(SeqId(1))
    while second not in sim.ends:
        sim.step()
    assert sim.outputs[second] == []
    third = sim.add(request(text(65), 4))
    sim.drain()
    assert sim.records[third].num_cached_tokens == 0
    sim.check_outputs()


def test_who_preempts_itself_goes_on_at_once() -> None:
    """Alone, with nothing under way, it gives up what it shared with one that has ended: no answer will wake it."""
    sim = SimEngine(windowed(2 * QUOTA, num_blocks=(16, 2 * QUOTA), max_context=256, num_stages=2))
    first = sim.add(request(text(33), 140))
    while len(sim.outputs[first]) < 132:
        sim.step()
    second = sim.add(request(text(33), 220))
    sim.drain()
    sim.check_outputs()
    sim.check_idle()
    assert sim.records[second].num_preemptions > 0


def test_an_epoch_that_is_lost_takes_the_windows_with_it() -> None:
    """Everything is computed again under other limits."""
    sim = SimEngine(windowed(QUOTA + 2))
    for family in (1, 3):
        sim.add(request(text(100, family), 20))
    for _ in range(9):
        sim.step()
    sim.restart(windowed(QUOTA, num_stages=2))
    sim.drain()
    sim.check_outputs()
    sim.check_idle()


@pytest.mark.parametrize("windows", [(8, 8), (None,), (None, 8, 8), (None, 0)])
def test_windows_that_make_no_sense(windows: tuple[int | None, ...]) -> None:
    """One group keeps all positions; a window has a token at least."""
    with pytest.raises(InvalidConfig):
        Scheduler(windowed(8, windows=windows))
