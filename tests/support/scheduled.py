"""A split model without sockets whose steps a real scheduler plans: prompts in, greedy text out."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina.coordinator.engine.batch import Issue
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.engine.sequence import RequestId, RequestRecord, SequenceRequest
from lamina.kernels.registry import create_backend
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import FromSample, SampledToken, StepDone


class ScheduledModel:
    """Steps run as soon as they are issued, and are answered as late as the scheduler allows.

    Every cache block is NaN until a sequence writes it.
    """

    def __init__(self, path: Path, backend_name: str, cuts: Sequence[int], config: SchedulerConfig) -> None:
        file = read_gguf(path)
        self.spec = model_spec(file, model_digest(file))
        self.scheduler = Scheduler(config)
        self.records: list[RequestRecord] = []
        self.logits: dict[tuple[RequestId, int], NDArray[np.float32]] = {}  # by the position that they are for
        self._backend = create_backend(backend_name)
        settings = StageSettings(
            max_rows=config.max_rows,
            max_seqs=config.max_seqs,
            max_logit_rows=config.max_logit_rows,
            max_context=config.max_context,
            kv_dtype="f32",
        )
        self._stages = []
        for start, stop in pairwise([0, *cuts, self.spec.num_layers]):
            stage = Stage(self._backend, self.spec, LayerRange(start, stop), settings)
            stage.load(file.tensors, lambda _: None)
            stage.allocate_cache(config.num_blocks)
            _spoil(stage)
            self._stages.append(stage)
        self._sampled: list[list[int]] = []  # by step, by row: the token that follows the slice
        self._answers: deque[StepDone] = deque()

    def serve(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of prompts that come at once."""
        texts: dict[RequestId, list[int]] = {}
        for prompt in prompts:
            id_ = self.scheduler.add(SequenceRequest(tuple(prompt), SamplingParams(), frozenset(), num_tokens), 0.0)
            self.records.append(self.scheduler.record(id_))
            texts[id_] = []
        while True:
            while (issue := self.scheduler.schedule(0.0)) is not None:
                self._run(issue)
            if not self._answers:
                assert not self.scheduler.num_running
                assert not self.scheduler.num_waiting
                return list(texts.values())
            for event in self.scheduler.absorb(self._answers.popleft(), 0.0):
                texts[event.request_id].append(event.token)

    def _run(self, issue: Issue) -> None:
        plan = issue.plan
        tokens: list[int] = []
        for piece in plan.slices:
            source = piece.input
            is_sample = isinstance(source, FromSample)
            tokens += [self._sampled[source.step][source.row]] if is_sample else source.ids
        output = self._stages[0].forward(ReadyStep(plan, np.array(tokens, np.int32), None))
        for stage in self._stages[1:]:
            output = stage.forward(ReadyStep(plan, None, output))
        rows = iter(output)
        sampled, answer = [], []
        for piece in plan.slices:
            sampled.append(0)
            if piece.want_logits:
                logits = next(rows)
                assert np.isfinite(logits).all()
                sampled[-1] = int(logits.argmax())
                answer.append(SampledToken(piece.seq, piece.end, sampled[-1]))
                seq = self.scheduler._by_seq.get(piece.seq)
                if seq is not None:
                    self.logits[seq.record.request_id, piece.end] = logits.copy()
        self._sampled.append(sampled)
        self._answers.append(StepDone(plan.epoch, plan.step, tuple(answer)))

    def free(self) -> None:
        """Give everything back."""
        for stage in self._stages:
            stage.free()
        self._backend.close()


def _spoil(stage: Stage) -> None:
    """Fill the caches with NaN, which is what all bits set are."""
    assert stage._pool is not None
    for cache in stage._pool.caches:
        storage = cache.storage
        arrays = [part for name in storage.__slots__ if isinstance(part := getattr(storage, name), np.ndarray)]
        assert arrays
        for array in arrays:
            array.view(np.uint8).fill(255)
