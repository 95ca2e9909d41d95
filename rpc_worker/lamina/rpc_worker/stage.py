"""One loaded stage: model, weights, caches, tables, sampler. Everything here belongs to the device's compute thread."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend, GraphDecision, GraphMode
from lamina.kernels.buffer import DType, StepShape
from lamina.rpc_worker.arena import Arena
from lamina.rpc_worker.grammar import GrammarCompiler
from lamina.rpc_worker.graph_cache import GraphCache
from lamina.rpc_worker.kv_pool import KvPool, SequenceTables, logit_rows_of
from lamina.rpc_worker.loader import StageLoader, TensorReader
from lamina.rpc_worker.loan import Loan
from lamina.rpc_worker.numerics import Precision
from lamina.rpc_worker.sampler import Sampler
from lamina.rpc_worker.stage_facts import StageFacts, StepMeter
from lamina.rpc_worker.stage_memory import check_fits, step_limits, widest
from lamina.rpc_worker.stage_model import Outcome, StageModel, StepArrays
from lamina.rpc_worker.staging import MAX_LAUNCHED
from lamina.rpc_worker.step_queue import OnDevice, ReadyStep
from lamina.rpc_worker.tracing import Tracer, no_scope
from lamina.rpc_worker.weights import StageWeights
from lamina.spec.checkpoint import TensorIndex
from lamina.spec.errors import CapacityExceeded, InvalidPlan, Unavailable
from lamina.spec.ids import SeqId
from lamina.spec.memory import arena_layout
from lamina.spec.model import LayerRange, ModelSpec, stage_tensor_names
from lamina.spec.placement import StageSettings
from lamina.spec.step import AddSequence, StepDone, StepPlan

_log = logging.getLogger(__name__)


class StageResult(NamedTuple):
    """What a step left: the hidden state float32 [rows, H] for the next stage, or the last stage's answer.

    The hidden state is there until a step is launched after the next one; who needs it for longer copies it.
    """

    ready: ReadyStep
    hidden: NDArray[np.float32] | None
    done: StepDone | None


Rows = tuple[tuple[SeqId, int], ...]
_NOT_SAMPLED: OnDevice = {}


class PreparedStep(NamedTuple):
    """What is known of a step before its input is there; on the last stage also what it samples, and how.

    `sampled` says which of the device's tokens is that of (sequence, position), for steps launched later. It is empty
    if the step `needs_logits` on the host: no other may be launched before it is finished.
    """

    arrays: StepArrays
    shape: StepShape
    rows: Rows = ()  # (sequence, position of the token) of each that it samples
    needs_logits: bool = False
    sampled: OnDevice = _NOT_SAMPLED


class LaunchedStep(NamedTuple):
    """A step that the device has been given; `start_s` on the clock of time.perf_counter. See `PreparedStep`."""

    ready: ReadyStep
    outcome: Outcome
    start_s: float
    rows: Rows = ()
    needs_logits: bool = False
    sampled: OnDevice = _NOT_SAMPLED
    recorded: bool = False  # its launches were recorded first
    lent: Loan | None = None  # to other stages: the hidden state, or the tokens of `sampled`


class Stage:
    """Built by `load`, usable after `allocate_cache`; `free` gives everything back."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        layers: LayerRange,
        settings: StageSettings,
        grammars: GrammarCompiler | None = None,
        compute: str = "auto",
        tracer: Tracer | None = None,
    ) -> None:
        """`compute` is the worker's wish for the dtype of large products, see `numerics`."""
        self.is_last = layers.stop == spec.num_layers  # it samples
        self._backend = backend
        self._spec = spec
        self._layers = layers
        self._settings = settings
        self._sizes = (step_limits(settings, spec, layers), *widest(spec, layers))
        decision = backend.graph_decision(GraphMode(settings.cuda_graphs))
        if tracer is not None:
            decision = GraphDecision(False, "a traced step runs op by op")
        self._tracer = tracer
        self._graphs = GraphCache(backend, decision=decision)
        self._precision = Precision(backend, spec, layers, compute)
        self._weights = StageWeights(backend)
        self._arena: Arena | None = None
        self._pool: KvPool | None = None
        self._model: StageModel | None = None
        self._tables = SequenceTables((), settings)
        self._sampler = Sampler(spec.vocab_size, grammars, lambda *rows: self._loaded_model().draw(*rows))
        self._memory = StageFacts()  # but for what changes with steps
        self._meter = StepMeter()
        self._end_s = 0.0  # of the step that was finished last

    def load(self, tensors: TensorIndex, progress: Callable[[int], None]) -> None:
        """Read weights, then allocate the arena. Refuses with numbers before reading what cannot fit (B-42)."""
        self._precision.apply()  # the workspace depends on it
        check_fits(self._backend, self._spec, self._layers, self._settings, tensors)
        with TensorReader(progress) as reader:
            self._weights = StageLoader(self._backend, self._spec, tensors, reader).load(self._layers)
        try:
            self._arena = Arena(self._backend, arena_layout(self._spec, self._layers, self._settings))
            self._backend.reserve_workspace(*self._sizes)
        except BaseException:
            self.free()
            raise
        self._publish_memory()

    def total_bytes(self, tensors: TensorIndex) -> int:
        """Bytes that `load` will read."""
        return sum(tensors[name].num_bytes for name in stage_tensor_names(self._spec, self._layers, tensors))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._weights.num_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena and the backend's workspace."""
        if self._arena is None:
            return 0
        return self._arena.num_bytes + self._backend.workspace_bytes(*self._sizes)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV caches."""
        return 0 if self._pool is None else self._pool.num_bytes

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block over this stage's layers, by cache group, in the backend's own layout."""
        sizes = [0] * len(self._spec.cache_groups)
        for layer in self._spec.layers_of(self._layers):
            shape = layer.attention
            sizes[layer.cache_group] += self._backend.kv_bytes_per_block(
                shape.num_kv_heads, shape.key_dim, shape.value_dim, DType(self._settings.kv_dtype)
            )
        return tuple(sizes)

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """Phase two. An earlier cache is given back first. Raises CapacityExceeded."""
        if self._arena is None:
            raise Unavailable("the stage is not loaded")
        self.drop_cache()
        layers = self._spec.layers_of(self._layers)
        self._pool = KvPool(self._backend, layers, num_blocks, self._settings)
        self._tables = SequenceTables(num_blocks, self._settings)
        self._model = StageModel(
            self._backend,
            self._spec,
            self._layers,
            self._weights,
            self._arena,
            self._pool.caches,
            self._graphs,
            no_scope if self._tracer is None else self._tracer.scope,
        )
        self._publish_memory()

    def drop_cache(self) -> None:
        """Give the KV cache back, and forget everything that refers to it."""
        self._graphs.clear()
        self._model = None
        self._tables = SequenceTables((), self._settings)
        self._sampler.clear()
        if self._pool is not None:
            self._pool.free()
            self._pool = None
        self._publish_memory()

    def add_sequence(self, add: AddSequence) -> None:
        """Make a sequence known to the sampler (last stage)."""
        self._sampler.add(add)

    def remove_sequence(self, seq: SeqId) -> None:
        """Forget a sequence."""
        self._tables.remove(seq)
        self._sampler.remove(seq)

    def reset_sequences(self) -> None:
        """Forget all sequences: their coordinator is gone. Waits for what is launched."""
        self._backend.synchronize()
        self._tables.clear()
        self._sampler.clear()

    @property
    def max_launched(self) -> int:
        """Steps that may be launched and not finished."""
        # A trial of a recording, and the watch for an overflow of f16, look at every step before the next may run.
        looks = self._graphs.wants_trials or self._precision.dtype is DType.F16
        return MAX_LAUNCHED if self._backend.capabilities.asynchronous and not looks else 1

    def run(self, ready: ReadyStep) -> StageResult:
        """`launch`, `finish` and `count`, waiting in between."""
        launched = self.launch(ready)
        result = self.finish(launched)
        self.count(launched)
        return result

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Do for the next step what needs no input: `launch` it with the result. Raises like `launch`."""
        model, step = self._loaded_model(), self._follow(plan)
        return step._replace(arrays=model.stage(step.arrays))

    def launch(self, ready: ReadyStep, prepared: PreparedStep | None = None, *, lends: bool = False) -> LaunchedStep:
        """Begin a step. Raises InvalidPlan if the plan contradicts what came before, Unavailable without a cache.

        Where another stage reaches this device it `lends` what it leaves: a hidden state then does not go to the host.
        """
        start_s = time.perf_counter()
        model, plan = self._loaded_model(), ready.plan
        if self._tracer is not None:
            self._tracer.begin_span("step", plan.step, rows=plan.num_rows, sequences=len(plan.slices))
        num_recorded = self._graphs.num_captures
        step = prepared or self._follow(plan)
        self._launch(ready, step.arrays)
        loan: Loan | None = None
        if lends and not model.is_last:
            outcome, loan = model.lend_hidden(step.shape.num_rows)
        else:
            if lends and step.sampled:
                loan = model.lend_tokens(len(step.rows))
            outcome = model.collect(step.shape)
        recorded = self._graphs.num_captures > num_recorded
        return LaunchedStep(ready, outcome, start_s, step.rows, step.needs_logits, step.sampled, recorded, loan)

    def refuse(self, ready: ReadyStep, error: CapacityExceeded) -> LaunchedStep:
        """A step that the device had no memory for, because others have taken it since (C-04): its own sequences end,
        with the error on the last stage, as not finite behind an earlier one, and so do those that share the blocks
        which it should have filled. Raises it where scores are wanted."""
        model, plan = self._loaded_model(), ready.plan
        if plan.num_scored:
            raise error
        self._backend.synchronize()
        facts = self._backend.device_facts()
        cause = f"{error} ({facts.free_bytes / 2**20:.1f} of {facts.total_bytes / 2**20:.1f} MiB are free there now)"
        _log.error("layers %s: step %d is refused: %s", self._layers, plan.step, cause)
        step = self._located(plan)
        model.spoil(step.arrays)
        left = np.zeros(plan.num_logit_rows) if model.is_last else np.full((plan.num_rows, self._spec.hidden), np.nan)
        self._sampler.refuse((piece.seq for piece in plan.slices), f"CapacityExceeded: {cause}")
        return LaunchedStep(ready, model.nothing(left), time.perf_counter(), step.rows, needs_logits=model.is_last)

    def due_s(self, launched: LaunchedStep) -> float:
        """When to look whether the oldest launched step is done, on the clock of time.perf_counter."""
        return self._meter.due_s(launched.start_s, launched.ready.plan)

    def note_unfinished(self) -> None:
        """The oldest launched step was watched, and not done until just now."""
        self._meter.look(is_done=False)

    def is_done(self, launched: LaunchedStep) -> bool:
        """Whether `finish` need not wait for the device."""
        return self._meter.look(is_done=launched.outcome.transfers.is_done())

    def finish(self, launched: LaunchedStep) -> StageResult:
        """What the oldest launched step left, its tokens sampled; `count` it afterwards. Waits for the device."""
        ready, values = launched.ready, launched.outcome.values
        launched.outcome.transfers.wait()
        model = self._loaded_model()
        if model.is_last:
            result = StageResult(ready, None, self._answer(model, launched))
        elif not len(values):  # handed over
            result = StageResult(ready, None, None)
        else:
            result = StageResult(ready, values.astype(np.float32, copy=False), None)
        self._end_s = time.perf_counter()
        return result

    def count(self, launched: LaunchedStep) -> None:
        """Add the step that was finished last to the counts; when what it left is on its way."""
        plan = launched.ready.plan
        self._meter.count(launched.start_s, plan, recorded=launched.recorded, end_s=self._end_s)
        if self._tracer is not None:
            self._tracer.end_span("step", plan.step)

    def note_nonfinite(self, plan: StepPlan, hidden: NDArray[np.float32]) -> None:
        """Log how many rows of what a step left are not finite, if any; the last stage decides what that means."""
        if not math.isfinite(hidden.sum()):
            num_rows = np.count_nonzero(~np.isfinite(hidden.sum(axis=1)))
            _log.error("layers %s: %d rows of step %d are not finite", self._layers, num_rows, plan.step)

    def _answer(self, model: StageModel, launched: LaunchedStep) -> StepDone:
        plan, rows = launched.ready.plan, launched.rows
        if not plan.num_scored:
            fetch = model.logits_of if launched.needs_logits else _no_logits
            best = launched.outcome.values.astype(np.int32, copy=False)
            return StepDone(plan.epoch, plan.step, self._sampler.sample(rows, fetch, best))
        logits = model.logits(plan.num_logit_rows)
        counts = [(count, piece.want_logits) for piece, count in zip(plan.slices, plan.num_scored, strict=True)]
        is_sampled = np.array([x for count, wanted in counts for x in [False] * count + [True] * wanted], np.bool_)
        tokens = self._sampler.sample(rows, logits[is_sampled])
        return StepDone(plan.epoch, plan.step, tokens, scores=self._sampler.score(plan.scored(), logits[~is_sampled]))

    def forward(self, ready: ReadyStep) -> NDArray[np.float32]:
        """The step without sampling: hidden state float32 [rows, H], or logits float32 [logit rows, vocab]."""
        model, plan = self._loaded_model(), ready.plan
        self._launch(ready, self._follow(plan).arrays)
        return model.logits(plan.num_logit_rows) if model.is_last else model.hidden(plan.num_rows)

    def reaches(self, other: "Stage") -> bool:
        """Whether this stage's device takes what the other's has left there, without either host waiting.

        Asked before every step, by the other's thread.
        """
        runs_ahead = self.max_launched > 1 and other.max_launched > 1
        return runs_ahead and self._backend.reaches(other._backend)

    def _launch(self, ready: ReadyStep, arrays: StepArrays) -> None:
        step = arrays._replace(tokens=ready.tokens, hidden=ready.hidden, lent=ready.lent)
        self._precision.launch(self._loaded_model(), step)

    def _loaded_model(self) -> StageModel:
        if self._model is None:
            raise Unavailable("the stage has no cache yet")
        return self._model

    def _loaded_pool(self) -> KvPool:
        if self._pool is None:
            raise Unavailable("the stage has no cache yet")
        return self._pool

    def free(self) -> None:
        """Give back everything on the device."""
        self.drop_cache()
        if self._arena is not None:
            self._arena.free()
            self._arena = None
        self._weights.free()
        self._publish_memory()

    @property
    def facts(self) -> StageFacts:
        """The stage now. From any thread: while steps run, numbers may be those before or after the present one."""
        counts = self._meter.counts
        return replace(
            self._memory,
            num_steps=counts.num_steps,
            busy_s=counts.busy_s,
            num_sequences=len(self._tables),
            graphs=self._graphs.counts,
            compute_dtype=self._precision.dtype.value,
            num_prefill_steps=counts.num_prefill_steps,
            prefill_busy_s=counts.prefill_busy_s,
        )

    def _publish_memory(self) -> None:
        self._memory = StageFacts(self.weight_bytes, self.arena_bytes, self.cache_bytes, self.block_bytes())

    def _follow(self, plan: StepPlan) -> PreparedStep:
        """Have the sequences' tables follow the plan, and copy its blocks."""
        pool = self._loaded_pool()
        self._tables.apply(plan)
        for copy in plan.block_copies:
            pool.copy_block(copy.group, copy.source, copy.target)
        return self._located(plan)

    def _located(self, plan: StepPlan) -> PreparedStep:
        """A step whose plan the tables follow already."""
        place = self._tables.locate(plan)
        where = (place.positions, place.row_starts, place.slots, place.blocks)
        logit_rows = logit_rows_of(plan, place.row_starts[1:] - 1)
        shape = StepShape(len(place.positions), len(plan.slices), len(logit_rows))
        if not self.is_last:
            return PreparedStep(StepArrays(*where, logit_rows), shape)
        rows = tuple([(piece.seq, piece.pos + piece.num_tokens) for piece in plan.slices if piece.want_logits])
        # scored rows are among the logit rows, and the host's
        arrays = StepArrays(*where, logit_rows, None if plan.num_scored else self._sampler.device_params(rows))
        if plan.num_scored or self._sampler.needs_logits(rows):
            return PreparedStep(arrays, shape, rows, needs_logits=True)
        return PreparedStep(arrays, shape, rows, sampled={key: i for i, key in enumerate(rows)})


def _no_logits(rows: list[int]) -> NDArray[np.float32]:
    raise InvalidPlan("a sequence was added, or its sampling changed, after a step that samples it was launched")
