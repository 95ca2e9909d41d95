"""Recordings of one stage, bounded (C-15). Owned by the compute thread; graph state never leaves its stage (P-12)."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from lamina.kernels.backend import Backend, Graph
from lamina.kernels.buffer import StepShape

MAX_GRAPHS = 32


class GraphCache:
    """Runs a function's launches by replay where the backend says so. Keyed by shape bucket, LRU."""

    def __init__(self, backend: Backend, *, enabled: bool = True, max_graphs: int = MAX_GRAPHS) -> None:
        self._backend = backend
        self._enabled = enabled
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self.num_captures = 0
        self.num_replays = 0
        self.num_evictions = 0

    def run(self, fn: Callable[[], None], shape: StepShape) -> None:
        """Run what `fn` launches at this shape; `fn` must launch the same ops whenever it is called."""
        bucket = self._backend.graph_bucket(shape) if self._enabled else None
        self._backend.set_shape(shape)
        if bucket is None:
            fn()
            return
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = self._graphs[bucket] = self._backend.capture(fn, shape)
            self.num_captures += 1
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)[1].destroy()
                self.num_evictions += 1
        self._graphs.move_to_end(bucket)
        self._backend.replay(graph, shape)
        self.num_replays += 1

    def clear(self) -> None:
        """Destroy all recordings."""
        while self._graphs:
            self._graphs.popitem()[1].destroy()
