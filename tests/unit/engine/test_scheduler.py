"""The rules of planning, one by one, on a simulated pipeline that checks inputs, blocks and outputs."""

import pytest

from lamina.coordinator.engine.scheduler import Scheduler
from lamina.spec.errors import CapacityExceeded, InvalidPlan, InvalidRequest
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import FinishReason, FromSample, RemoveSequence, SampledToken, StepDone, StepPlan, Tokens
from support.sim_engine import SimEngine, config, request
from support.sim_pipeline import generate


def engine(**changes: object) -> SimEngine:
    return SimEngine(config(**changes))


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """(sequence, position, tokens, sampled?) of each slice."""
    return [(piece.seq, piece.pos, piece.num_tokens, piece.want_logits) for piece in plan.slices]


# -- what is accepted


def test_empty_and_oversize_requests_are_refused() -> None:
    """A-43: no prompt, no output wanted, or a prompt longer than the context or the pool."""
    scheduler = Scheduler(config(max_context=40, num_blocks=(64,)))
    for bad, problem in [
        (request((), 4), "the prompt is empty"),
        (request(range(41), 4), "the prompt has 41 tokens, at most 40 fit"),
        (request(range(4), 0), "max_tokens must be at least 1, got 0"),
    ]:
        with pytest.raises(InvalidRequest, match=problem):
            scheduler.add(bad, 0.0)
    small_pool = Scheduler(config(max_context=256, num_blocks=(3, 2)))
    with pytest.raises(InvalidRequest, match="at most 32 fit"):
        small_pool.add(request(range(33)), 0.0)
    assert scheduler.num_waiting == small_pool.num_waiting == 0


@pytest.mark.parametrize(("num_prompt", "wanted", "granted"), [(30, 4, 4), (37, 4, 4), (38, 4, 3), (40, 99, 1)])
def test_max_tokens_is_reduced_to_what_fits(num_prompt: int, wanted: int, granted: int) -> None:
    """A-43: of 40 positions, the last sampled token needs none; the finish reason is the length."""
    sim = engine(max_context=40)
    request_id = sim.add(request(range(num_prompt), wanted))
    assert sim.records[request_id].max_tokens == granted
    sim.drain()
    sim.check_outputs()
    assert len(sim.outputs[request_id]) == granted
    assert sim.ends[request_id].finish is FinishReason.LENGTH
    assert max(piece.end for issue in sim.issues for piece in issue.plan.slices) == num_prompt + granted - 1 <= 40


def test_full_queue_is_refused_and_recovers() -> None:
    """The limit counts those that wait, not those that run."""
    sim = engine(max_waiting=2)
    sim.add(request(range(4)))
    sim.add(request(range(4)))
    with pytest.raises(CapacityExceeded, match="2 requests wait, the limit is 2"):
        sim.add(request(range(4)))
    sim.issue()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 0)
    sim.add(request(range(4)))


# -- run-ahead


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_single_stream_runs_one_step_ahead(num_stages: int) -> None:
    """Two samples are outstanding at most: the input of the second is the sample of the first."""
    sim = engine(num_stages=num_stages)
    sim.add(request((5, 6, 7), 6))
    first, second = (issue.plan for issue in sim.issue_all())
    assert shape(first) == [(0, 0, 3, True)]
    assert shape(second) == [(0, 3, 1, True)]
    assert second.slices[0].input == FromSample(StepId(0), 0)
    sim.run_stages()
    sim.absorb()
    (third,) = (issue.plan for issue in sim.issue_all())
    assert third.slices[0].input == FromSample(StepId(1), 0)
    sim.drain()
    sim.check_outputs()
    assert len(sim.issues) == 6, "no sample is planned beyond max_tokens"


def test_token_that_is_known_travels_with_the_plan() -> None:
    """When every answer is back before the next plan, the input is the token itself."""
    sim = engine()
    request_id = sim.add(request((5, 6, 7), 6))
    sim.issue_all()
    sim.run_stages()
    sim.absorb()
    sim.absorb()
    issue = sim.issue()
    assert issue is not None
    assert issue.plan.slices[0].input == Tokens((sim.outputs[request_id][1],))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_outstanding_steps_are_bounded(num_stages: int) -> None:
    """2N at most, and all of them used when there are enough sequences."""
    sim = engine(num_stages=num_stages)
    for i in range(6):
        sim.add(request((i + 1,) * 5, 60))
    for i in range(30):
        sim.issue_all()
        assert sim.scheduler.num_outstanding <= 2 * num_stages
        assert i < 5 or sim.scheduler.num_outstanding == 2 * num_stages
        sim.run_stages()
        sim.absorb()


@pytest.mark.parametrize(
    ("num_stages", "num_sequences", "sizes"),
    [
        (1, 5, [5]),
        (2, 8, [4, 4]),
        (2, 5, [3, 2]),
        (3, 4, [2, 1, 1]),
        (4, 5, [2, 1, 1, 1]),
        (4, 11, [3, 3, 3, 2]),
        (4, 3, [1, 1, 1]),
    ],
)
def test_every_stage_has_a_micro_batch(num_stages: int, num_sequences: int, sizes: list[int]) -> None:
    """Rule 3: as many equal micro-batches as stages (or sequences), each waiting only for its own last turn."""
    sim = engine(num_stages=num_stages, max_seqs=16, max_logit_rows=16)
    for i in range(num_sequences):
        sim.add(request((i + 1,) * 3, 100))
    for _ in range(40):
        sim.step()
    plans = [issue.plan for issue in sim.issues[-5 * len(sizes) :]]
    assert sorted((len(plan.slices) for plan in plans[: len(sizes)]), reverse=True) == sizes
    for earlier, later in zip(plans, plans[len(sizes) :], strict=False):
        assert {piece.seq for piece in earlier.slices} == {piece.seq for piece in later.slices}


@pytest.mark.parametrize(("width", "sizes"), [(1.0, [6]), (1.5, [3, 3]), (2.7, [2, 2, 2])])
def test_micro_batches_are_as_many_as_overlap(width: float, sizes: list[int]) -> None:
    """Stages of one device take turns anyway: a second micro-batch would only read its weights again."""
    sim = engine(max_seqs=16, max_logit_rows=16, num_stages=3, pipeline_width=width)
    for i in range(6):
        sim.add(request((i + 1,) * 3, 100))
    for _ in range(40):
        sim.step()
    assert [len(issue.plan.slices) for issue in sim.issues[-len(sizes) :]] == sizes


def test_least_recently_issued_go_first() -> None:
    """More sequences decode than fit a step: they take turns, none waits twice."""
    sim = engine(max_seqs=2, num_stages=2, max_logit_rows=2)
    for i in range(4):
        sim.add(request((i + 1,) * 3, 40))
    for _ in range(30):
        sim.step()
    turns = [piece.seq for issue in sim.issues[-20:] for piece in issue.plan.slices]
    assert all(len(set(turns[i : i + 4])) == 4 for i in range(0, 36, 4))


# -- prefill


def test_long_prompt_is_prefilled_in_chunks_that_follow_each_other() -> None:
    """Pipelined prefill: all chunks are issued at once, nothing between them; only the last one samples."""
    sim = engine(num_stages=2, prefill_chunk_tokens=32)
    sim.add(request(range(100), 3))
    chunks = [shape(issue.plan) for issue in sim.issue_all()]
    assert chunks == [[(0, 0, 32, False)], [(0, 32, 32, False)], [(0, 64, 32, False)], [(0, 96, 4, True)]]
    sim.drain()
    sim.check_outputs()


def test_decode_goes_before_prefill() -> None:
    """A-42: of 20 rows two decode, 16 of the other 18 are a chunk to a block boundary; two too few are not wasted."""
    sim = engine(max_rows=20)
    sim.add(request((1, 2, 3), 30))
    sim.add(request((4, 5, 6), 30))
    sim.issue()
    sim.add(request(range(45), 5))
    issue = sim.issue()
    assert issue is not None
    assert shape(issue.plan) == [(0, 3, 1, True), (1, 3, 1, True), (2, 0, 16, False)]
    sim.drain()
    sim.check_outputs()


def test_chunk_smaller_than_a_block_makes_progress() -> None:
    sim = engine(max_rows=5)
    sim.add(request(range(12), 2))
    assert [shape(issue.plan) for issue in sim.issue_all()] == [[(0, 0, 5, False)], [(0, 5, 5, False)]]
    sim.drain()
    sim.check_outputs()


def test_several_prompts_share_a_step_in_order_of_arrival() -> None:
    """FCFS: the first prompt's chunk, then what is left goes to the next."""
    sim = engine(max_rows=64, prefill_chunk_tokens=48, prefix_caching=False)
    sim.add(request(range(100), 2))
    sim.add(request(range(20), 2))
    issue = sim.issue()
    assert issue is not None
    assert shape(issue.plan) == [(0, 0, 48, False), (1, 0, 16, False)]


def test_shortest_prefill_goes_first() -> None:
    """A-42: under spf a short prompt overtakes a long one, also one that is half done."""
    sim = engine(max_rows=32, policy="spf")
    sim.add(request(range(1, 101), 2))
    sim.issue()
    sim.add(request(range(2, 22), 2))
    issue = sim.issue()
    assert issue is not None
    assert shape(issue.plan) == [(1, 0, 20, True), (0, 32, 12, False)]
    sim.drain()
    sim.check_outputs()


def test_limits_of_a_step_hold() -> None:
    """max_seqs and max_logit_rows: with one logit row left the second prompt waits for its last chunk."""
    sim = engine(max_seqs=3, max_logit_rows=2, num_stages=2, min_prefill_rows=64)
    for i in range(4):
        sim.add(request((i + 1,) * 20, 4))
    issue = sim.issue()
    assert issue is not None
    assert shape(issue.plan) == [(0, 0, 20, True), (1, 0, 20, True), (2, 0, 16, False)]
    sim.drain()
    sim.check_outputs()


# -- ends


def test_rows_after_the_end_are_ignored_and_blocks_wait_for_them() -> None:
    """A stop token arrives while the next step is issued: its sample is discarded, removal follows its answer."""
    prompt = (5, 6, 7)
    stop = generate(prompt, 3, frozenset())[2]
    sim = engine(num_stages=2)
    sim.add(request(prompt, 9, stop_ids=(stop,)))
    while not sim.ends:
        sim.step()
    assert sim.ends[0].finish is FinishReason.STOP
    assert sim.scheduler.num_outstanding == 1
    assert sim.scheduler.kv_usage_ratio > 0
    assert sim.scheduler.take_removals() == ()
    assert sim.absorb() == ()
    assert sim.scheduler.take_removals() == (RemoveSequence(SeqId(0)),)
    assert sim.scheduler.kv_usage_ratio == 0
    sim.check_outputs()


def test_cancelled_request_leaves_the_next_plan_at_once() -> None:
    """Its blocks are free as soon as the issued steps that name it drain."""
    sim = engine()
    gone, stays = sim.add(request((1, 2, 3), 20)), sim.add(request((4, 5, 6), 20))
    sim.step()
    sim.cancel(gone)
    sim.cancel(gone)
    while sim.scheduler.num_outstanding:
        sim.run_stages()
        sim.absorb()
    issue = sim.issue()
    assert issue is not None
    assert [piece.seq for piece in issue.plan.slices] == [stays]
    assert sim.scheduler.num_running == 1
    sim.drain()
    sim.check_outputs()
    sim.check_idle()


def test_cancel_before_anything_was_issued_reaches_no_worker() -> None:
    sim = engine()
    sim.cancel(sim.add(request((1, 2, 3))))
    assert sim.issue() is None
    assert sim.scheduler.take_removals() == ()
    sim.check_idle()


def test_error_of_a_sequence_is_its_end_without_a_token() -> None:
    """NumericalError of one sequence: an event with the cause, nothing appended, the others go on."""
    scheduler = Scheduler(config())
    for prompt in ((1, 2), (3, 4)):
        scheduler.add(request(prompt, 5), 0.0)
    issue = scheduler.schedule(0.0)
    assert issue is not None
    cause = "NumericalError: the logits for position 2 are not finite"
    tokens = (SampledToken(SeqId(0), 2, 0, finish=FinishReason.ERROR, error=cause), SampledToken(SeqId(1), 2, 9))
    failed, fine = scheduler.absorb(StepDone(Epoch(0), StepId(0), tokens), 1.0)
    assert (failed.request_id, failed.finish, failed.error) == (0, FinishReason.ERROR, cause)
    assert (fine.request_id, fine.token, fine.finish) == (1, 9, None)
    assert scheduler.num_running == 1


def test_logprobs_pass_through() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request((1, 2), 5), 0.0)
    scheduler.schedule(0.0)
    token = SampledToken(SeqId(0), 2, 7, logprob=-0.5, top_logprobs=((7, -0.5), (3, -1.5)))
    (event,) = scheduler.absorb(StepDone(Epoch(0), StepId(0), (token,)), 1.0)
    assert (event.token, event.logprob, event.top) == (7, -0.5, ((7, -0.5), (3, -1.5)))


def test_last_token_ends_the_request_even_if_the_worker_does_not_say_so() -> None:
    """No request may hang on a missing finish reason."""
    scheduler = Scheduler(config())
    scheduler.add(request((1, 2), 1), 0.0)
    scheduler.schedule(0.0)
    (event,) = scheduler.absorb(StepDone(Epoch(0), StepId(0), (SampledToken(SeqId(0), 2, 7),)), 1.0)
    assert event.finish is FinishReason.LENGTH
    assert scheduler.num_running == 0


def test_answers_out_of_order_are_refused() -> None:
    """Each step is answered once, in order; a token must be for the position after the known ones."""
    scheduler = Scheduler(config())
    scheduler.add(request((1, 2), 5), 0.0)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    for step in (1, 2):
        with pytest.raises(InvalidPlan, match=f"answer to step {step}, expected that of step 0"):
            scheduler.absorb(StepDone(Epoch(0), StepId(step), ()), 1.0)
    with pytest.raises(InvalidPlan, match="token of sequence 0 for position 5, expected 2"):
        scheduler.absorb(StepDone(Epoch(0), StepId(0), (SampledToken(SeqId(0), 5, 7),)), 1.0)


def test_answers_of_another_epoch_and_unknown_sequences_are_discarded() -> None:
    scheduler = Scheduler(config(), Epoch(4))
    scheduler.add(request((1, 2), 5), 0.0)
    issue = scheduler.schedule(0.0)
    assert issue is not None
    assert issue.plan.epoch == 4
    assert scheduler.absorb(StepDone(Epoch(3), StepId(0), (SampledToken(SeqId(0), 2, 7),)), 1.0) == ()
    assert scheduler.absorb(StepDone(Epoch(4), StepId(0), (SampledToken(SeqId(77), 2, 7),)), 1.0) == ()


# -- the record


def test_record_keeps_times_and_counts() -> None:
    """Times are the `now`s of add, of the first slice, of the first token and of the last."""
    scheduler = Scheduler(config())
    request_id = scheduler.add(request((1, 2, 3), 2), 10.0)
    record = scheduler.record(request_id)
    scheduler.schedule(11.0)
    scheduler.schedule(11.5)
    scheduler.absorb(StepDone(Epoch(0), StepId(0), (SampledToken(SeqId(0), 3, 7),)), 12.0)
    assert record.finished_s is None
    end = SampledToken(SeqId(0), 4, 8, finish=FinishReason.LENGTH)
    scheduler.absorb(StepDone(Epoch(0), StepId(1), (end,)), 13.0)
    assert (record.queued_s, record.scheduled_s, record.first_token_s, record.finished_s) == (10.0, 11.0, 12.0, 13.0)
    assert (record.num_prompt_tokens, record.max_tokens) == (3, 2)
    with pytest.raises(KeyError):
        scheduler.record(request_id)
