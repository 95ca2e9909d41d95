"""The coordinator's step loop alone: real engine, real scheduler, real messages, a pipeline that answers at once.

python benchmarks/engine_loop.py        commands on standard input, answers on standard output
"""

import asyncio
import cProfile
import io
import pstats
import time

from contest import random_ids, serve_commands

from lamina.coordinator.engine.engine import Engine
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.spec.ids import Epoch, PlacementId
from lamina.spec.placement import Placement
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import AddSequence, RemoveSequence, SampledToken, StepDone, StepPlan
from lamina.v1 import step_pb2 as pb
from lamina.wire.convert import done_from_message, done_to_message, encode_command

_NUM_PROFILED = 14


class InstantPipeline:
    """Stands in for `Pipeline`: encodes commands as it does and answers each plan with token 7 for every sampled row.

    The answers' bytes are made outside the measured time; parsing them is inside.
    """

    def __init__(self, num_stages: int) -> None:
        self.placement = Placement(PlacementId("instant"), Epoch(1), 0, ())
        self.num_stages = num_stages
        self.num_steps = 0
        self.outside_s = 0.0
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    def issue(self, plan: StepPlan) -> None:
        encode_command(plan)
        start = time.thread_time()
        tokens = tuple(SampledToken(piece.seq, piece.end, 7) for piece in plan.sampled())
        self._answers.put_nowait(done_to_message(StepDone(plan.epoch, plan.step, tokens)).SerializeToString())
        self.outside_s += time.thread_time() - start

    def add_sequence(self, add: AddSequence) -> None:
        encode_command(add)

    def remove_sequence(self, removal: RemoveSequence) -> None:
        encode_command(removal)

    async def next_done(self) -> StepDone:
        self.num_steps += 1
        await asyncio.sleep(0)  # others may run, as they may between real answers
        return done_from_message(pb.StepDone.FromString(await self._answers.get()))

    async def close(self, *, unload: bool = True) -> None:
        """Nothing to close."""


class EngineLoop:
    """Commands `measure` and `submit`."""

    def submit(self, prompt_tokens: int, num_requests: int) -> float:
        """CPU microseconds from a request's submission to the bytes of its first step, the least of many requests.

        Prompts are random, so that none shares a prefix with another.
        """
        return asyncio.run(_measure_submit(prompt_tokens, num_requests))

    def measure(self, num_seqs: int, num_stages: int, num_tokens: int, profile: bool = False) -> dict[str, object]:
        """CPU microseconds of a step in which all sequences decode: scheduling, encoding, parsing, handing out."""
        profiler = cProfile.Profile() if profile else None
        us_per_step, num_steps = asyncio.run(_measure(num_seqs, num_stages, num_tokens, profiler))
        answer: dict[str, object] = {"us_per_step": us_per_step, "num_steps": num_steps}
        if profiler is not None:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_NUM_PROFILED)
            answer["profile"] = text.getvalue()
        return answer


async def _measure_submit(prompt_tokens: int, num_requests: int) -> float:
    config = SchedulerConfig(
        num_stages=1, max_rows=2048, max_seqs=64, max_logit_rows=64, max_context=8192, prefill_chunk_tokens=2048,
        num_blocks=(4 * 8192 // 16,),
    )  # fmt: skip
    pipeline = InstantPipeline(1)
    engine = Engine(Scheduler(config, Epoch(1)), pipeline)  # type: ignore[arg-type]
    engine.start()
    times = []
    for i in range(num_requests):
        request = SequenceRequest(tuple(random_ids(prompt_tokens, i)), SamplingParams(), frozenset(), 1)
        pipeline.outside_s = 0.0
        start = time.thread_time()
        stream = engine.submit(request)
        times.append(time.thread_time() - start - pipeline.outside_s)
        async for _ in stream:
            pass
    await engine.close()
    return 1e6 * min(times)


async def _measure(
    num_seqs: int, num_stages: int, num_tokens: int, profiler: cProfile.Profile | None
) -> tuple[float, int]:
    """One stage: steps of all sequences; N stages: of an N-th of them, so N times as many sequences are started."""
    total = num_seqs * num_stages
    pipeline = InstantPipeline(num_stages)
    config = SchedulerConfig(
        num_stages=num_stages, max_rows=2048, max_seqs=num_seqs, max_logit_rows=num_seqs, max_context=8192,
        num_blocks=(total * (num_tokens // 16 + 4),),
    )  # fmt: skip
    engine = Engine(Scheduler(config, Epoch(1)), pipeline)  # type: ignore[arg-type]
    request = [
        SequenceRequest(tuple(random_ids(16, i)), SamplingParams(), frozenset(), num_tokens) for i in range(total)
    ]
    streams = [engine.submit(one) for one in request]
    engine.start()
    await anext(streams[-1])
    pipeline.num_steps, pipeline.outside_s = 0, 0.0
    start = time.thread_time()
    if profiler is not None:
        profiler.enable()
    while pipeline.num_steps < (num_tokens - 8) * num_stages:
        await asyncio.sleep(0)
    if profiler is not None:
        profiler.disable()
    elapsed = time.thread_time() - start - pipeline.outside_s
    await engine.close()
    return 1e6 * elapsed / pipeline.num_steps, pipeline.num_steps


def main() -> None:
    """Serve commands."""
    loop = EngineLoop()
    serve_commands({"measure": loop.measure, "submit": loop.submit})


if __name__ == "__main__":
    main()
