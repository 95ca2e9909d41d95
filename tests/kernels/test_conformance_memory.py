"""Memory of every backend: buffers, copies, weights, KV caches, and what happens when there is none left."""

import re

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType, Extent
from lamina.spec.errors import CapacityExceeded
from lamina.spec.quant import GgmlType
from support.backends import BACKENDS, BackendUnderTest, Bench, create_or_skip

BUFFER_DTYPES = [DType.F32, DType.F16, DType.BF16, DType.I32, DType.U8]
MIB = 1 << 20

limited = pytest.mark.parametrize(
    "entry", [pytest.param(entry, id=name, marks=entry.marks) for name, entry in BACKENDS.items()]
)


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
@pytest.mark.parametrize("dtype", BUFFER_DTYPES, ids=lambda dtype: dtype.value)
def test_a_new_buffer_is_zero(bench: Bench, dtype: DType, shape: tuple[int, ...]) -> None:
    """B-01: alloc gives zeroed memory of the shape and dtype asked for."""
    buffer = bench.backend.alloc(shape, dtype)
    values = bench.read(buffer)
    assert values.dtype == dtype.host_dtype
    assert values.shape == shape
    assert not values.any()
    bench.backend.free(buffer)


@pytest.mark.parametrize("dtype", BUFFER_DTYPES, ids=lambda dtype: dtype.value)
def test_upload_and_download_are_exact(computing: Bench, dtype: DType) -> None:
    """B-01: what goes up comes down, bit by bit; rows beyond the upload keep their values."""
    raw = computing.rng.integers(0, 100, (7, 5)).astype(dtype.host_dtype)
    buffer = computing.backend.alloc((9, 5), dtype)
    computing.backend.upload(buffer, raw)
    computing.backend.upload(buffer, raw[:2] + raw.dtype.type(1))
    values = computing.backend.download(buffer, 9)
    assert np.array_equal(values[:2], raw[:2] + raw.dtype.type(1))
    assert np.array_equal(values[2:7], raw[2:])
    assert not values[7:].any()


def test_asynchronous_copies_keep_the_order_of_the_stream(computing: Bench) -> None:
    """B-10: up, within the device, down again, and nobody waits but for the event at the end."""
    backend = computing.backend
    raw = computing.rng.integers(0, 100, (7, 5)).astype(np.int32)
    first, second = (backend.alloc((9, 5), DType.I32) for _ in range(2))
    given, found = backend.host_copy(first), backend.host_copy(second)
    assert not given.values.any()
    event = backend.create_event() if backend.capabilities.events else None
    given.values[:7] = raw
    given.upload(7)
    backend.copy(first, second, 7)
    found.download(9)
    if event is not None:
        backend.record_event(event)
        backend.wait_event(event)
        assert backend.event_done(event)
    assert np.array_equal(found.values[:7], raw)
    assert not found.values[7:].any()
    for copy in (given.upload, given.download):
        copy(0)
        with pytest.raises(ValueError, match="10 rows, there are 9"):
            copy(10)
    assert np.array_equal(given.values[:7], raw)
    if backend.capabilities.pinned_memory:
        with pytest.raises(ValueError, match="has gaps"):
            backend.host_copy(first.columns(1, 3))


def test_parts_and_rows_are_views(computing: Bench) -> None:
    """Several buffers side by side in one: one transfer fills them, ops and copies see each alone."""
    backend = computing.backend
    whole = backend.alloc((30,), DType.I32)
    ids = whole.part(2, (4,), DType.I32, Extent.ROWS)
    table = whole.part(7, (3, 5), DType.I32, Extent.SEQS)
    halves = whole.part(24, (2, 2), DType.F32, Extent.ROWS)
    values = np.arange(30, dtype=np.int32)
    values[24:28] = np.array([0.5, -1.5, 2.0, 3.0], np.float32).view(np.int32)
    backend.upload(whole, values)
    assert backend.download(ids, 4).tolist() == [2, 3, 4, 5]
    assert backend.download(table, 3).tolist() == (7 + np.arange(15)).reshape(3, 5).tolist()
    assert backend.download(halves, 2).tolist() == [[0.5, -1.5], [2.0, 3.0]]
    backend.copy(table.rows(2, 3), table.rows(0, 1), 1)
    backend.copy(ids.rows(0, 2), ids.rows(2, 4), 2)
    assert backend.download(whole, 12).tolist() == [0, 1, 2, 3, 2, 3, 6, 17, 18, 19, 20, 21]
    for wrong in ((27, (4,), DType.I32), (-1, (2,), DType.I32), (16, (3, 5), DType.I32), (0, (2,), DType.F16)):
        with pytest.raises(ValueError, match="are not within a buffer of"):
            whole.part(*wrong, Extent.FIXED)
    for start, stop in ((2, 5), (1, 1), (-1, 1)):
        with pytest.raises(ValueError, match="are not within a buffer of"):
            table.rows(start, stop)


def test_float32_is_rounded_into_smaller_buffers(computing: Bench) -> None:
    """f32 values go into f16 and bf16 buffers rounded to nearest, ties to even."""
    values = computing.normal(6, 32)
    values[0, :3] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11]  # ties of bf16 (two) and of f16
    for dtype, kind in ((DType.F16, GGMLQuantizationType.F16), (DType.BF16, GGMLQuantizationType.BF16)):
        buffer = computing.backend.alloc((6, 32), dtype)
        computing.backend.upload(buffer, values)
        wanted = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)
        assert np.array_equal(computing.read(buffer).view(np.uint8), wanted)


def test_a_download_is_a_fresh_array(computing: Bench) -> None:
    """Later writes to the buffer do not reach an array handed out before."""
    buffer = computing.floats(np.ones((2, 4)))
    values = computing.read(buffer)
    computing.backend.upload(buffer, np.zeros((2, 4), np.float32))
    assert (values == 1).all()


def test_column_views_share_the_parent(computing: Bench) -> None:
    """A view reads and writes its columns only, in the parent's memory."""
    parent = computing.floats(np.arange(24).reshape(3, 8))
    view = parent.columns(2, 5)
    assert np.array_equal(computing.read(view), np.arange(24).reshape(3, 8)[:, 2:5])
    computing.backend.upload(view.columns(1, 3), np.full((2, 2), -1, np.float32))
    wanted = np.arange(24, dtype=np.float32).reshape(3, 8)
    wanted[:2, 3:5] = -1
    assert np.array_equal(computing.read(parent), wanted)


def test_copy_between_views(computing: Bench) -> None:
    """Device-to-device copy of the first rows, from a view to a view, leaves the rest alone."""
    values = computing.normal(5, 6)
    source = computing.floats(values, view=True)
    target = computing.floats(np.zeros((5, 6)), view=True)
    computing.backend.copy(source, target, 3)
    assert np.array_equal(computing.read(target), np.concatenate([values[:3], np.zeros((2, 6), np.float32)]))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((2, 4), np.float64), "dtype"),
        (np.zeros((2, 4), np.int32), "dtype"),
        (np.zeros((2, 5), np.float32), "columns"),
        (np.zeros((4, 4), np.float32), "too many rows"),
        (np.zeros(4, np.float32), "dimensions"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_an_upload_that_does_not_fit_is_refused(bench: Bench, values: np.ndarray, reason: str) -> None:
    """B-05: the dtype must match (f32 goes into f16 and bf16 too), and so must the shape."""
    buffer = bench.backend.alloc((3, 4), DType.F32)
    with pytest.raises((ValueError, TypeError)):
        bench.backend.upload(buffer, values)


def test_double_free_is_detected(bench: Bench) -> None:
    """B-11: freeing a buffer, a weight or a cache twice is an error."""
    backend = bench.backend
    buffer = backend.alloc((4, 4), DType.F32)
    weight, _, _ = bench.weight((GgmlType.Q8_0, 4), cols=64)
    cache = backend.alloc_kv(2, 2, 32, 32, DType.F16)
    backend.free(buffer)
    backend.free_weight(weight)
    backend.free_kv(cache)
    with pytest.raises(ValueError, match="freed"):
        backend.free(buffer)
    with pytest.raises(ValueError, match="freed"):
        backend.free_weight(weight)
    with pytest.raises(ValueError, match="freed"):
        backend.free_kv(cache)


@limited
def test_capacity_error_has_both_numbers(entry: BackendUnderTest) -> None:
    """B-29: what was asked for and what is free stand in the message, and nothing was taken."""
    backend = create_or_skip(entry, 8 * MIB)
    kept = backend.alloc((3 * MIB // 4,), DType.F32)
    free_before = backend.device_facts().free_bytes
    with pytest.raises(CapacityExceeded) as failure:
        backend.alloc((6 * MIB // 4,), DType.F32)
    assert re.search(r"6\.0 MiB.* 5\.0 MiB free", str(failure.value))
    assert backend.device_facts().free_bytes == free_before
    backend.free(kept)
    backend.alloc((6 * MIB // 4,), DType.F32)
    backend.close()


@limited
def test_weights_and_caches_count_against_the_limit(entry: BackendUnderTest) -> None:
    """B-42: each takes what it says it occupies, and freeing gives exactly that back."""
    backend = create_or_skip(entry, 8 * MIB)
    bench = Bench(backend, entry, np.random.default_rng(0))
    start = backend.device_facts().free_bytes
    weight, _, _ = bench.weight((GgmlType.Q4_0, 32), cols=256, bias=True)
    after_weight = backend.device_facts().free_bytes
    assert start - after_weight >= weight.num_bytes > 0
    cache = backend.alloc_kv(3, 2, 64, 32, DType.F16)
    assert cache.num_bytes == 3 * backend.kv_bytes_per_block(2, 64, 32, DType.F16)
    assert after_weight - backend.device_facts().free_bytes >= cache.num_bytes
    with pytest.raises(CapacityExceeded):
        backend.alloc_kv(8 * MIB // backend.kv_bytes_per_block(2, 64, 32, DType.F16), 2, 64, 32, DType.F16)
    with pytest.raises(CapacityExceeded):
        bench.weight((GgmlType.F32, 8192), cols=512)
    backend.free_weight(weight)
    backend.free_kv(cache)
    assert backend.device_facts().free_bytes == start
    backend.close()


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (DType.F32, 16 * 3 * 4 * (64 + 32)),
        (DType.F16, 16 * 3 * 2 * (64 + 32)),
        (DType.BF16, 16 * 3 * 2 * (64 + 32)),
        (DType.Q8_0, 16 * 3 * 34 * (2 + 1)),
    ],
    ids=["f32", "f16", "bf16", "q8_0"],
)
def test_kv_bytes_are_exact(bench: Bench, dtype: DType, wanted: int) -> None:
    """B-12: 4, 2 and 2 bytes a value, and 34 bytes per 32 values, for 3 heads of 64 + 32 values at 16 positions."""
    if dtype not in bench.backend.capabilities.kv_dtypes:
        pytest.skip(f"no {dtype.value} cache")
    assert bench.backend.kv_bytes_per_block(3, 64, 32, dtype) == wanted


@pytest.mark.parametrize("dtype", [DType.I32, DType.U8], ids=lambda dtype: dtype.value)
def test_an_impossible_kv_dtype_is_refused(bench: Bench, dtype: DType) -> None:
    """B-16: an unimplemented dtype is an error at load, never another dtype's kernel."""
    with pytest.raises(Unsupported):
        bench.backend.alloc_kv(2, 2, 32, 32, dtype)


def test_parts_of_unequal_width_are_refused(bench: Bench) -> None:
    """Stacked matrices share their inputs, and a bias has one value per row."""
    narrow, wide = (bench.weight((GgmlType.F32, 4), cols=cols)[1][0] for cols in (32, 64))
    with pytest.raises(ValueError, match="columns"):
        bench.backend.load_weight([narrow, wide])
    with pytest.raises(ValueError, match="bias"):
        bench.backend.load_weight([narrow, narrow], np.zeros(7, np.float32))


def test_extents_keep_their_meaning(bench: Bench) -> None:
    """A buffer and its views carry the extent they were allocated with."""
    buffer = bench.backend.alloc((4, 6), DType.F32, Extent.LOGIT_ROWS)
    assert buffer.columns(1, 3).extent is Extent.LOGIT_ROWS
    assert buffer.columns(1, 3).row_stride == buffer.row_stride == 6
    with pytest.raises(ValueError, match=r"columns \[2:7\]"):
        buffer.columns(2, 7)
