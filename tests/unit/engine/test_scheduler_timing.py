"""What the plans are worth in time: a pipeline of stages with given step times, and an event queue for a clock."""

import heapq
from dataclasses import dataclass, field
from itertools import count

import pytest

from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import RequestRecord, SequenceRequest
from lamina.spec.step import FromSample, SampledToken, StepDone, StepPlan
from support.sim_engine import config, request

Arrival = tuple[float, SequenceRequest]
STEP_S, ROW_S, HOP_S = 1.0, 0.02, 0.02


@dataclass
class Clock:
    """Stages run steps in order, each as soon as its input is there; answers reach the coordinator `delay_s` later."""

    config: SchedulerConfig
    delay_s: float = 0.1
    busy_s: list[float] = field(default_factory=list)  # by stage, in the second half of the time
    records: list[RequestRecord] = field(default_factory=list)

    def run(self, arrivals: list[Arrival], end_s: float) -> None:
        scheduler, num_stages = Scheduler(self.config), self.config.num_stages
        self.busy_s, free_s = [0.0] * num_stages, [0.0] * num_stages
        sampled_s: dict[int, float] = {}  # by step: when its tokens are at stage 0
        order = count()
        queue: list[tuple[float, int, SequenceRequest | StepDone]] = [(s, next(order), new) for s, new in arrivals]
        heapq.heapify(queue)
        while queue and queue[0][0] < end_s:
            now, _, event = heapq.heappop(queue)
            if isinstance(event, StepDone):
                scheduler.absorb(event, now)
            else:
                self.records.append(scheduler.record(scheduler.add(event, now)))
            while (issue := scheduler.schedule(now)) is not None:
                plan = issue.plan
                sampled_s[plan.step] = self._execute(plan, now, free_s, sampled_s, end_s)
                tokens = tuple(SampledToken(piece.seq, piece.end, 5) for piece in plan.sampled())
                done = StepDone(plan.epoch, plan.step, tokens)
                heapq.heappush(queue, (sampled_s[plan.step] + self.delay_s, next(order), done))

    def _execute(
        self, plan: StepPlan, now: float, free_s: list[float], sampled_s: dict[int, float], end_s: float
    ) -> float:
        inputs = [piece.input for piece in plan.slices]
        ready = max([now + HOP_S, *(sampled_s[source.step] for source in inputs if isinstance(source, FromSample))])
        duration = STEP_S + ROW_S * plan.num_rows
        for stage in range(len(free_s)):
            start = max(ready, free_s[stage])
            free_s[stage] = start + duration
            self.busy_s[stage] += max(0.0, min(free_s[stage], end_s) - max(start, end_s / 2))
            ready = free_s[stage] + HOP_S
        return ready


def first_token_s(record: RequestRecord) -> float:
    """Time to first token."""
    assert record.first_token_s is not None
    return record.first_token_s - record.queued_s


@pytest.mark.parametrize("spacing_s", [0.0, 0.3])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_stage_is_busy(num_stages: int, spacing_s: float) -> None:
    """Rule 3: with as many streams as stages or more, every stage computes > 90 % of the time, however they arrived."""
    for num_streams in range(num_stages, 3 * num_stages + 2):
        clock = Clock(
            config(num_stages=num_stages, max_seqs=16, max_logit_rows=16, max_context=4096, num_blocks=(999,))
        )
        clock.run([(i * spacing_s, request((i + 1,) * 20, 900)) for i in range(num_streams)], end_s=300.0)
        assert min(clock.busy_s) > 0.9 * 150.0, (num_streams, clock.busy_s)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_coordinator_is_on_no_tokens_critical_path(num_stages: int) -> None:
    """Rule 2: for one stream a slow coordinator costs nothing while it answers within a token's own time."""
    rates = []
    for delay_s in (0.0, 0.9 * num_stages * STEP_S):
        clock = Clock(config(num_stages=num_stages, max_context=4096, num_blocks=(999,)), delay_s)
        clock.run([(0.0, request(range(1, 20), 2000))], end_s=600.0)
        rates.append(clock.busy_s[0])
    assert rates[1] == pytest.approx(rates[0], rel=0.01)


def test_chunks_of_a_long_prompt_overlap() -> None:
    """Pipelined prefill: 8 chunks over 4 stages take 8 + 3 step times, not 8 x 4."""
    clock = Clock(config(num_stages=4, prefill_chunk_tokens=16))
    clock.run([(0.0, request(range(1, 129), 2))], end_s=100.0)
    step_s = STEP_S + 16 * ROW_S
    assert first_token_s(clock.records[0]) == pytest.approx((8 + 3) * step_s, rel=0.1)


def test_short_behind_long_is_fast_under_spf() -> None:
    """A-42: shortest-prefill-first cuts the time to first token of a short prompt behind a long one several times."""
    found = {}
    for policy in ("fcfs", "spf"):
        clock = Clock(config(policy=policy, prefill_chunk_tokens=64, max_context=4096, num_blocks=(999,)))
        arrivals = [(0.0, request((1,) * 2000, 4)), (0.5, request((2,) * 30, 4))]
        clock.run(arrivals, end_s=300.0)
        found[policy] = [first_token_s(record) for record in clock.records]
    assert found["spf"][1] < found["fcfs"][1] / 5
    assert found["spf"][0] < found["fcfs"][0] * 1.1


def test_warm_prefix_cuts_time_to_first_token() -> None:
    """B-19: at least five times on a long prompt, by a simulated clock."""
    clock = Clock(config(max_rows=512, prefill_chunk_tokens=512, max_context=4096, num_blocks=(999,)))
    prompt = tuple(1 + i % 190 for i in range(1000))
    clock.run([(0.0, request((*prompt, 3), 4)), (100.0, request((*prompt, 4), 4))], end_s=300.0)
    cold, warm = map(first_token_s, clock.records)
    assert warm < cold / 5
    assert clock.records[1].num_cached_tokens == 992
