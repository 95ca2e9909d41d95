"""What every backend may leave out (B-02), and what host-side recording refuses."""

from collections.abc import Callable

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Backend, Capabilities, DeviceFacts, Event, GraphError, Unsupported
from lamina.kernels.buffer import DType, Extent, StepLimits, StepShape
from lamina.kernels.mock import MockBackend
from lamina.kernels.ops import LaunchError
from lamina.kernels.recording import RecordingBackend
from lamina.kernels.reference import ReferenceBackend

LEDGERED = [ReferenceBackend, MockBackend]


def _refuse(*_: object, **__: object) -> None:
    raise NotImplementedError


def _minimal_backend() -> Backend:
    """A Backend with its abstract methods filled in and nothing else."""
    body: dict[str, object] = dict.fromkeys(Backend.__abstractmethods__, _refuse)
    body |= {"name": "minimal", "capabilities": Capabilities()}
    return type("MinimalBackend", (Backend,), body)()


def test_a_minimal_backend_constructs_and_reports_what_it_lacks() -> None:
    """B-02: optional methods default to Unsupported or nothing, and the flags say so."""
    backend = _minimal_backend()
    able = backend.capabilities
    flags = (able.graphs, able.streams, able.events, able.pinned_memory, able.batch_invariant)
    assert not any(flags)
    event = Event()
    for call in (
        backend.create_stream,
        backend.create_event,
        lambda: backend.record_event(event),
        lambda: backend.wait_event(event),
        lambda: backend.alloc_pinned(1),
    ):
        with pytest.raises(Unsupported, match="minimal has"):
            call()
    limits = StepLimits(1, 1, 1, 1)
    assert backend.workspace_bytes(limits, 1, 1) == 0
    assert backend.graph_bucket(StepShape(1, 1, 1)) == backend.graph_bucket(StepShape(7, 3, 3))
    backend.reserve_workspace(limits, 1, 1)
    backend.synchronize()
    backend.bind_to_thread()
    backend.close()


def test_required_methods_are_abstract() -> None:
    """B-02: a backend without them does not construct."""
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (Backend,), {})()
    assert RecordingBackend.__abstractmethods__ < Backend.__abstractmethods__ | {"_run"}


def test_facts_are_a_snapshot() -> None:
    """device_facts is asked anew each time."""
    backend = MockBackend(total_bytes=1000)
    before = backend.device_facts()
    backend.alloc((100,), DType.U8)
    assert (before.free_bytes, backend.device_facts()) == (1000, DeviceFacts("mock", "mock", 1000, 900))


@pytest.mark.parametrize("make", LEDGERED)
def test_only_launches_can_be_recorded(make: Callable[[], Backend]) -> None:
    """B-27: memory work inside a capture would bake in addresses or counts, so it is refused."""
    backend = make()
    x = backend.alloc((4, 4), DType.F32, Extent.ROWS)
    cache = backend.alloc_kv(2, 1, 32, 32, DType.F32)
    shape = StepShape(1, 1, 0)
    graph = backend.capture(lambda: None, shape)
    for forbidden in (
        lambda: backend.alloc((1,), DType.F32),
        lambda: backend.free(x),
        lambda: backend.upload(x, np.zeros((1, 4), np.float32)),
        lambda: backend.download(x, 1),
        lambda: backend.copy(x, x, 1),
        lambda: backend.alloc_kv(1, 1, 32, 32, DType.F32),
        lambda: backend.copy_kv_block(cache, 0, 1),
        lambda: backend.replay(graph, shape),
    ):
        with pytest.raises(GraphError, match="inside a capture"):
            backend.capture(forbidden, shape)
    assert backend.download(x, 4).shape == (4, 4)


@pytest.mark.parametrize("make", LEDGERED)
def test_a_launch_needs_a_shape(make: Callable[[], Backend]) -> None:
    """Without set_shape there is no number of rows to run at."""
    backend = make()
    x = backend.alloc((4, 4), DType.F32)
    with pytest.raises(LaunchError, match="call set_shape first"):
        ops.softcap(backend, x, 1.0)


@pytest.mark.parametrize("make", LEDGERED)
def test_a_foreign_graph_is_refused(make: Callable[[], Backend]) -> None:
    """A recording belongs to the backend that made it."""
    graph = make().capture(lambda: None, StepShape(1, 1, 0))
    with pytest.raises(GraphError, match="its own recordings"):
        make().replay(graph, StepShape(1, 1, 0))


@pytest.mark.parametrize("make", LEDGERED)
def test_row_starts_must_cover_the_sequences(make: Callable[[], Backend]) -> None:
    """attention reads num_seqs + 1 row starts; fewer is a LaunchError."""
    backend = make()
    q = backend.alloc((4, 32), DType.F32, Extent.ROWS)
    ints = backend.alloc((4,), DType.I32, Extent.ROWS)
    table = backend.alloc((4, 1), DType.I32, Extent.SEQS)
    cache = backend.alloc_kv(1, 1, 32, 32, DType.F32)
    starts = backend.alloc((2,), DType.I32)
    backend.set_shape(StepShape(4, 2, 0))
    with pytest.raises(LaunchError, match="row_starts has 2 rows, the step needs 3"):
        ops.attention(backend, q, cache, ints, starts, table, q, scale=1.0)
