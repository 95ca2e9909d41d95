"""Recording and replay on every backend: nothing runs at capture, sizes are read at replay, failures leave no trace."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.backend import Graph, GraphError
from lamina.kernels.buffer import StepShape
from lamina.kernels.ops import LaunchError
from support.backends import Bench
from support.mini_stage import MiniStage, Piece

NUM_OPS = 14
ONE_ROW = StepShape(1, 1, 1)
DECODE = [Piece(0, [3], [7])]
MIXED = [Piece(0, [5, 9, 2, 44], [3]), Piece(17, [8], [11, 2]), Piece(31, [6, 1], [19, 4, 13])]
HISTORY = [Piece(0, [(7 * i) % 50 for i in range(17)], [11, 2])], [Piece(0, list(range(24)), [19, 4, 13])]


def _capture(stage: MiniStage, shape: StepShape, captured_at: StepShape = ONE_ROW) -> Graph:
    """A recording that may be replayed at `shape`, captured at another shape if the backend's buckets allow."""
    backend = stage.backend
    bucket = backend.graph_bucket(shape)
    if bucket is None:
        pytest.skip("this backend runs such a step op by op")
    return backend.capture(stage.launch_all, captured_at if backend.graph_bucket(captured_at) == bucket else shape)


def _run_eagerly(stage: MiniStage, pieces: list[Piece], logit_rows: list[int]) -> StepShape:
    shape = stage.stage_inputs(pieces, logit_rows)
    stage.backend.set_shape(shape)
    stage.launch_all()
    return shape


def _fill_history(stage: MiniStage) -> None:
    for pieces in HISTORY:
        _run_eagerly(stage, pieces, [])
    _run_eagerly(stage, [Piece(24, [40, 41, 42, 43, 44, 45, 46], [19, 4, 13])], [0])


def test_captured_at_one_row_and_replayed_at_seven(computing: Bench) -> None:
    """Design 4: other rows, sequences, lengths, blocks and logit rows than at capture; equal to op-by-op launches."""
    stage = MiniStage(computing)
    _fill_history(stage)
    eager_shape = _run_eagerly(stage, MIXED, [3, 4, 6])
    wanted = stage.results(eager_shape)
    stage.stage_inputs(DECODE, [0])
    graph = _capture(stage, StepShape(7, 3, 3))
    for rows in (stage.x, stage.logits):
        stage.backend.upload(rows, np.full(rows.shape, 7.0, np.float32))
    shape = stage.stage_inputs(MIXED, [3, 4, 6])
    stage.backend.set_shape(ONE_ROW)
    stage.backend.replay(graph, shape)
    found = stage.results(shape)
    computing.assert_close("linear", found[0], wanted[0])
    computing.assert_close("linear", found[1], wanted[1])
    assert found[2].tolist() == wanted[2].tolist()
    assert (stage.backend.download(stage.logits, 4)[3] == 7).all()
    stage.stage_inputs(MIXED[:1], [])
    stage.backend.replay(_capture(stage, StepShape(4, 1, 0)), StepShape(4, 1, 0))
    computing.assert_close("linear", stage.backend.download(stage.x, 4), wanted[0][:4])


def _assert_whole(bench: Bench, graph: Graph) -> None:
    """The graph holds every op; a device may launch more than one thing, or less, for an op."""
    assert graph.num_launches == NUM_OPS if bench.entry.strict else graph.num_launches > 0


def test_capture_runs_nothing(computing: Bench) -> None:
    """Capture leaves buffers and cache as they were."""
    stage = MiniStage(computing)
    shape = stage.stage_inputs(DECODE, [0])
    stage.backend.upload(stage.x, np.full((1, 64), 3.0, np.float32))
    _capture(stage, shape)
    stage.backend.synchronize()
    assert (stage.backend.download(stage.x, 1) == 3).all()
    k, v = stage.backend.read_kv(stage.cache, [7], 16)
    assert not k.any()
    assert not v.any()


def test_the_shape_of_eager_launches_survives(computing: Bench) -> None:
    """Neither capture nor replay changes what set_shape said."""
    stage = MiniStage(computing)
    buffer = computing.floats(np.ones((6, 4)))
    computing.step(2)
    graph = _capture(stage, ONE_ROW)
    stage.backend.replay(graph, stage.stage_inputs(DECODE, [0]))
    ops.add(computing.backend, buffer, buffer, buffer)
    assert computing.read(buffer)[:, 0].tolist() == [2, 2, 1, 1, 1, 1]


def test_two_graphs_coexist(computing: Bench) -> None:
    """P-12: recordings are apart; destroying one leaves the other; a destroyed one is refused."""
    backend = computing.backend
    x, out = computing.floats(np.full((3, 4), 2.0)), computing.output(3, 4)
    shape = StepShape(3, 1, 0)
    double = backend.capture(lambda: ops.add(backend, x, x, out), shape)
    cap = backend.capture(lambda: ops.softcap(backend, out, 1.0), shape)
    backend.replay(double, shape)
    assert (computing.read(out) == 4).all()
    backend.replay(cap, shape)
    computing.assert_close("softcap", computing.read(out), np.full((3, 4), np.tanh(4.0)))
    double.destroy()
    double.destroy()
    with pytest.raises(GraphError):
        backend.replay(double, shape)
    backend.upload(out, np.full((3, 4), 0.5, np.float32))
    backend.replay(cap, shape)
    computing.assert_close("softcap", computing.read(out), np.full((3, 4), np.tanh(0.5)))
    cap.destroy()


def test_a_failure_inside_capture_leaves_the_backend_usable(bench: Bench) -> None:
    """B-09: the exception passes through, no capture stays open, eager launches and captures work after it."""
    stage = MiniStage(bench)

    def fail() -> None:
        ops.embed(stage.backend, stage.tokens, stage.table, stage.x)
        raise RuntimeError("injected")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="injected"):
            stage.backend.capture(fail, ONE_ROW)
    with pytest.raises(LaunchError):
        stage.backend.capture(lambda: ops.add(stage.backend, stage.x, stage.mixed, stage.x), ONE_ROW)
    _run_eagerly(stage, DECODE, [0])
    graph = _capture(stage, ONE_ROW)
    stage.backend.replay(graph, ONE_ROW)
    _assert_whole(bench, graph)


def test_capture_within_capture_is_refused(bench: Bench) -> None:
    """A second capture is a GraphError, and the backend is usable after it."""
    stage = MiniStage(bench)
    with pytest.raises(GraphError):
        stage.backend.capture(lambda: stage.backend.capture(stage.launch_all, ONE_ROW) and None, ONE_ROW)
    _assert_whole(bench, _capture(stage, ONE_ROW))


def test_an_empty_recording_is_a_recording(bench: Bench) -> None:
    """Nothing recorded, nothing replayed."""
    graph = bench.backend.capture(lambda: None, ONE_ROW)
    assert graph.num_launches == 0
    bench.backend.replay(graph, ONE_ROW)


def test_addresses_and_allocations_are_stable(bench: Bench) -> None:
    """B-27: over 1,000 steps no arena buffer moves and nothing is allocated."""
    stage = MiniStage(bench)
    graph = _capture(stage, ONE_ROW)
    count = bench.entry.num_allocations
    shape = stage.stage_inputs(DECODE, [0])
    stage.backend.replay(graph, shape)
    addresses = [bench.entry.address(buffer) for buffer in stage.buffers()]
    assert len(set(addresses)) == len(addresses)
    allocations = count(stage.backend) if count else None
    for step in range(1000):
        shape = stage.stage_inputs([Piece(step % 100, [step % 50], [1, 2, 3, 4, 5, 6, 7])], [0])
        stage.backend.replay(graph, shape)
    assert [bench.entry.address(buffer) for buffer in stage.buffers()] == addresses
    assert allocations == (count(stage.backend) if count else None)
