"""Recordings of one stage: bounded in number, bytes and age, counted, given up where they fail or do not pay (C-15).

Owned by the compute thread; graph state never leaves its stage (P-12). Keys are the backend's buckets of step sizes,
never addresses; a cache serves one topology (one stage's weights, caches and dtype) and is cleared when that changes.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend, Graph, GraphDecision
from lamina.kernels.buffer import StepShape
from lamina.spec.device import GraphCounts
from lamina.spec.errors import CapacityExceeded, LaminaError

_log = logging.getLogger(__name__)
_TRIALS = 3
_RETRY_S = 10.0  # a device that was full is asked again after this long
_WORTHWHILE = 0.97  # of the time op by op: a recording that saves less than 3 % is not worth its memory


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What a stage's recordings may take; one that nothing replayed for `max_idle_s` goes."""

    max_graphs: int = 32
    max_bytes: int = 512 << 20
    max_idle_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Rerun:
    """What a trial needs of a step: to put its inputs back as they were, and to read what it left."""

    restore: Callable[[], None]
    outputs: Callable[[], Sequence[NDArray[np.generic]]]


@dataclass(slots=True)
class _Held:
    graph: Graph
    last_used_s: float


class GraphCache:
    """Runs a function's launches by replay where that is decided, op by op elsewhere."""

    def __init__(
        self,
        backend: Backend,
        *,
        decision: GraphDecision | None = None,
        limits: GraphLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decision` None asks the backend."""
        self._backend = backend
        self._decision = decision or backend.graph_decision()
        self._limits = limits or GraphLimits()
        self._clock = clock
        self._graphs: OrderedDict[Hashable, _Held] = OrderedDict()  # the one replayed last comes last
        self._eager: dict[Hashable, str] = {}  # buckets that are run op by op, and why
        self._retry_at_s = float("-inf")  # no capture before: the device was full
        self._held_bytes = 0
        self._vetoes: Counter[str] = Counter()
        self.num_captures = 0
        self.num_replays = 0
        self.num_evictions = 0

    @property
    def counts(self) -> GraphCounts:
        """What was done so far."""
        return GraphCounts(
            self.num_captures,
            self.num_replays,
            self.num_evictions,
            len(self._graphs),
            self._held_bytes,
            dict(self._vetoes),
        )

    @property
    def wants_trials(self) -> bool:
        """Whether `run` should be told how to run a step again."""
        return self._decision.enabled and self._decision.probe

    def run(
        self, fn: Callable[[], None], shape: StepShape, rerun: Rerun | None = None, variant: Hashable = None
    ) -> None:
        """Run what `fn` launches at this shape; it must launch the same ops whenever the variant is the same.

        Without `rerun` nothing is tried out: a recording on trial is kept unseen.
        """
        held = self._recording(fn, shape, rerun, variant) if self._decision.enabled else None
        self._backend.set_shape(shape)
        if held is None:
            fn()
            return
        held.last_used_s = self._clock()
        self._backend.replay(held.graph, shape)
        self.num_replays += 1
        self._evict_idle(held.last_used_s)

    def clear(self) -> None:
        """Destroy all recordings, and give buckets that were given up another chance."""
        while self._graphs:
            self._graphs.popitem()[1].graph.destroy()
        self._held_bytes = 0
        self._eager.clear()
        self._retry_at_s = float("-inf")

    def _recording(
        self, fn: Callable[[], None], shape: StepShape, rerun: Rerun | None, variant: Hashable
    ) -> _Held | None:
        """The recording that serves this shape, made if need be; None: run it op by op."""
        bucket = self._backend.graph_bucket(shape)
        if bucket is not None and variant is not None:
            bucket = (bucket, variant)
        held = self._graphs.get(bucket)
        if held is not None:
            self._graphs.move_to_end(bucket)
            return held
        reason = "step too large" if bucket is None else self._eager.get(bucket)
        if reason is None and self._clock() >= self._retry_at_s:
            held = self._capture(bucket, fn, shape, rerun)
            if held is not None:
                return held
            reason = self._eager.get(bucket)
        reason = reason or "no memory"
        self._vetoes[reason] += 1
        return None

    def _capture(self, bucket: Hashable, fn: Callable[[], None], shape: StepShape, rerun: Rerun | None) -> _Held | None:
        """A new recording; one that fails costs the recording, not the step. Ops at fault say so when they run."""
        try:
            graph = self._backend.capture(fn, shape)
        except (CapacityExceeded, MemoryError) as error:  # others may give some back
            _log.warning("%s: no recording of steps like %s for now: %s", self._backend.name, bucket, error)
            self._retry_at_s = self._clock() + _RETRY_S
            return None
        except (LaminaError, RuntimeError) as error:
            self._give_up(bucket, "capture failed", f"{type(error).__name__}: {error}")
            return None
        self.num_captures += 1
        fault: tuple[str, str] | None = None
        if graph.num_bytes > self._limits.max_bytes:
            fault = "too many bytes", f"{graph.num_bytes}, {self._limits.max_bytes} are allowed"
        elif self._decision.probe and rerun is not None:
            try:
                fault = _trial(self._backend, fn, graph, shape, rerun)
            except BaseException:  # the step's own fault, and its loss
                graph.destroy()
                raise
            rerun.restore()
        if fault is not None:
            graph.destroy()
            self._give_up(bucket, *fault)
            return None
        held = self._graphs[bucket] = _Held(graph, self._clock())
        self._held_bytes += graph.num_bytes
        while len(self._graphs) > self._limits.max_graphs or self._held_bytes > self._limits.max_bytes:
            self._evict_oldest()
        return held

    def _give_up(self, bucket: Hashable, reason: str, why: str) -> None:
        level = logging.DEBUG if reason in self._eager.values() else logging.WARNING
        _log.log(level, "%s: steps like %s run op by op: %s (%s)", self._backend.name, bucket, reason, why)
        self._eager[bucket] = reason

    def _evict_idle(self, now: float) -> None:
        while next(iter(self._graphs.values())).last_used_s < now - self._limits.max_idle_s:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, oldest = self._graphs.popitem(last=False)
        self._held_bytes -= oldest.graph.num_bytes
        oldest.graph.destroy()
        self.num_evictions += 1


def _trial(
    backend: Backend, fn: Callable[[], None], graph: Graph, shape: StepShape, rerun: Rerun
) -> tuple[str, str] | None:
    """Why the recording should not be kept, as (reason, figures): its results differ, or it is not faster (C-13).

    Runs alternate, the best of each counts; the cache of keys and values is written with the same values every time.
    """

    def eager() -> None:
        backend.set_shape(shape)
        fn()

    def replay() -> None:
        backend.replay(graph, shape)

    found = []
    for run in (eager, replay):  # the first of each also compiles and loads what it needs
        rerun.restore()
        run()
        found.append([values.tobytes() for values in rerun.outputs()])
    if found[0] != found[1]:
        return "results differ", "compared bit for bit"
    best = [float("inf"), float("inf")]
    for _ in range(_TRIALS):
        best = [min(seconds, _seconds(backend, run, rerun)) for seconds, run in zip(best, (eager, replay), strict=True)]
    if best[1] > _WORTHWHILE * best[0]:
        return "not faster", f"{1e3 * best[1]:.3f} ms, {1e3 * best[0]:.3f} ms op by op"
    return None


def _seconds(backend: Backend, run: Callable[[], None], rerun: Rerun) -> float:
    rerun.restore()
    backend.synchronize()
    start = time.perf_counter()
    run()
    backend.synchronize()
    return time.perf_counter() - start
