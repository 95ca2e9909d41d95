"""What the reference does beyond the conformance suite: its encodings, its tiles, its accounting."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from lamina.kernels import ops
from lamina.kernels.backend import Unsupported
from lamina.kernels.buffer import DType
from lamina.kernels.reference import ReferenceBackend, attention, kv_codec
from lamina.spec.errors import CapacityExceeded
from lamina.spec.quant import GgmlType
from support.backends import BACKENDS, Bench
from support.paged import Heads, PagedSequences


def _bench(max_memory_bytes: int | None = None) -> Bench:
    backend = ReferenceBackend(max_memory_bytes=max_memory_bytes)
    return Bench(backend, BACKENDS["reference"], np.random.default_rng(1))


def test_bf16_rounds_as_gguf_does_over_all_magnitudes() -> None:
    """Nearest even, also at ties, subnormals and infinity; NaN stays NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 40_000, dtype=np.uint32)
    bits[:10_000] = (bits[:10_000] & 0xFFFF0000) | 0x8000
    values = bits.view(np.float32)
    finite = values[np.isfinite(values)]
    wanted = np.ascontiguousarray(quants.quantize(finite[None], GGMLQuantizationType.BF16)).view(np.uint16)[0]
    assert np.array_equal(kv_codec.float32_to_bf16(finite), wanted)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    special = np.concatenate([special, np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)])
    back = kv_codec.bf16_to_float32(kv_codec.float32_to_bf16(special))
    assert np.isnan(back[[0, 1, 4, 5]]).all()
    assert back[2:4].tolist() == [np.inf, -np.inf]


def test_q8_blocks_are_ggml_blocks() -> None:
    """B-12: the stored bytes are those of gguf's Q8_0, ties and zero blocks included."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (50, 4, 96)).astype(np.float32)
    values[0] = 0
    values[1, 0, :32] = np.arange(32) - 15.5
    values[1, 0, 0] = 127
    stored = kv_codec.encode(values, DType.Q8_0)
    wanted = quants.quantize(values.reshape(-1, 96), GGMLQuantizationType.Q8_0)
    assert np.array_equal(stored.reshape(-1, 102), wanted)
    decoded = quants.dequantize(wanted, GGMLQuantizationType.Q8_0)
    assert np.array_equal(kv_codec.decode(stored, DType.Q8_0).reshape(-1, 96), decoded)


def test_q8_needs_whole_blocks() -> None:
    """B-16: heads of 48 values have no Q8_0 cache, and the error says why."""
    backend = ReferenceBackend()
    with pytest.raises(Unsupported, match="blocks of 32 values, heads have 48"):
        backend.alloc_kv(2, 2, 64, 48, DType.Q8_0)
    with pytest.raises(Unsupported):
        backend.kv_bytes_per_block(2, 48, 64, DType.Q8_0)


def test_attention_in_tiles_equals_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-28: the bound on scores held at once cuts rows into tiles and changes no result."""
    bench = _bench()
    paged = PagedSequences(bench, Heads(4, 2, 32, 32), [60], DType.F32)
    paged.write_all()
    q = bench.normal(60, 4, 32)
    whole = paged.attend(q, [(0, 0, 60)], scale=0.2, window=9)
    monkeypatch.setattr(attention, "_TILE_SCORES", 7 * 4 * 60)
    tiled = paged.attend(q, [(0, 0, 60)], scale=0.2, window=9)
    bench.assert_close("attention", tiled, whole)


def test_weights_are_float32_once() -> None:
    """B-42: what a weight says it occupies is what it occupies: 4 bytes a value and a bias, whatever the type."""
    bench = _bench(1 << 20)
    before = bench.backend.device_facts().free_bytes
    weight, _, _ = bench.weight((GgmlType.Q4_0, 100), (GgmlType.F16, 10), cols=64, bias=True)
    assert weight.num_bytes == 4 * 110 * 65 == before - bench.backend.device_facts().free_bytes
    assert bench.backend.weight_bits(GgmlType.Q4_0) == 32
    with pytest.raises(CapacityExceeded, match=r"8192 x 64 as float32 needs 2\.0 MiB"):
        bench.weight((GgmlType.Q4_0, 8192), cols=64)


def test_non_finite_values_pass_through() -> None:
    """A-05: NaN is never hidden on the way to the boundary check: norm, linear, gate and attention keep it."""
    bench = _bench()
    x = bench.normal(2, 64)
    x[1, 5] = np.nan
    rows = bench.floats(x)
    weight, _, _ = bench.weight((GgmlType.F32, 32), (GgmlType.F32, 32), cols=64)
    normed, gated = bench.output(2, 64), bench.output(2, 32)
    bench.step(2)
    ops.rms_norm(bench.backend, rows, bench.vector(np.ones(64)), normed, 1e-5)
    ops.gated_linear(bench.backend, normed, weight, gated, "silu")
    found = bench.read(gated)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
