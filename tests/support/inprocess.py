"""A split model without sockets: stages in a row on one backend, driven by real step plans."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.rpc_worker.tracing import Tracer
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.step import BLOCK_TOKENS, SeqSlice, StepPlan, Tokens

F32_SETTINGS = StageSettings(max_rows=1024, max_seqs=8, max_logit_rows=8, max_context=1024, kv_dtype="f32")


class InProcessModel:
    """`cuts` are the first layers of the second and later stages: () is the whole model, (7,) two stages."""

    def __init__(
        self,
        path: Path,
        backend: Backend,
        cuts: Sequence[int] = (),
        settings: StageSettings = F32_SETTINGS,
        tracer: Tracer | None = None,
        compute: str = "auto",
    ) -> None:
        file = read_gguf(path)
        self.spec = model_spec(file, model_digest(file))
        self.settings = settings
        bounds = [0, *cuts, self.spec.num_layers]
        self.stages = [
            Stage(backend, self.spec, LayerRange(start, stop), settings, compute=compute, tracer=tracer)
            for start, stop in pairwise(bounds)
        ]
        for stage in self.stages:
            stage.load(file.tensors, lambda _: None)
            stage.allocate_cache((settings.max_blocks_per_seq * settings.max_seqs,) * len(self.spec.cache_groups))
        self._next_step = 0
        self._lengths: dict[int, int] = {}

    def step(self, inputs: dict[int, Sequence[int]]) -> NDArray[np.float32]:
        """Feed the next tokens of some sequences; logits float32 [sequences, vocab] after each one's last token."""
        slices = []
        for seq, tokens in inputs.items():
            pos = self._lengths.get(seq, 0)
            end = pos + len(tokens)
            first = seq * self.settings.max_blocks_per_seq
            held, needed = -(-pos // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)
            blocks = tuple(BlockId(first + block) for block in range(held, needed))
            new_blocks = (blocks,) * len(self.spec.cache_groups)
            slices.append(SeqSlice(SeqId(seq), pos, len(tokens), Tokens(tuple(tokens)), new_blocks, True))
            self._lengths[seq] = end
        plan = StepPlan(Epoch(1), StepId(self._next_step), tuple(slices))
        self._next_step += 1
        tokens = np.array([token for piece in inputs.values() for token in piece], np.int32)
        output = self.stages[0].forward(ReadyStep(plan, tokens, None))
        for stage in self.stages[1:]:
            output = stage.forward(ReadyStep(plan, None, output))
        return output

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of fresh sequences, all in the same steps."""
        self.reset()
        inputs: dict[int, Sequence[int]] = dict(enumerate(prompts))
        made: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            logits = self.step(inputs)
            best = logits.argmax(axis=1)
            for seq, token in enumerate(best):
                made[seq].append(int(token))
            inputs = {seq: [tokens[-1]] for seq, tokens in enumerate(made)}
        return made

    def reset(self) -> None:
        """Forget all sequences."""
        self._lengths.clear()
        for stage in self.stages:
            stage.reset_sequences()

    def free(self) -> None:
        """Give everything back."""
        for stage in self.stages:
            stage.free()
