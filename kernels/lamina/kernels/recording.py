"""Recording and replay of op launches on the host, shared by backends whose device records nothing itself.

Owns the step shape in force, whether a capture is open, and the recorded lists. Knows no op: a subclass runs them.
Used by one compute thread; nothing here locks.
"""

from abc import abstractmethod
from collections.abc import Callable

from lamina.kernels.backend import Backend, Graph, GraphError
from lamina.kernels.buffer import Buffer, StepShape
from lamina.kernels.ops import Args, LaunchError, OpSpec

_PER_ROW = frozenset(
    ("tokens", "x", "y", "out", "positions", "slots", "k", "v", "q", "indices", "experts", "shares", "params")
)


class RecordedGraph(Graph):
    """A flat list of validated launches; a replay runs them in order."""

    def __init__(self, owner: "RecordingBackend", launches: list[tuple[OpSpec, Args]]) -> None:
        self.owner = owner
        self.launches: list[tuple[OpSpec, Args]] | None = launches
        self.num_launches = len(launches)

    def destroy(self) -> None:
        """Drop the list; a second time does nothing."""
        self.launches = None


class RecordingBackend(Backend):
    """A Backend whose graphs are lists of (op, args). Subclasses implement `_run`, memory and facts."""

    def __init__(self) -> None:
        self._shape: StepShape | None = None
        self._recording: list[tuple[OpSpec, Args]] | None = None

    @abstractmethod
    def _run(self, op: OpSpec, args: Args, shape: StepShape) -> None:
        """Run one validated op now at this shape."""

    def _launch(self, op: OpSpec, args: Args) -> None:
        if self._recording is not None:
            self._recording.append((op, args))
            return
        if self._shape is None:
            raise LaunchError(f"{op.name}: no step shape; call set_shape first")
        self._run(op, args, self._shape)

    def set_shape(self, shape: StepShape) -> None:
        """The sizes that ops launched from now on run at."""
        self._shape = shape

    def capture(self, fn: Callable[[], None], shape: StepShape) -> RecordedGraph:
        """Record what `fn` launches without running it. Raises GraphError inside another capture.

        What `fn` raises passes through, and the backend is as it was before (B-09).
        """
        self._require_no_capture("a second capture")
        launches: list[tuple[OpSpec, Args]] = []
        previous, self._shape = self._shape, shape
        self._recording = launches
        try:
            fn()
        finally:
            self._recording, self._shape = None, previous
        return RecordedGraph(self, launches)

    def replay(self, graph: Graph, shape: StepShape) -> None:
        """Run the recording at this shape. Raises GraphError if it is destroyed, not ours, or a capture is open."""
        self._require_no_capture("replay")
        if not isinstance(graph, RecordedGraph) or graph.owner is not self:
            raise GraphError(f"{self.name} can replay its own recordings only")
        if graph.launches is None:
            raise GraphError(f"{self.name}: the recording was destroyed; capture again")
        for op, args in graph.launches:
            self._run(op, args, shape)

    def _require_no_capture(self, what: str) -> None:
        """Raise GraphError if a capture is open: `what` cannot be part of a recording."""
        if self._recording is not None:
            raise GraphError(f"{self.name}: {what} inside a capture; only op launches can be recorded")


def operand_rows(op: OpSpec, args: Args, shape: StepShape) -> int:
    """How many rows `op` acts on: the extent of what it writes, at `shape`.

    Raises LaunchError if an operand has fewer rows than that, or than its own extent at `shape`.
    """
    written = args.get("out", args.get("x", args.get("k")))
    if not isinstance(written, Buffer):
        raise LaunchError(f"{op.name}: no operand gives its rows")
    num_rows = shape.rows_in_force(written.extent, written.shape[0])
    for name, value in args.items():
        if not isinstance(value, Buffer):
            continue
        needed = shape.rows_in_force(value.extent, 0)
        if name in _PER_ROW and not (name == "x" and op.name == "gather_rows"):
            needed = max(needed, num_rows)
        if op.name == "attention" and name == "row_starts":
            needed = shape.num_seqs + 1
        if needed > value.shape[0]:
            raise LaunchError(f"{op.name}: {name} has {value.shape[0]} rows, the step needs {needed}")
    return num_rows
