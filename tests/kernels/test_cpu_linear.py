"""The CPU's quantised matrix kernels on every instruction set of this machine, against float64 and against themselves.

The reference is `gguf.quants.dequantize` and a float64 product. What the kernels may deviate by is the rounding of the
activations to int8 alone, which `_activation_error` works out from the same inputs.
"""

import zlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import quants
from numpy.typing import NDArray

from lamina.kernels.backend import Unsupported
from lamina.kernels.cpu.descriptors import Isa
from lamina.kernels.cpu.descriptors import LinearMode as Mode
from lamina.kernels.cpu.library import load_library, working_isas
from support.native_linear import NativeLinear, Packed
from support.tiny import random_blocks

FLOATS = (T.F32, T.F16, T.BF16)
BLOCKS_32 = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL, T.MXFP4)
BLOCKS_256 = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS)
TYPES = FLOATS + BLOCKS_32 + BLOCKS_256

# Output rows that end in a partial tile of 16, columns that end in a partial superblock of 256 where the type allows.
ROWS = 45
ODD_COLS = {**dict.fromkeys(FLOATS, 331), **dict.fromkeys(BLOCKS_32, 576), **dict.fromkeys(BLOCKS_256, 512)}


def _working() -> list[Isa]:
    try:
        return list(working_isas())
    except Unsupported:
        return []


ISAS = [pytest.param(isa, id=isa.name.lower()) for isa in _working()]
pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not built")

each_isa = pytest.mark.parametrize("isa", ISAS)
each_type = pytest.mark.parametrize("tensor_type", TYPES, ids=lambda t: t.name)


@pytest.fixture(scope="module")
def native() -> NativeLinear:
    return NativeLinear(load_library().functions)


def _rng(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def _weight(
    native: NativeLinear, isa: Isa, tensor_type: T, rows: int, cols: int, rng: np.random.Generator
) -> tuple[Packed, NDArray[np.float32]]:
    blocks = random_blocks(tensor_type, rows, cols, rng)
    return native.pack(isa, tensor_type, blocks, cols), quants.dequantize(blocks, tensor_type)


def _activations(num_rows: int, cols: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Rows of very different size, with a few outliers, as hidden states have them."""
    x = rng.standard_normal((num_rows, cols)) * 10.0 ** rng.uniform(-3, 3, (num_rows, 1))
    x[:, rng.integers(0, cols, 3)] *= 8
    return x.astype(np.float32)


def _activation_error(x: NDArray[np.float32], weight: NDArray[np.float32], tensor_type: T) -> NDArray[np.float64]:
    """rms error [rows, outputs] that rounding x to int8 per 32 or 256 values causes, rounding errors being uniform."""
    if tensor_type in FLOATS:
        magnitudes = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
        return np.asarray(magnitudes * 2.0**-24 * np.sqrt(x.shape[1]))
    block = 256 if tensor_type in BLOCKS_256 else 32
    steps = np.abs(x).reshape(len(x), -1, block).max(axis=2).astype(np.float64) / 127
    energy = (weight.astype(np.float64) ** 2).reshape(len(weight), -1, block).sum(axis=2)
    return np.asarray(np.sqrt(steps**2 @ energy.T / 12))


def _check(y: NDArray[np.float32], x: NDArray[np.float32], weight: NDArray[np.float32], tensor_type: T) -> None:
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    deviations = (y - want) / _activation_error(x, weight, tensor_type)
    assert np.abs(deviations).max() < 6
    if tensor_type not in FLOATS:
        # neither more than rounding explains, nor suspiciously little: the activations really are int8
        assert 0.8 < np.sqrt((deviations**2).mean()) < 1.2
        assert np.linalg.norm(y - want) / np.linalg.norm(want) < 0.03


@each_isa
@each_type
def test_product_deviates_by_the_rounding_of_the_activations_alone(
    native: NativeLinear, isa: Isa, tensor_type: T
) -> None:
    """A-03: every type multiplies on the CPU; 1 row (direct kernels) and 130 (blocked, two column blocks or more)."""
    for cols in (256, ODD_COLS[tensor_type]):
        rng = _rng(tensor_type, cols)
        packed, weight = _weight(native, isa, tensor_type, ROWS, cols, rng)
        x = _activations(130, cols, rng)
        _check(native.linear([packed], x), x, weight, tensor_type)
        np.testing.assert_array_equal(native.linear([packed], x[:1]), native.linear([packed], x)[:1])


SCALE_BYTES = {T.Q4_K: slice(0, 4), T.Q5_K: slice(0, 4), T.Q6_K: slice(208, 210), T.IQ4_XS: slice(0, 2)}


@each_isa
@pytest.mark.parametrize("tensor_type", SCALE_BYTES, ids=lambda t: t.name)
def test_largest_codes_scales_and_activations_overflow_nothing(native: NativeLinear, isa: Isa, tensor_type: T) -> None:
    """Activations of +-127, exact in int8, with the signs of every row of extreme weights: float64's product."""
    cols = 512
    blocks = random_blocks(tensor_type, 16, cols, _rng("extreme", tensor_type))
    whole = blocks.reshape(16, 2, -1)
    for row, byte in enumerate((0xFF, 0x00, 0x7F, 0x80, 0xF0, 0x0F)):
        float_scales = whole[row, :, SCALE_BYTES[tensor_type]].copy()
        whole[row] = byte
        whole[row, :, SCALE_BYTES[tensor_type]] = float_scales
    weight = quants.dequantize(blocks, tensor_type).astype(np.float64)
    signs = np.concatenate([np.where(weight < 0, -1, 1), np.ones((1, cols)), -np.ones((1, cols))])
    x = (127 * signs).astype(np.float32)
    packed = native.pack(isa, tensor_type, blocks, cols)
    y = native.linear([packed], x)
    # With mins a weight is the difference of two larger numbers, each rounded.
    assert np.abs(y - x @ weight.T).max() < 2.0**-20 * (np.abs(x) @ np.abs(weight).T).max()
    for count in (1, 4, 8):
        np.testing.assert_array_equal(native.linear([packed], x[:count]), y[:count])


@each_isa
@each_type
def test_row_is_bit_identical_in_any_company(native: NativeLinear, isa: Isa, tensor_type: T) -> None:
    """A-31: one row alone, among others, at another place, on other threads: the same bits."""
    rng = _rng("company", tensor_type)
    cols = ODD_COLS[tensor_type]
    packed, _ = _weight(native, isa, tensor_type, 3 * ROWS, cols, rng)
    x = _activations(137, cols, rng)
    everything = native.linear([packed], x)
    for count in (*range(1, 20), 31, 32, 33, 64, 132, 133):
        first = int(rng.integers(0, len(x) - count + 1))
        for threads in (1, 2, 3):
            some = native.linear([packed], x[first : first + count], threads=threads)
            np.testing.assert_array_equal(some, everything[first : first + count])


@each_type
def test_instruction_sets_agree_to_the_bit(native: NativeLinear, tensor_type: T) -> None:
    """Workers with different processors give one model one output: all kernels do the same operations in one order."""
    rng = _rng("agree", tensor_type)
    cols = ODD_COLS[tensor_type]
    blocks = random_blocks(tensor_type, ROWS, cols, rng)
    x = _activations(30, cols, rng)
    packed = [native.pack(isa, tensor_type, blocks, cols) for isa in _working()]
    for count in (11, 30):  # tile registers take the larger number only
        results = [native.linear([weight], x[:count]) for weight in packed]
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


@each_isa
@each_type
def test_unpacked_rows_are_gguf_values(native: NativeLinear, isa: Isa, tensor_type: T) -> None:
    """Packing loses nothing: each row comes back to the bit, whichever way the rows were divided for packing."""
    rng = _rng("unpack", tensor_type)
    for cols in (256, ODD_COLS[tensor_type]):
        blocks = random_blocks(tensor_type, ROWS, cols, rng)
        packed = native.pack(isa, tensor_type, blocks, cols, split=32)
        want = quants.dequantize(blocks, tensor_type)
        for row in range(ROWS):
            np.testing.assert_array_equal(native.unpack_row(packed, row), want[row])
        np.testing.assert_array_equal(native.unpack_row(packed, 3, scale=0.75), want[3] * np.float32(0.75))


@each_isa
def test_mxfp4_scales_keep_their_whole_range(native: NativeLinear, isa: Isa) -> None:
    """E8M0 codes 0 and 1 are subnormal halves: 2**-128 and 2**-127."""
    blocks = random_blocks(T.MXFP4, 16, 256, _rng("e8m0"))
    blocks.reshape(-1, 17)[:, 0] = np.resize([0, 1, 2, 60, 127, 200, 240], 128)
    packed = native.pack(isa, T.MXFP4, blocks, 256)
    want = quants.dequantize(blocks, T.MXFP4)
    for row in range(16):
        np.testing.assert_array_equal(native.unpack_row(packed, row), want[row])
    one_hot = np.zeros((256, 256), np.float32)
    np.fill_diagonal(one_hot, 127.0)
    np.testing.assert_array_equal(native.linear([packed], one_hot), want.T * np.float32(127))


@each_isa
@pytest.mark.parametrize("num_rows", [1, 3, 21])
def test_stacked_parts_of_mixed_types_with_bias(native: NativeLinear, isa: Isa, num_rows: int) -> None:
    """Query, key and value as the Q4_K_M mix stores them: each part as if it were alone, biases added once."""
    rng = _rng("stack", num_rows)
    shapes = [(T.Q4_K, 48), (T.Q6_K, 17), (T.F16, 16), (T.Q8_0, 33), (T.Q3_K, 5)]
    parts = [_weight(native, isa, tensor_type, rows, 512, rng)[0] for tensor_type, rows in shapes]
    bias = rng.standard_normal(sum(rows for _, rows in shapes)).astype(np.float32)
    x = _activations(num_rows, 512, rng)
    want = np.concatenate([native.linear([part], x) for part in parts], axis=1) + bias
    for threads in (1, 3):
        np.testing.assert_array_equal(native.linear(parts, x, bias=bias, threads=threads), want)


@each_isa
@pytest.mark.parametrize("num_rows", [1, 2, 23])
def test_accumulate_adds_to_what_is_there(native: NativeLinear, isa: Isa, num_rows: int) -> None:
    """out + (x W + b), into rows longer than the product, of which nothing else is touched."""
    rng = _rng("accumulate", num_rows)
    packed, _ = _weight(native, isa, T.Q5_1, ROWS, 288, rng)
    bias = rng.standard_normal(ROWS).astype(np.float32)
    x = _activations(num_rows, 300, rng)[:, :288]
    residual = rng.standard_normal((num_rows, ROWS + 7)).astype(np.float32)
    want = residual.copy()
    want[:, :ROWS] = (native.linear([packed], x) + bias) + residual[:, :ROWS]
    native.linear([packed], x, mode=Mode.ACCUMULATE, bias=bias, out=residual)
    np.testing.assert_array_equal(residual, want)


@each_isa
@pytest.mark.parametrize("mode", [Mode.GATE_SILU, Mode.GATE_GELU_TANH])
@pytest.mark.parametrize(("gate_type", "up_type"), [(T.Q4_K, T.Q4_K), (T.Q4_0, T.Q6_K), (T.F32, T.Q8_0)])
def test_gated_pair(native: NativeLinear, isa: Isa, mode: Mode, gate_type: T, up_type: T) -> None:
    """act(gate) * up on the very sums that the plain product gives; gates beyond +-100, where exp would overflow."""
    rng = _rng("gated", gate_type)
    gate, _ = _weight(native, isa, gate_type, ROWS, 256, rng)
    up, _ = _weight(native, isa, up_type, ROWS, 256, rng)
    bias = rng.standard_normal(2 * ROWS).astype(np.float32)
    x = (rng.standard_normal((19, 256)) * np.geomspace(0.01, 150, 19)[:, None]).astype(np.float32)
    g = (native.linear([gate], x) + bias[:ROWS]).astype(np.float64)
    u = (native.linear([up], x) + bias[ROWS:]).astype(np.float64)
    assert g.min() < -100
    assert g.max() > 100
    inner = g if mode is Mode.GATE_SILU else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    want = g / (1 + np.exp(-np.maximum(inner, -700))) * u
    for threads in (1, 2):
        got = native.linear([gate, up], x, mode=mode, bias=bias, threads=threads)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)
    one = native.linear([gate, up], x[4:5], mode=mode, bias=bias)
    np.testing.assert_array_equal(one, got[4:5])


@each_isa
@pytest.mark.parametrize("tensor_type", [T.F32, T.Q4_0, T.Q4_K], ids=lambda t: t.name)
def test_non_finite_activations_are_not_hidden(native: NativeLinear, isa: Isa, tensor_type: T) -> None:
    """A-05: NaN or infinity in a row makes the row's results non-finite, and leaves other rows alone."""
    rng = _rng("nan", tensor_type)
    packed, _ = _weight(native, isa, tensor_type, 16, 256, rng)
    x = rng.standard_normal((12, 256)).astype(np.float32)
    clean = native.linear([packed], x)
    x[3, 77], x[5, 200], x[7, 0] = np.nan, np.inf, -np.inf
    y = native.linear([packed], x)
    assert not np.isfinite(y[[3, 5, 7]]).any()
    others = [0, 1, 2, 4, 6, 8, 9, 10, 11]
    np.testing.assert_array_equal(y[others], clean[others])


@each_isa
@pytest.mark.parametrize("tensor_type", [T.Q4_0, T.Q6_K], ids=lambda t: t.name)
def test_zero_and_tiny_activations(native: NativeLinear, isa: Isa, tensor_type: T) -> None:
    """A block of zeros gives zero; values too small to have an inverse count as zero instead of overflowing it."""
    packed, _ = _weight(native, isa, tensor_type, 16, 256, _rng("zero"))
    x = np.zeros((3, 256), np.float32)
    x[1] = 1e-40
    x[2, :32] = 1e-30
    y = native.linear([packed], x)
    assert not y[:2].any()
    assert np.isfinite(y).all()
    assert y[2].any()
