"""The one model: any contiguous layer range of any ModelSpec, as launches on a Backend over an arena.

Owned by the compute thread. It holds no sequence state: where tokens lie comes with each step's arrays.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.kernels import ops
from lamina.kernels.backend import Backend
from lamina.kernels.buffer import Buffer, KvCache, StepShape, Weight
from lamina.rpc_worker.arena import Arena
from lamina.rpc_worker.graph_cache import GraphCache, Rerun
from lamina.rpc_worker.loan import Loan, TokenLender
from lamina.rpc_worker.rope import rope_magnitude
from lamina.rpc_worker.staging import MAX_LAUNCHED, StepTransfers
from lamina.rpc_worker.tracing import Scope, ScopeKind, no_scope
from lamina.rpc_worker.weights import ExpertsWeights, LayerWeights, StageWeights
from lamina.spec.model import ExpertsFfn, LayerRange, LayerSpec, ModelSpec

Ints = NDArray[np.int32]


class StepArrays(NamedTuple):
    """One step's run-time values, host side. `tokens` on the first stage, `hidden` float32 [rows, H] on the others."""

    positions: Ints  # [rows]
    row_starts: Ints  # [seqs + 1]
    slots: tuple[Ints, ...]  # by cache group [rows]
    blocks: tuple[Ints, ...]  # by cache group [seqs, max blocks]
    logit_rows: Ints  # [rows whose logits are wanted]
    sampling: NDArray[np.float32] | None = None  # [logit rows, SAMPLE_PARAMS]; None: argmax will do for all
    tokens: Ints | None = None  # one of -1 - i lies in row i of `lent`
    hidden: NDArray[np.float32] | None = None
    lent: Loan | None = None  # by a stage of this process: without `tokens` the hidden state
    is_staged: bool = False  # all but tokens and hidden state has gone up already, see `StageModel.stage`

    @property
    def shape(self) -> StepShape:
        """The sizes of this step."""
        return StepShape(len(self.positions), len(self.row_starts) - 1, len(self.logit_rows))


class Outcome(NamedTuple):
    """What a launched step leaves: hidden states float32 [rows, H], on the last stage tokens int32 [logit rows].

    `values` are there once `transfers` says so, and until the second next launch.
    """

    values: NDArray[np.generic]
    transfers: StepTransfers


class StageModel:
    """Embedding?, layers, head?: what a stage computes."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        layers: LayerRange,
        weights: StageWeights,
        arena: Arena,
        caches: list[KvCache],
        graphs: GraphCache,
        scope: Scope = no_scope,
    ) -> None:
        """`caches` has one entry per layer of the range, in order; `scope` is told what is being launched."""
        self._backend = backend
        self._spec = spec
        self._owned = spec.layers_of(layers)
        self._weights = weights
        self._arena = arena
        self._caches = caches
        self._graphs = graphs
        self._scope = scope
        # one more than may be launched: the next step is prepared meanwhile
        self._slots = cycle([StepTransfers(backend, arena) for _ in range(MAX_LAUNCHED + 1)])
        self._slot = next(self._slots)
        self._forward_and_draw = partial(self._forward, draws=True)
        self._token_lender: TokenLender | None = None
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.num_layers

    def launch(self, step: StepArrays) -> None:
        """Launch one step; `collect`, or `hidden`, `best` and `logits` at once, fetch what it leaves."""
        if not step.is_staged:
            self._next_slot()
        self._upload(step)
        rerun = None
        if self._graphs.wants_trials:
            rerun = Rerun(lambda: self._upload(step), lambda: self._outputs(step.shape))
        if step.sampling is None:
            self._graphs.run(self._forward, step.shape, rerun)
        else:
            self._graphs.run(self._forward_and_draw, step.shape, rerun, variant="draws")

    def stage(self, step: StepArrays) -> StepArrays:
        """Send up what is known of the next step before its input is: `launch` the result, with that added."""
        self._next_slot()
        self._slot.upload_staged(self._staged_values(step))
        return step._replace(is_staged=True)

    def _next_slot(self) -> None:
        self._slot = next(self._slots)
        self._slot.wait()

    def spoil(self, step: StepArrays) -> None:
        """Leave NaN where a step that is not launched would have left keys and values: it shows in whatever reads them.

        A block may be shared before it is filled (A-05).
        """
        b, qkv = self._backend, self._arena["qkv"]
        self._next_slot()
        self._slot.upload_staged(self._staged_values(step))
        b.set_shape(step.shape)
        b.upload(qkv, np.full((step.shape.num_rows, qkv.num_columns), np.nan, np.float32))
        for layer, cache in zip(self._owned, self._caches, strict=True):
            key, value = (qkv.columns(0, width) for width in (layer.attention.key_width, layer.attention.value_width))
            ops.kv_write(b, key, value, self._arena[f"slots.{layer.cache_group}"], cache)
        self._slot.close()

    def nothing(self, values: NDArray[np.generic]) -> Outcome:
        """Of a step that was not launched: these values in place of what it would have left."""
        return Outcome(values, self._slot)

    def lend_hidden(self, num_rows: int) -> tuple[Outcome, Loan]:
        """What the step just launched leaves stays on the device, for the next stage."""
        loan = self._slot.lend(self._arena["hidden"], num_rows)
        return Outcome(np.zeros(0, np.float32), self._slot), loan

    def lend_tokens(self, num_rows: int) -> Loan:
        """The tokens of the step just launched, for stage 0."""
        if self._token_lender is None:
            kept = None if self.is_first else self._arena["kept"]
            self._token_lender = TokenLender(self._backend, self._arena["best"], kept)
        return self._token_lender.lend(num_rows)

    def collect(self, shape: StepShape) -> Outcome:
        """Have what the step just launched leaves brought to the host, without waiting for it."""
        name, num_rows = ("best", shape.num_logit_rows) if self.is_last else ("hidden", shape.num_rows)
        values = self._slot.download(self._arena[name], name, num_rows)
        self._slot.close()
        return Outcome(values, self._slot)

    def launch_op_by_op(self, step: StepArrays, after_layer: Callable[[int], None] | None = None) -> None:
        """Run one step without recordings; `after_layer` is told each layer's index when its ops are launched."""
        self._upload(step)
        self._backend.set_shape(step.shape)
        self._forward(after_layer, draws=step.sampling is not None)

    def first_nonfinite_layer(self, step: StepArrays) -> int | None:
        """The first layer after which a row of the step that came in finite is not; None if there is none."""
        found: list[int] = []
        sound = slice(None) if step.hidden is None else np.isfinite(step.hidden).all(axis=1)

        def look(index: int) -> None:
            if not found and not np.isfinite(self.hidden(step.shape.num_rows)[sound]).all():
                found.append(index)

        self.launch_op_by_op(step, look)
        return found[0] if found else None

    def forget_recordings(self) -> None:
        """Record anew from now on: the backend computes otherwise."""
        self._graphs.clear()

    def hidden(self, num_rows: int) -> NDArray[np.float32]:
        """The hidden state float32 [rows, H] of the step just run."""
        return self._backend.download(self._arena["hidden"], num_rows).astype(np.float32, copy=False)

    def logits(self, num_rows: int) -> NDArray[np.float32]:
        """The logits float32 [rows, vocab] of the step just run."""
        return self._backend.download(self._arena["logits"], num_rows).astype(np.float32, copy=False)

    def logits_of(self, rows: list[int]) -> NDArray[np.float32]:
        """The logits float32 [rows, vocab] of some rows of the step just run."""
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        logits = self._arena["logits"]
        parts = [self._backend.download(logits.rows(int(run[0]), int(run[-1]) + 1), len(run)) for run in runs]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def draw(self, logits: NDArray[np.float32], params: NDArray[np.float32]) -> Ints:
        """Tokens int32 [rows] drawn by `ops.sample` from the host's rows, which take the place of a step's own."""
        count = len(logits)
        self._backend.upload(self._arena["logits"], logits)
        self._backend.upload(self._arena["sampling"], params)
        self._graphs.run(self._draw, StepShape(count, count, count), variant="draws alone")
        return self.best(count)

    def best(self, num_rows: int) -> Ints:
        """The drawn or most likely tokens int32 [rows] of the step just run, -1 where a row is not finite."""
        return self._backend.download(self._arena["best"], num_rows).astype(np.int32, copy=False)

    def run(self, step: StepArrays) -> NDArray[np.float32]:
        """Run one step: hidden state float32 [rows, H], or on the last stage logits float32 [logit rows, vocab]."""
        self.launch(step)
        return self.logits(step.shape.num_logit_rows) if self.is_last else self.hidden(step.shape.num_rows)

    def _staged_values(self, step: StepArrays) -> dict[str, NDArray[np.generic]]:
        staged: dict[str, NDArray[np.generic]] = {"positions": step.positions, "row_starts": step.row_starts}
        if self.is_last:
            staged["logit_rows"] = step.logit_rows
        if step.sampling is not None:
            staged["sampling"] = step.sampling
        for group, (slots, blocks) in enumerate(zip(step.slots, step.blocks, strict=True)):
            staged[f"slots.{group}"], staged[f"blocks.{group}"] = slots, blocks
        return staged

    def _upload(self, step: StepArrays) -> None:
        staged = {} if step.is_staged else self._staged_values(step)
        if step.tokens is not None and step.lent is None:
            staged["tokens"] = step.tokens
        elif step.tokens is not None and not (step.is_staged and step.tokens.max() < 0):
            staged["tokens"] = np.maximum(step.tokens, 0)
        if staged:
            self._slot.upload_staged(staged)
        if step.hidden is not None:
            self._slot.upload(self._arena["hidden"], "hidden", step.hidden)
        if step.lent is not None and step.tokens is None:
            self._slot.borrow(step.lent, self._arena["hidden"], [(0, 0, step.shape.num_rows)])
        elif step.lent is not None and step.tokens is not None:
            self._slot.borrow(step.lent, self._arena["tokens"], _runs(step.tokens.tolist()))

    def _outputs(self, shape: StepShape) -> list[NDArray[np.generic]]:
        """All that a step leaves for others, for comparison."""
        if not self.is_last:
            return [self.hidden(shape.num_rows)]
        return [self.hidden(shape.num_rows), self.logits(shape.num_logit_rows), self.best(shape.num_logit_rows)]

    def _forward(self, after_layer: Callable[[int], None] | None = None, *, draws: bool = False) -> None:
        b, arena, scope = self._backend, self._arena, self._scope
        with scope(ScopeKind.MODEL, self._spec.name):
            if self._weights.embedding is not None and self.is_first:
                with scope(ScopeKind.OTHER, "embedding"):
                    ops.embed(b, arena["tokens"], self._weights.embedding, arena["hidden"], self._spec.embedding_scale)
            for layer, weights, cache in zip(self._owned, self._weights.layers, self._caches, strict=True):
                with scope(ScopeKind.LAYER, f"layer {layer.index}"):
                    with scope(ScopeKind.BLOCK, "attention"):
                        self._attention(layer, weights, cache)
                    with scope(ScopeKind.BLOCK, "mlp"):
                        self._ffn(layer, weights)
                if after_layer is not None:
                    after_layer(layer.index)
            if self._weights.head is not None and self._weights.output_norm is not None:
                with scope(ScopeKind.BLOCK, "head"):
                    self._head(self._weights.head, self._weights.output_norm, draws=draws)

    def _head(self, head: Weight, norm: Buffer, *, draws: bool) -> None:
        b, arena, scope = self._backend, self._arena, self._scope
        with scope(ScopeKind.OTHER, "head-norm"):
            ops.gather_rows(b, arena["hidden"], arena["logit_rows"], arena["logit_hidden"])
            ops.rms_norm(b, arena["logit_hidden"], norm, arena["logit_hidden"], self._spec.norm_eps)
        with scope(ScopeKind.LINEAR, "head-logits"):
            ops.linear(b, arena["logit_hidden"], head, arena["logits"])
        with scope(ScopeKind.OTHER, "head-sample"):
            if self._spec.final_softcap is not None:
                ops.softcap(b, arena["logits"], self._spec.final_softcap)
            if draws:
                self._draw()
            else:
                ops.argmax(b, arena["logits"], arena["best"])

    def _draw(self) -> None:
        b, logits, best = self._backend, self._arena["logits"], self._arena["best"]
        ops.argmax(b, logits, best)
        ops.sample(b, logits, self._arena["sampling"], best)

    def _attention(self, layer: LayerSpec, weights: LayerWeights, cache: KvCache) -> None:
        b, arena, scope = self._backend, self._arena, self._scope
        attention, eps = layer.attention, self._spec.norm_eps
        key_start = attention.query_width
        value_start = key_start + attention.key_width
        qkv = arena["qkv"].columns(0, value_start + attention.value_width)
        query, key = qkv.columns(0, key_start), qkv.columns(key_start, value_start)
        mixed = arena["attention"].columns(0, attention.output_width)
        with scope(ScopeKind.OTHER, "attention-norm"):
            ops.rms_norm(b, arena["hidden"], weights.attention_norm, arena["norm"], eps)
        with scope(ScopeKind.LINEAR, "attention-query-key-value"):
            ops.linear(b, arena["norm"], weights.qkv, qkv)
        with scope(ScopeKind.OTHER, "attention-rope-cache"):
            if weights.query_norm is not None and weights.key_norm is not None:
                ops.rms_norm(b, query, weights.query_norm, query, eps)
                ops.rms_norm(b, key, weights.key_norm, key, eps)
            ops.rope(
                b,
                qkv.columns(0, value_start),  # query and key heads lie side by side
                arena["positions"],
                weights.inv_freq,
                head_dim=attention.key_dim,
                layout=attention.rope.layout.value,
                magnitude=rope_magnitude(attention.rope),
            )
            value = qkv.columns(value_start, value_start + attention.value_width)
            ops.kv_write(b, key, value, arena[f"slots.{layer.cache_group}"], cache)
        with scope(ScopeKind.ATTENTION, "attention-context"):
            ops.attention(
                b,
                query,
                cache,
                arena["positions"],
                arena["row_starts"],
                arena[f"blocks.{layer.cache_group}"],
                mixed,
                scale=attention.scale,
                window=attention.window or 0,
                softcap=attention.softcap or 0.0,
                sinks=weights.sinks,
            )
        with scope(ScopeKind.LINEAR, "attention-output"):
            ops.linear(b, mixed, weights.output, arena["hidden"], accumulate=True)

    def _ffn(self, layer: LayerSpec, weights: LayerWeights) -> None:
        b, arena, scope, ffn = self._backend, self._arena, self._scope, layer.ffn
        with scope(ScopeKind.OTHER, "mlp-norm"):
            ops.rms_norm(b, arena["hidden"], weights.ffn_norm, arena["norm"], self._spec.norm_eps)
        if isinstance(ffn, ExpertsFfn) and isinstance(weights.ffn, ExpertsWeights):
            self._experts(ffn, weights.ffn)
            return
        gate = arena["gate"].columns(0, ffn.intermediate)
        with scope(ScopeKind.LINEAR, "mlp-gate-up"):
            ops.gated_linear(b, arena["norm"], weights.ffn.gate_up, gate, ffn.activation.value)
        with scope(ScopeKind.LINEAR, "mlp-down"):
            ops.linear(b, gate, weights.ffn.down, arena["hidden"], accumulate=True)

    def _experts(self, ffn: ExpertsFfn, weights: ExpertsWeights) -> None:
        b, arena, scope = self._backend, self._arena, self._scope
        logits = _first_columns(arena["gate_logits"], ffn.num_experts)
        experts, shares = (_first_columns(arena[name], ffn.num_selected) for name in ("experts", "shares"))
        gate = _first_columns(arena["gate"], ffn.num_selected * ffn.intermediate)
        with scope(ScopeKind.LINEAR, "mlp-router"):
            ops.linear(b, arena["norm"], weights.router, logits)
            ops.route(
                b,
                logits,
                experts,
                shares,
                gating=ffn.gating.value,
                normalise=ffn.normalise,
                scale=ffn.share_scale,
            )
        with scope(ScopeKind.LINEAR, "mlp-gate-up"):
            ops.expert_gated_linear(b, arena["norm"], experts, weights.gate_up, gate, ffn.activation.value)
        with scope(ScopeKind.LINEAR, "mlp-down"):
            ops.expert_linear(b, gate, experts, shares, weights.down, arena["hidden"], accumulate=True)


def _first_columns(buffer: Buffer, count: int) -> Buffer:
    """The buffer itself where it has no more: a single column is a vector, which has no views."""
    return buffer if buffer.num_columns == count else buffer.columns(0, count)


def _runs(tokens: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first row, its source, rows) of every run of tokens -1 - source that count up together."""
    row = 0
    while row < len(tokens):
        start, source = row, -1 - tokens[row]
        row += 1
        if source >= 0:
            while row < len(tokens) and -1 - tokens[row] == source + row - start:
                row += 1
            yield start, source, row - start
