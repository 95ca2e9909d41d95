"""lamina as a contestant: an engine over worker processes, as `coordinator` runs it, without the HTTP server.

python benchmarks/ours.py       contestant on standard input and output; `load` names the workers
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contest import STREAM_PROMPT_TOKENS, random_ids, serve_commands
from split import balanced_ranges

from lamina.coordinator.engine.engine import Engine
from lamina.coordinator.engine.sequence import SequenceRequest
from lamina.coordinator.model_file import ModelFile, open_model_file
from lamina.coordinator.session import SchedulingChoice, Session, SessionSettings, SplitChoice, open_session
from lamina.spec.address import parse_address
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.wire.event_loop import new_loop

_CACHE_TOKENS = 8192
_MAX_CONTEXT = 8192


class Ours:
    """One session on an event loop of its own thread, which runs between commands too: gRPC's keepalive needs it."""

    def __init__(self) -> None:
        self._loop = new_loop()  # of the kind that `coordinator` runs on
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._stack = AsyncExitStack()
        self._session: Session | None = None

    def load(
        self,
        model: str,
        workers: Sequence[str],
        kv_dtype: str = "f16",
        max_rows: int = 512,
        stages: Sequence[Sequence[int]] = (),
        first_layers: int = 0,
    ) -> dict[str, object]:
        """Bring the model up over the workers: split as the planner does it by default, for equal machines evenly.

        With `stages`, the (worker, device) of each, it is split so that each reads about the same number of bytes; with
        `first_layers` the first of two has as many.
        """
        file = open_model_file(Path(model))
        if not stages:
            self._open(file, workers, SplitChoice(), kv_dtype, max_rows)
        else:
            ranges = balanced_ranges(file.spec, file.tensors, len(stages))
            if first_layers:
                ranges = LayerRange(0, first_layers), LayerRange(first_layers, file.spec.num_layers)
            with TemporaryDirectory() as folder:
                split = Path(folder) / "split.yaml"
                split.write_text(split_text([workers[worker] for worker, _ in stages], stages, ranges), "utf-8")
                self._open(file, workers, SplitChoice(file=split), kv_dtype, max_rows)
        session = self._session
        return {"split": [] if session is None else [str(stage.layers) for stage in session.pipeline.placement.stages]}

    def _open(self, file: ModelFile, workers: Sequence[str], split: SplitChoice, kv_dtype: str, max_rows: int) -> None:
        settings = SessionSettings(
            workers=tuple(parse_address(worker) for worker in workers),
            split=split,
            stage=StageSettings(
                max_rows=max_rows, max_context=min(_MAX_CONTEXT, file.spec.context_length), kv_dtype=kv_dtype
            ),
            num_tokens=_CACHE_TOKENS,
            scheduling=SchedulingChoice(prefill_chunk_tokens=max_rows),
        )
        opening = open_session(file, settings, lambda _: None, lambda _: None)
        self._session = self._run(self._stack.enter_async_context(opening))

    def prefill(self, num_tokens: int, salt: int) -> float:
        """Tokens per second until the prompt's first token arrives."""
        return float(self._run(self._prefill(random_ids(num_tokens, salt))))

    def decode(self, depth: int, num_tokens: int, salt: int) -> float:
        """Tokens per second of the `num_tokens` that follow the first one after a prompt of `depth` tokens."""
        return float(self._run(self._decode(random_ids(max(1, depth), salt), num_tokens)))

    def streams(self, num_streams: int, num_tokens: int, salt: int) -> float:
        """Tokens per second in all while every one of `num_streams` sequences decodes."""
        prompts = [random_ids(STREAM_PROMPT_TOKENS, salt * 1000 + i) for i in range(num_streams)]
        return float(self._run(self._streams(prompts, num_tokens)))

    def close(self) -> None:
        """Unload."""
        self._run(self._stack.aclose())

    @property
    def _engine(self) -> Engine:
        if self._session is None:
            raise RuntimeError("nothing is loaded")
        return self._session.engine

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _generate(self, ids: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
        """The arrival time of each token."""
        request = SequenceRequest(tuple(ids), SamplingParams(), frozenset(), max_tokens)
        async for event in self._engine.submit(request):
            if event.error:
                raise RuntimeError(event.error)
            yield time.perf_counter()

    async def _prefill(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        times = [at async for at in self._generate(ids, 1)]
        return len(ids) / (times[0] - start)

    async def _decode(self, ids: Sequence[int], num_tokens: int) -> float:
        times = [at async for at in self._generate(ids, num_tokens + 1)]
        return num_tokens / (times[-1] - times[0])

    async def _streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        async def collect(ids: Sequence[int]) -> list[float]:
            return [at async for at in self._generate(ids, num_tokens + 1)]

        return common_rate(await asyncio.gather(*(collect(ids) for ids in prompts)))


def split_text(addresses: Sequence[str], places: Sequence[Sequence[int]], ranges: Sequence[LayerRange]) -> str:
    """A split file: each stage's worker, device and layers."""
    lines = ["workers:"]
    for address, (_, device), layers in zip(addresses, places, ranges, strict=True):
        lines += [f"  - address: {address}", f"    device: {device}", f"    layers: {layers}"]
    return "\n".join(lines) + "\n"


def common_rate(streams: Sequence[Sequence[float]]) -> float:
    """Tokens per second over the time in which every stream has had its first token and none its last."""
    begin = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    if end <= begin:
        raise RuntimeError("the streams did not overlap: more tokens or fewer streams are needed")
    return sum(begin < at <= end for times in streams for at in times) / (end - begin)


def main() -> None:
    """A contestant."""
    ours = Ours()
    serve_commands({name: getattr(ours, name) for name in ("load", "prefill", "decode", "streams")})
    ours.close()


if __name__ == "__main__":
    main()
