"""The mock device: what it records, what it counts, how its time passes, and that it holds no memory."""

import numpy as np
import pytest

from lamina.kernels import ops
from lamina.kernels.buffer import DType, Extent, HostTensor, StepShape
from lamina.kernels.mock import MockBackend, MockRates
from lamina.spec.errors import CapacityExceeded
from lamina.spec.quant import GgmlType, row_bytes
from support.backends import BACKENDS, Bench
from support.mini_stage import MiniStage, Piece
from support.paged import Heads, PagedSequences

RATES = MockRates(bytes_per_s=1e9, flops_per_s=1e10, launch_s=1e-5)


def _empty_tensor(kind: GgmlType, rows: int, cols: int) -> HostTensor:
    return HostTensor(kind, rows, cols, np.broadcast_to(np.uint8(0), (rows, row_bytes(kind, cols))))


def _bench(backend: MockBackend) -> Bench:
    return Bench(backend, BACKENDS["mock"], np.random.default_rng(0))


def test_a_70b_stage_fits_in_no_memory() -> None:
    """B-06: 40 layers of 8192 x 28672 in Q4_K with their caches are counted to the byte, and hold none of them."""
    backend = MockBackend(total_bytes=40 << 30)
    layers = [
        (
            backend.load_weight([_empty_tensor(GgmlType.Q4_K, rows, 8192) for rows in (8192, 1024, 1024)]),
            backend.load_weight([_empty_tensor(GgmlType.Q4_K, 28672, 8192)] * 2),
            backend.alloc_kv(1024, 8, 128, 128, DType.F16),
        )
        for _ in range(40)
    ]
    weights = (8192 + 2048 + 2 * 28672) * 8192 // 256 * 144
    caches = 1024 * 16 * 8 * 2 * 128 * 2
    assert [layers[0][0].num_bytes + layers[0][1].num_bytes, layers[0][2].num_bytes] == [weights, caches]
    assert (40 << 30) - backend.device_facts().free_bytes == 40 * (weights + caches)
    with pytest.raises(CapacityExceeded):
        backend.alloc((8 << 30,), DType.F32)


def test_launches_are_recorded_with_their_sizes() -> None:
    """B-06: op, rows and operand shapes of every launch, replayed ones included, at the step's shape."""
    backend = MockBackend()
    stage = MiniStage(_bench(backend))
    backend.history.clear()
    graph = backend.capture(stage.launch_all, StepShape(1, 1, 1))
    assert not backend.history
    shape = stage.stage_inputs([Piece(0, [1, 2, 3], [4]), Piece(0, [5], [6])], [2, 3])
    backend.replay(graph, shape)
    assert len(backend.history) == graph.num_launches
    assert {record.shape for record in backend.history} == {StepShape(4, 2, 2)}
    rows = {record.op: record.num_rows for record in backend.history}
    assert (rows["attention"], rows["gather_rows"], rows["argmax"]) == (4, 2, 2)
    gated = next(record for record in backend.history if record.op == "gated_linear")
    assert gated.operands == (("x", (24, 64)), ("weight", (192, 64)), ("out", (24, 96)))
    assert backend.num_launches["linear"] == 4


def test_history_is_bounded_and_counts_are_not() -> None:
    """A long simulation keeps its last launches and counts all."""
    backend = MockBackend(max_history=5)
    bench = _bench(backend)
    x = bench.output(2, 4)
    bench.step(2)
    for _ in range(12):
        ops.add(backend, x, x, x)
    assert len(backend.history) == 5
    assert backend.num_launches == {"add": 12}


def test_time_passes_by_bytes_or_flops() -> None:
    """A decode row costs the weight's bytes, a prefill its flops; the clock is told, nobody sleeps."""
    seconds: list[float] = []
    backend = MockBackend(rates=RATES, advance=seconds.append)
    weight = backend.load_weight([_empty_tensor(GgmlType.F16, 1000, 2000)])
    x, out = backend.alloc((256, 2000), DType.F32, Extent.ROWS), backend.alloc((256, 1000), DType.F32, Extent.ROWS)
    for rows in (1, 256):
        backend.set_shape(StepShape(rows, 1, 0))
        ops.linear(backend, x, weight, out)
    decode = 1e-5 + (1000 * 2000 * 2 + 4 * 3000) / 1e9
    prefill = 1e-5 + 2 * 256 * 1000 * 2000 / 1e10
    assert seconds == pytest.approx([decode, prefill], rel=1e-12)
    assert backend.busy_s == pytest.approx(decode + prefill, rel=1e-12)


def test_attention_costs_its_context() -> None:
    """Keys are read once per sequence, seen once per row, and only as far as the window reaches."""
    backend = MockBackend(rates=RATES)
    heads = Heads(4, 2, 64, 64)
    paged = PagedSequences(_bench(backend), heads, [100, 40], DType.F16)
    pieces = [(1, 7, 7), (0, 99, 100), (1, 38, 40)]
    q = np.zeros((3, 4, 64), np.float32)
    token_bytes, io_bytes = 2 * 2 * 64 * 2, 4 * 3 * 512
    paged.attend(q, pieces, scale=1.0)
    record = backend.history[-1]
    assert record.num_bytes == io_bytes + (100 + 40) * token_bytes
    assert record.num_flops == 2 * (100 + 39 + 40) * 4 * 128
    paged.attend(q, pieces, scale=1.0, window=16)
    assert backend.history[-1].num_bytes == io_bytes + 32 * token_bytes
    assert backend.history[-1].num_flops == 2 * 48 * 4 * 128


def test_downloads_are_zeros() -> None:
    """Nothing is computed: results are zero, of the right dtype and shape."""
    backend = MockBackend()
    buffer = backend.alloc((8, 3), DType.I32)
    backend.upload(buffer, np.ones((8, 3), np.int32))
    values = backend.download(buffer, 5)
    assert (values.dtype, values.shape, int(values.sum())) == (np.int32, (5, 3), 0)
