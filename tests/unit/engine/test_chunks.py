"""How prompts are cut into chunks for the stages of a pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.coordinator.engine.policy import PrefillPace, prefill_rows
from lamina.spec.step import BLOCK_TOKENS
from support.sim_engine import SimEngine, config, request

LIMITS = {"max_rows": 512, "prefill_chunk_tokens": 512, "max_context": 1024, "num_blocks": (64,)}


def cut(num_tokens: int, budget: int = 512, *, width: float = 2.0, min_rows: int = 24, step_cost: int = 8) -> list[int]:
    """What each step takes of a prompt."""
    steps, left = [], num_tokens
    while left:
        steps.append(prefill_rows(left, num_tokens, budget, width=width, min_rows=min_rows, step_cost=step_cost))
        left -= steps[-1]
    return steps


def chunks(sim: SimEngine) -> list[list[tuple[int, int]]]:
    """(sequence, rows) of the prefill chunks of every step that has any."""
    steps = [[(p.seq, p.num_tokens) for p in issue.plan.slices if p.num_tokens > 1] for issue in sim.issues]
    return [step for step in steps if step]


@pytest.mark.parametrize(
    ("num_tokens", "width", "steps"),
    [
        (512, 1.0, [512]),
        (1000, 1.0, [512, 488]),
        (33, 2.0, [33]),
        (64, 2.0, [32, 32]),
        (100, 2.0, [32, 32, 36]),
        (128, 2.0, [32] * 4),
        (129, 2.0, [32, 32, 32, 33]),
        (512, 2.0, [64] * 8),
        (2048, 2.0, [128] * 16),
        (128, 1.45, [48, 48, 32]),
        (512, 4.0, [32] * 16),
    ],
)
def test_steps_of_a_prompt(num_tokens: int, width: float, steps: list[int]) -> None:
    """About equal, with no rest of a few rows; the more stages overlap the smaller, and none at all where none does."""
    assert cut(num_tokens, width=width) == steps


@pytest.mark.parametrize(
    ("num_tokens", "budget", "steps"),
    [(512, 512, [512]), (767, 1024, [767]), (1024, 2048, [512, 512]), (1100, 512, [368, 368, 364])],
)
def test_a_gpu_is_given_many_rows(num_tokens: int, budget: int, steps: list[int]) -> None:
    """A step that costs as much as 250 rows: no step is added below 512, those that the budget asks for are equal."""
    assert cut(num_tokens, budget, min_rows=512, step_cost=250) == steps


@given(
    num_tokens=st.integers(1, 3000),
    budget=st.integers(1, 600),
    width=st.floats(1.0, 8.0),
    min_rows=st.integers(1, 512),
    step_cost=st.integers(1, 250),
)
def test_steps_of_any_prompt(num_tokens: int, budget: int, width: float, min_rows: int, step_cost: int) -> None:
    """Every token once, no empty step, the budget holds; all steps but the last are equal, and that is like them."""
    steps = cut(num_tokens, budget, width=width, min_rows=min_rows, step_cost=step_cost)
    assert sum(steps) == num_tokens
    assert 1 <= min(steps) <= max(steps) <= budget
    if width == 1:
        assert len(steps) == -(-num_tokens // budget)
        return
    first, last = steps[0], steps[-1]
    assert set(steps[:-1]) <= {first}
    assert last < 2 * first
    if budget >= num_tokens + BLOCK_TOKENS:
        assert first > min(num_tokens, min_rows) - BLOCK_TOKENS
        assert last >= min(first / 2, 2 * step_cost)


@given(num_tokens=st.integers(32, 2000), width=st.floats(1.1, 8.0), cost=st.integers(1, 32))
def test_the_pipeline_is_about_as_fast_as_any_equal_cut_makes_it(num_tokens: int, width: float, cost: int) -> None:
    """(k + width - 1) (cost + n / k) of the chosen k is within a tenth of the least, where steps may be that short."""

    def time(num_steps: int) -> float:
        return (num_steps + width - 1) * (cost + num_tokens / num_steps)

    most = max(1, num_tokens // 32)
    chosen = len(cut(num_tokens, 4096, width=width, min_rows=32, step_cost=cost))
    assert time(chosen) <= 1.1 * min(map(time, range(1, most + 1)))


@pytest.mark.parametrize(("num_stages", "steps"), [(1, [512]), (2, [64] * 8), (4, [32] * 16)])
def test_prompt_is_cut_for_the_pipeline(num_stages: int, steps: list[int]) -> None:
    sim = SimEngine(config(num_stages=num_stages, **LIMITS))
    sim.add(request(tuple(i % 199 for i in range(512)), 1))
    sim.drain()
    assert chunks(sim) == [[(0, rows)] for rows in steps]
    sim.check_outputs()


def test_stages_of_one_device_get_the_prompt_whole() -> None:
    """They take turns however it is cut."""
    sim = SimEngine(config(num_stages=3, pipeline_width=1.0, **LIMITS))
    sim.add(request(tuple(i % 199 for i in range(500)), 1))
    sim.drain()
    assert chunks(sim) == [[(0, 500)]]


def test_prompts_that_come_together_fill_the_pipeline_one_after_the_other() -> None:
    """128 tokens in all: steps of 32 as for one prompt, so the first prompt's token does not wait for the others."""
    sim = SimEngine(config(num_stages=2, prefix_caching=False, **LIMITS))
    for i in range(4):
        sim.add(request((i + 1,) * 32, 3))
    sim.issue_all()
    assert chunks(sim) == [[(i, 32)] for i in range(4)]
    sim.drain()
    sim.check_outputs()


def test_short_prompts_share_a_step() -> None:
    """Eight of 16 tokens: two in each of four steps. One of 20 is not cut for the sake of a step of 32."""
    sim = SimEngine(config(num_stages=2, prefix_caching=False, **LIMITS))
    for i in range(8):
        sim.add(request((i + 1,) * 16, 3))
    sim.drain()
    assert [[rows for _, rows in step] for step in chunks(sim)] == [[16, 16]] * 4
    sim.add(request((20,) * 20, 3))
    sim.add(request((21,) * 20, 3))
    sim.add(request((22,) * 24, 3))
    sim.drain()
    assert [[rows for _, rows in step] for step in chunks(sim)[4:]] == [[20, 20], [24]]
    sim.check_outputs()


def test_prefill_chunk_tokens_is_a_maximum() -> None:
    """What would be steps of 32 is cut further."""
    sim = SimEngine(config(num_stages=2, **{**LIMITS, "prefill_chunk_tokens": 16}))
    sim.add(request((1,) * 100, 1))
    sim.drain()
    assert chunks(sim) == [[(0, 16)]] * 6 + [[(0, 4)]]


def test_decodes_ride_along() -> None:
    """What decodes takes nothing from the prompt's share of a step."""
    sim = SimEngine(config(num_stages=2, **LIMITS))
    sim.add(request((7,) * 20, 30))
    for _ in range(4):
        sim.step()
    sim.add(request(tuple(range(1, 129)), 3))
    sim.drain()
    assert chunks(sim)[1:] == [[(1, 32)]] * 4
    sim.check_outputs()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_share_is_that_of_what_waited_when_the_last_prompt_came(num_stages: int) -> None:
    """It does not shrink with what is left, grows with what comes, and begins anew when nothing is left."""
    pace = PrefillPace(config(num_stages=num_stages))
    first = pace.next_rows(2048, 4096)
    assert pace.next_rows(2048 - first, 4096) == pytest.approx(first, abs=BLOCK_TOKENS)
    assert pace.next_rows(8000, 4096) > first
    assert pace.next_rows(0, 4096) == 0
    assert pace.next_rows(2048, 4096) == first
    assert pace.next_rows(2048, 0) == 0
