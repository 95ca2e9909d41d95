"""Prefix sharing, on a simulated pipeline that checks every block that is read or written."""

import pytest

from lamina.coordinator.engine.sequence import RequestId
from lamina.spec.step import StepPlan
from support.sim_engine import SimEngine, config, request
from support.sim_pipeline import generate


def engine(**changes: object) -> SimEngine:
    return SimEngine(config(**changes))


def computed(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """Sequence -> positions that the step computes."""
    return {piece.seq: (piece.pos, piece.end) for piece in plan.slices}


def num_prefilled(sim: SimEngine) -> int:
    """Rows of all prefill chunks: those whose tokens came with the plan, less single known tokens of decodes."""
    return sum(piece.num_tokens for issue in sim.issues for piece in issue.plan.slices if piece.num_tokens > 1)


def test_shared_prefix_is_computed_once() -> None:
    """B-18: of the second prompt only what follows the 64 shared tokens is computed; counters and usage say so."""
    sim = engine()
    system = tuple(range(1, 65))
    sim.add(request((*system, 101, 102), 4))
    sim.drain()
    second = sim.add(request((*system, 111, 112, 113), 4))
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {1: (64, 67)}
    assert issue.adds[0].num_prompt == 67
    sim.drain()
    sim.check_outputs()
    assert sim.records[second].num_cached_tokens == 64
    assert (sim.scheduler.num_prefix_queries, sim.scheduler.num_prefix_hits) == (66 + 67, 64)


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_at_least_one_token_is_computed(num_prompt: int, num_cached: int) -> None:
    """A-45: a prompt that is wholly cached still computes its last block; the cached one is not written."""
    sim = engine()
    prompt = range(1, num_prompt + 1)
    sim.add(request(prompt, 3))
    sim.drain()
    again = sim.add(request(prompt, 3))
    sim.drain()
    assert sim.records[again].num_cached_tokens == num_cached
    sim.check_outputs()
    sim.check_idle()


def test_simultaneous_cold_requests_prefill_once_in_one_step() -> None:
    """A-46: the blocks that one step fills are there for the others in the same step."""
    sim = engine()
    prompt = tuple(range(1, 41))
    for tail in (101, 102, 103):
        sim.add(request((*prompt, tail), 4))
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {0: (0, 41), 1: (32, 41), 2: (32, 41)}
    sim.drain()
    sim.check_outputs()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_simultaneous_cold_requests_prefill_once_over_many_steps(num_stages: int) -> None:
    """A-46: while the first computes chunk by chunk the others wait for it instead of doing the same."""
    sim = engine(prefill_chunk_tokens=16, num_stages=num_stages)
    prompt = tuple(range(1, 101))
    ids = [sim.add(request((*prompt, tail), 4)) for tail in (101, 102, 103)]
    sim.drain()
    sim.check_outputs()
    assert num_prefilled(sim) == 101 + 2 * 5
    assert [sim.records[i].num_cached_tokens for i in ids] == [0, 96, 96]


def test_other_prompts_do_not_wait_for_a_cold_one() -> None:
    """Only the very next block counts: same beginning but another second block goes on at once."""
    sim = engine(prefill_chunk_tokens=16)
    first = tuple(range(1, 17))
    sim.add(request((*first, *range(20, 60)), 2))
    sim.add(request((*first, *range(60, 100)), 2))
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {0: (0, 16), 1: (16, 32)}


def test_waiting_for_a_cold_prefix_ends_with_a_cancellation() -> None:
    """Single flight must not hang on the one that flew: the next in line computes what is missing."""
    sim = engine(prefill_chunk_tokens=16)
    prompt = tuple(range(1, 101))
    first = sim.add(request(prompt, 4))
    sim.add(request(prompt, 4))
    sim.issue()
    sim.cancel(first)
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {1: (16, 32)}
    sim.drain()
    sim.check_outputs()


def test_goal_of_880_of_904_tokens() -> None:
    """A-46, B-19: a shared beginning of 880 tokens leaves 24 of 904 rows to compute."""
    sim = engine(max_rows=512, max_context=2048, num_blocks=(256,), prefill_chunk_tokens=512)
    shared = tuple(1 + i % 150 for i in range(880))
    sim.add(request((*shared, *range(1, 25)), 2))
    sim.drain()
    warm = sim.add(request((*shared, *range(30, 54)), 2))
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {1: (880, 904)}
    assert sim.records[warm].num_cached_tokens == 880


def test_next_turn_finds_prompt_and_answer() -> None:
    """Full blocks of generated tokens are indexed once their KV is written: prompt 20 + 29 known and forwarded."""
    sim = engine()
    prompt = tuple(range(1, 21))
    sim.add(request(prompt, 30))
    sim.drain()
    answer = generate(prompt, 30, frozenset())
    turn = sim.add(request((*prompt, *answer, 7, 8, 9), 3))
    sim.drain()
    assert sim.records[turn].num_cached_tokens == 48
    sim.check_outputs()


@pytest.mark.parametrize(("max_tokens", "num_cached"), [(12, 16), (13, 32)])
def test_token_that_was_sampled_but_not_forwarded_is_not_indexed(max_tokens: int, num_cached: int) -> None:
    """A-45: 20 + 12 tokens fill two blocks, but the last one's KV was never written."""
    sim = engine()
    prompt = tuple(range(1, 21))
    sim.add(request(prompt, max_tokens))
    sim.drain()
    turn = sim.add(request((*prompt, *generate(prompt, max_tokens, frozenset()), *range(100, 120)), 3))
    sim.drain()
    assert sim.records[turn].num_cached_tokens == num_cached
    sim.check_outputs()


def test_running_sequence_shares_what_it_has_generated() -> None:
    """A block of generated tokens is found as soon as it is full and done, while its owner goes on."""
    sim = engine()
    prompt = tuple(range(1, 11))
    sim.add(request(prompt, 60))
    while len(sim.outputs[RequestId(0)]) < 30:
        sim.step()
    fork = sim.add(request((*prompt, *sim.outputs[RequestId(0)][:24]), 5))
    sim.drain()
    assert sim.records[fork].num_cached_tokens == 32
    sim.check_outputs()
    sim.check_idle()


def test_same_tokens_under_another_salt_are_not_shared() -> None:
    """B-22: no hit across tenants."""
    sim = engine()
    for salt in ("one", "two", "one"):
        request_id = sim.add(request(range(1, 41), 2, salt=salt))
        sim.drain()
        assert sim.records[request_id].num_cached_tokens == (32 if request_id == 2 else 0)
    sim.check_outputs()


def test_without_prefix_caching_nothing_is_shared() -> None:
    """B-18: off means off, also for simultaneous requests."""
    sim = engine(prefix_caching=False)
    for _ in range(2):
        sim.add(request(range(1, 41), 2))
        sim.add(request(range(1, 41), 2))
        sim.drain()
    assert num_prefilled(sim) == 160
    assert sim.scheduler.num_prefix_hits == 0
    assert sim.scheduler.kv_usage_ratio == 0
    sim.check_outputs()


def test_four_writers_from_one_prefix() -> None:
    """B-21: n = 4 choices share the prompt's full blocks; the partly filled one is each one's own."""
    sim = engine(num_stages=2, max_rows=128, min_prefill_rows=128)
    prompt = tuple(range(1, 43))
    for _ in range(4):
        sim.add(request(prompt, 40))
    sim.drain()
    sim.check_outputs()
    assert num_prefilled(sim) == 42 + 3 * 10
    tables = [piece.new_blocks[0] for issue in sim.issues for piece in issue.plan.slices if piece.num_tokens > 1]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 4
    assert len({table[2] for table in tables}) == 4


def test_cache_gives_way_to_sequences_and_lru_goes_first() -> None:
    """Cached blocks count as free; the prompt that was used last survives, the one before it does not."""
    sim = engine(num_blocks=(8,), max_context=128)
    a, b, c = (tuple(range(start, start + 48)) for start in (1, 60, 120))
    for prompt in (a, b, a, c):
        sim.add(request(prompt, 1))
        sim.drain()
    assert sim.scheduler.kv_usage_ratio == 0
    found = {}
    for name, prompt in (("c", c), ("a", a), ("b", b)):
        request_id = sim.add(request((*prompt, 7), 1))
        sim.drain()
        found[name] = sim.records[request_id].num_cached_tokens
    assert (found["a"], found["c"]) == (48, 48)
    assert found["b"] < 48
    sim.check_outputs()


def test_cyclic_set_beyond_capacity_is_never_reused() -> None:
    """A-46: under LRU, prompts that come round after more than the pool holds find nothing."""
    sim = engine(num_blocks=(8,), max_context=128)
    prompts = [tuple(range(start, start + 49)) for start in (1, 50, 100, 150)]
    for prompt in prompts * 3:
        sim.add(request(prompt, 1))
        sim.drain()
    assert sim.scheduler.num_prefix_hits == 0


def test_preempted_sequence_finds_its_own_blocks() -> None:
    """Recompute is cheap while the cache still has them, and usage does not call that a hit of the user's prompt."""
    sim = engine(num_blocks=(6,), max_context=96)
    ids = [sim.add(request((i,) * 20, 50)) for i in (1, 2)]
    sim.drain()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions
    assert sim.scheduler.num_prefix_hits > 0
    assert [sim.records[i].num_cached_tokens for i in ids] == [0, 0]


def test_usage_counts_tables_only() -> None:
    """40 + 8 tokens hold three of eight blocks; shared ones count once."""
    sim = engine(num_blocks=(8,))
    sim.add(request(range(1, 41), 8))
    sim.issue()
    assert sim.scheduler.kv_usage_ratio == 3 / 8
    sim.add(request(range(1, 41), 8))
    sim.issue()
    assert sim.scheduler.kv_usage_ratio == 4 / 8


def test_twin_of_a_cached_block_costs_no_promised_block() -> None:
    """A-41: the last prompt block is cached and computed again; to hold both is not worth a block that is promised."""
    sim = engine(num_blocks=(4,), admission="reserve")
    prompt = tuple(range(1, 33))
    sim.add(request(prompt, 1))
    sim.drain()
    sim.add(request(prompt, 33))
    while sim.issue_all() or sim.pipeline.answers:
        sim.check_blocks()
        sim.run_stages()
        sim.absorb()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions == 0
    sim.check_idle()


def test_twin_of_a_cached_block_lets_the_answer_be_indexed() -> None:
    """A prompt of whole blocks, asked twice: the second answer's blocks continue the first one's context."""
    sim = engine()
    prompt = tuple(range(1, 33))
    sim.add(request(prompt, 1))
    sim.drain()
    sim.add(request(prompt, 40))
    sim.drain()
    turn = sim.add(request((*prompt, *generate(prompt, 40, frozenset()), 7, 8), 2))
    sim.drain()
    assert sim.records[turn].num_cached_tokens == 64
    sim.check_outputs()
    sim.check_idle()


def test_block_is_not_shared_before_its_last_token_is_issued() -> None:
    """A-45: a chunk of 15 leaves the first block one token short of full; who needs it waits, though rows are left."""
    sim = engine(prefill_chunk_tokens=15, max_rows=20)
    shared = tuple(range(1, 17))
    ids = [sim.add(request((*shared, *range(start, start + 30)), 3)) for start in (50, 100)]
    first, second = sim.issue(), sim.issue()
    assert first is not None
    assert second is not None
    assert computed(first.plan) == {0: (0, 15)}
    assert computed(second.plan) == {0: (15, 16), 1: (16, 31)}
    sim.drain()
    sim.check_outputs()
    assert [sim.records[i].num_cached_tokens for i in ids] == [0, 16]


def test_last_block_of_a_prompt_is_not_waited_for() -> None:
    """It has to be computed anyway, so a second one does that beside the first."""
    sim = engine(prefill_chunk_tokens=16)
    for _ in range(2):
        sim.add(request(range(1, 33), 3))
    issue = sim.issue()
    assert issue is not None
    assert computed(issue.plan) == {0: (0, 16), 1: (16, 32)}
    sim.drain()
    sim.check_outputs()
