"""Admission, preemption and prefix sharing, on a simulated pipeline that checks every block that is read or written."""

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


# -- admission


def test_optimistic_admission_leaves_a_margin() -> None:
    """A-41: the prompt's blocks and one for each running sequence; the second waits though its prompt would fit."""
    sim = engine(num_blocks=(5,))
    sim.add(request((1,) * 40, 8))
    sim.add(request((2,) * 32, 8))
    sim.issue()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (1, 1)
    sim.drain()
    sim.check_outputs()
    roomy = engine(num_blocks=(6,))
    roomy.add(request((1,) * 40, 8))
    roomy.add(request((2,) * 32, 8))
    roomy.issue()
    assert roomy.scheduler.num_running == 2


@pytest.mark.parametrize(("max_tokens", "num_admitted"), [(16, 2), (17, 1)])
def test_reserve_admission_is_exact(max_tokens: int, num_admitted: int) -> None:
    """A-41: prompt + max_new - 1 positions, rounded up: 17 + 16 - 1 = 32 are two blocks, one more is three."""
    sim = engine(num_blocks=(4,), admission="reserve")
    for first in (1, 2):
        sim.add(request((first,) * 17, max_tokens))
    sim.issue()
    assert sim.scheduler.num_running == num_admitted
    sim.drain()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions == 0


def test_policy_order_is_never_bypassed() -> None:
    """A-41: the first that waits does not fit, so the small one behind it is not admitted either."""
    sim = engine(num_blocks=(8,))
    sim.add(request((1,) * 60, 30))
    big, small = sim.add(request((2,) * 60, 30)), sim.add(request((3,) * 4, 4))
    for _ in range(12):
        sim.step()
    assert sim.records[big].scheduled_s is None
    assert sim.records[small].scheduled_s is None
    sim.drain()
    sim.check_outputs()
    first, second = sim.records[big].scheduled_s, sim.records[small].scheduled_s
    assert first is not None
    assert second is not None
    assert first <= second


# -- preemption


def test_newest_is_preempted_when_blocks_run_out() -> None:
    """A-41: the newest gives way, drains first, waits at the head, and comes back with its output as history."""
    sim = engine(num_blocks=(4,), num_stages=2, prefix_caching=False)
    old, new, behind = (sim.add(request((i,) * 15, 30)) for i in (1, 2, 3))
    while not sim.scheduler.num_preemptions:
        sim.step()
    assert sim.records[new].num_preemptions + sim.records[behind].num_preemptions == 1
    preempted = behind if sim.records[behind].num_preemptions else new
    assert preempted == max(i for i in (old, new, behind) if sim.records[i].scheduled_s is not None)
    num_known = len(sim.outputs[preempted])
    sim.drain()
    sim.check_outputs()
    again = [add for issue in sim.issues for add in issue.adds if add.num_generated]
    assert again[0].history_ids[:15] == sim.requests[preempted].prompt_ids
    assert again[0].num_generated >= num_known
    assert sim.records[old].num_preemptions == 0
    assert len({add.seq for issue in sim.issues for add in issue.adds}) == sum(len(issue.adds) for issue in sim.issues)
    sim.check_idle()


def test_preempted_sequence_keeps_its_blocks_until_its_steps_are_done() -> None:
    """While a step that names it is outstanding nothing of it is free, and its samples still count."""
    sim = engine(num_blocks=(3,), prefix_caching=False, max_context=32)
    sim.add(request((1,) * 15, 10))
    new = sim.add(request((2,) * 15, 10))
    while not sim.scheduler.num_preemptions:
        sim.issue_all()
        if not sim.scheduler.num_preemptions:
            sim.run_stages()
            sim.absorb()
    num_known = len(sim.outputs[new])
    (last_step,) = [issue.plan.step for issue in sim.issues if 1 in computed(issue.plan)][-1:]
    assert last_step >= sim.pipeline.num_answered
    sim.run_stages()
    while sim.pipeline.num_answered <= last_step:
        assert sim.scheduler.kv_usage_ratio == 1.0
        sim.absorb()
    assert sim.scheduler.kv_usage_ratio == 2 / 3
    assert len(sim.outputs[new]) > num_known
    sim.drain()
    sim.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "spf"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_everybody_finishes_when_one_context_fits_the_pool(policy: str, num_stages: int) -> None:
    """No deadlock: twelve requests that each need the whole pool in the end."""
    sim = engine(num_blocks=(6,), max_context=96, policy=policy, num_stages=num_stages)
    for i in range(12):
        sim.add(request((i + 1,) * (3 + 5 * i), 96))
    sim.drain(max_steps=5_000)
    sim.check_outputs()
    assert sim.scheduler.num_preemptions
    assert all(len(sim.requests[i].prompt_ids) + len(output) == 97 for i, output in sim.outputs.items())
    sim.check_idle()


def test_reserve_never_preempts_under_pressure() -> None:
    """A-41: an admitted request always finishes without preemption."""
    sim = engine(num_blocks=(6,), max_context=96, admission="reserve", num_stages=2)
    for i in range(12):
        sim.add(request((i % 3 + 1,) * (3 + 5 * i), 30))
    sim.drain()
    sim.check_outputs()
    assert sim.scheduler.num_preemptions == 0


# -- prefix cache


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
    assert issue.adds[0].history_ids == (*system, 111, 112, 113), "penalties see the cached part too"
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
    sim = engine(num_stages=2, max_rows=128)
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


# -- corners


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


def test_decode_does_not_take_what_is_promised_to_a_prefill() -> None:
    """The old sequence grows while the new one's prompt goes in token by token: the new one gives way as a whole."""
    sim = engine(num_blocks=(6,), prefill_chunk_tokens=1, prefix_caching=False)
    sim.add(request((1,) * 16, 60))
    new = sim.add(request((2,) * 60, 4))
    for _ in range(80):
        sim.step()
        sim.check_blocks()
    assert sim.records[new].num_preemptions
    sim.drain()
    sim.check_outputs()


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
