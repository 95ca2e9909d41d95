"""The same stage without gRPC and without a coordinator: what one worker could do if nothing stood around it.

python benchmarks/inprocess.py      contestant on standard input and output
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from contest import STREAM_PROMPT_TOKENS, random_ids, serve_commands

from lamina.kernels.registry import create_backend
from lamina.rpc_worker.stage import Stage
from lamina.rpc_worker.step_queue import ReadyStep
from lamina.spec.digest import model_digest
from lamina.spec.families import model_spec
from lamina.spec.gguf import read_gguf
from lamina.spec.ids import BlockId, Epoch, SeqId, StepId
from lamina.spec.model import LayerRange
from lamina.spec.placement import StageSettings
from lamina.spec.sampling import SamplingParams
from lamina.spec.step import BLOCK_TOKENS, AddSequence, SeqSlice, StepPlan, Tokens

_CACHE_TOKENS = 8192
_CHUNK_TOKENS = 512


class InProcess:
    """Whole model, one stage; the caller's thread is the compute thread."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._free_blocks: list[BlockId] = []
        self._next_step = 0
        self._next_seq = 0

    def load(
        self, model: str, threads: int, device: str = "cpu", kv_dtype: str = "f16", cache_tokens: int = _CACHE_TOKENS
    ) -> dict[str, object]:
        """Read the file and allocate the caches. An earlier model is given back."""
        if self._stage is not None:
            self._stage.free()
        file = read_gguf(Path(model))
        spec = model_spec(file, model_digest(file))
        backend = create_backend(device, threads=threads)
        backend.bind_to_thread()
        settings = StageSettings(max_context=min(cache_tokens, spec.context_length), kv_dtype=kv_dtype)
        stage = Stage(backend, spec, LayerRange(0, spec.num_layers), settings)
        stage.load(file.tensors, lambda _: None)
        num_blocks = cache_tokens // BLOCK_TOKENS
        stage.allocate_cache((num_blocks,) * len(spec.cache_groups))
        self._num_groups = len(spec.cache_groups)
        self._num_blocks = num_blocks
        self._stage = stage
        self._reset()
        return {"kernel": backend.capabilities.kernel}

    def prefill(self, num_tokens: int, salt: int) -> float:
        """Tokens per second until the prompt's first token is sampled."""
        self._reset()
        ids = random_ids(num_tokens, salt)
        seq = self._add()
        start = time.perf_counter()
        self._feed_prompt(seq, ids)
        return num_tokens / (time.perf_counter() - start)

    def decode(self, depth: int, num_tokens: int, salt: int) -> float:
        """Tokens per second of `num_tokens` steps after a prompt of `depth` tokens (at least 1) and its first token."""
        self._reset()
        depth = max(1, depth)
        seq = self._add()
        token = self._feed_prompt(seq, random_ids(depth, salt))
        start = time.perf_counter()
        for pos in range(depth, depth + num_tokens):
            token = self._step([(seq, pos, [token])])[0]
        return num_tokens / (time.perf_counter() - start)

    def step_at(self, depth: int, num_rows: int, num_steps: int) -> float:
        """Seconds of a step of `num_rows` tokens at positions from `depth` on: the least of `num_steps`.

        What lies before is never computed: the cache holds what it was allocated with. The same bytes are read and the
        same numbers added, without a prompt to wait for.
        """
        times = []
        for step in range(num_steps):
            self._reset()
            ids = random_ids(num_rows, step)
            seq = self._add()
            start = time.perf_counter()
            self._step([(seq, depth, ids)], num_before=depth)
            times.append(time.perf_counter() - start)
        return min(times)

    def streams(self, num_streams: int, num_tokens: int, salt: int) -> float:
        """Tokens per second in all, of `num_streams` sequences that decode in the same steps."""
        self._reset()
        prompts = [random_ids(STREAM_PROMPT_TOKENS, salt * 1000 + i) for i in range(num_streams)]
        seqs = [self._add() for _ in prompts]
        tokens = [self._feed_prompt(seq, ids) for seq, ids in zip(seqs, prompts, strict=True)]
        start = time.perf_counter()
        for step in range(num_tokens):
            pos = STREAM_PROMPT_TOKENS + step
            tokens = self._step([(seq, pos, [token]) for seq, token in zip(seqs, tokens, strict=True)])
        return num_streams * num_tokens / (time.perf_counter() - start)

    @property
    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError("nothing is loaded")
        return self._stage

    def _reset(self) -> None:
        self._loaded.reset_sequences()
        self._free_blocks = [BlockId(i) for i in range(self._num_blocks)]

    def _add(self) -> SeqId:
        seq = SeqId(self._next_seq)
        self._next_seq += 1
        self._loaded.add_sequence(AddSequence(seq, SamplingParams(), (), frozenset(), 1 << 30))
        return seq

    def _feed_prompt(self, seq: SeqId, ids: Sequence[int]) -> int:
        tokens: list[int] = []
        for start in range(0, len(ids), _CHUNK_TOKENS):
            chunk = ids[start : start + _CHUNK_TOKENS]
            tokens = self._step([(seq, start, chunk)], want_logits=start + len(chunk) == len(ids))
        return tokens[0]

    def _step(
        self, pieces: Sequence[tuple[SeqId, int, Sequence[int]]], *, want_logits: bool = True, num_before: int = 0
    ) -> list[int]:
        """`num_before`: tokens before the first slices' that have no blocks yet."""
        slices = []
        for seq, pos, ids in pieces:
            end = pos + len(ids)
            num_new = -(-end // BLOCK_TOKENS) - -(-(pos - num_before) // BLOCK_TOKENS)
            blocks = tuple(self._free_blocks.pop() for _ in range(num_new))
            new_blocks = (blocks,) * self._num_groups
            slices.append(SeqSlice(seq, pos, len(ids), Tokens(tuple(ids)), new_blocks, want_logits))
        plan = StepPlan(Epoch(1), StepId(self._next_step), tuple(slices))
        self._next_step += 1
        tokens = np.array([token for _, _, ids in pieces for token in ids], np.int32)
        done = self._loaded.run(ReadyStep(plan, tokens, None)).done
        return [sampled.token for sampled in done.tokens] if done is not None else []


def main() -> None:
    """A contestant."""
    model = InProcess()
    serve_commands({name: getattr(model, name) for name in ("load", "prefill", "decode", "step_at", "streams")})


if __name__ == "__main__":
    main()
