"""From GGUF blocks to packed units, once at load (the layout is described in src/formats.cuh).

Written against what numpy and torch have in common, so the same lines run on the card and, in tests, on the host.
`Array` stands for either; all arrays are uint8.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from lamina.kernels.cuda.formats import CHUNK_COLUMNS, GROUP_ROWS, PackedFormat
from lamina.spec.quant import GgmlType, quant_format

Array = Any
Decoded = tuple[Array, list[Array]]  # codes [rows, blocks, values of a block], scale bytes [rows, blocks, bytes] each

# Where a format's codes go: planes in order, each with the lowest bit of the code byte that it keeps.
_PLANES: Mapping[GgmlType, Sequence[tuple[str, int]]] = {
    GgmlType.Q4_0: [("nibbles", 0)],
    GgmlType.Q4_1: [("nibbles", 0)],
    GgmlType.IQ4_NL: [("nibbles", 0)],
    GgmlType.MXFP4: [("nibbles", 0)],
    GgmlType.Q5_0: [("nibbles", 0), ("bits", 4)],
    GgmlType.Q5_1: [("nibbles", 0), ("bits", 4)],
    GgmlType.Q8_0: [("bytes", 0)],
    GgmlType.Q2_K: [("pairs", 0)],
    GgmlType.Q3_K: [("pairs", 0), ("bits", 2)],
    GgmlType.Q4_K: [("nibbles", 0)],
    GgmlType.Q5_K: [("nibbles", 0), ("bits", 4)],
    GgmlType.Q6_K: [("nibbles", 0), ("pairs", 4)],
    GgmlType.IQ4_XS: [("nibbles", 0)],
}


def repack(xp: ModuleType, raw: Array, fmt: PackedFormat) -> Array:
    """Units of raw blocks: uint8 [16 * groups, bytes per row] -> [groups, units, unit_bytes].

    Rows of a group come in the order in which the group holds them. `xp` is numpy or torch.
    """
    quant = quant_format(fmt.type, fmt.name)
    rows = raw.shape[0]
    codes, scales = _DECODERS[fmt.type](xp, raw.reshape(rows, -1, quant.block_bytes))
    codes = _padded(xp, codes.reshape(rows, -1), fmt.chunks * CHUNK_COLUMNS)
    groups, units = rows // GROUP_ROWS, codes.shape[1] // (fmt.chunks * CHUNK_COLUMNS)
    # rows are (h, g), columns (unit, chunk, block, half, t, j)
    fragments = codes.reshape(groups, 2, 8, units, fmt.chunks, 2, 2, 4, 4)
    parts = [_plane(fragments, kind, lowest) for kind, lowest in _PLANES[fmt.type]]
    blocks_per_unit = fmt.chunks * CHUNK_COLUMNS // quant.block_values
    for scale in scales:
        padded = _padded(xp, scale.reshape(rows, -1), blocks_per_unit * scale.shape[2])
        parts.append(_permute(padded.reshape(groups, GROUP_ROWS, units, -1), (0, 2, 1, 3)))
    return xp.concatenate([part.reshape(groups, units, -1) for part in parts], -1)


def interleave(xp: ModuleType, first: Array, second: Array) -> Array:
    """Rows of two matrices in groups of 8 and 8: [8 n, bytes] each -> [16 n, bytes]."""
    columns = first.shape[1]
    pair = [part.reshape(-1, 1, GROUP_ROWS // 2, columns) for part in (first, second)]
    return xp.concatenate(pair, 1).reshape(-1, columns)


def padded_rows(xp: ModuleType, raw: Array, multiple: int) -> Array:
    """Zero rows appended up to a multiple; zero bytes are zero weights in every format."""
    missing = -raw.shape[0] % multiple
    if missing == 0:
        return raw
    zeros = xp.zeros_like(raw[:1])
    return xp.concatenate([raw, *([zeros] * missing)], 0)


def _permute(array: Array, axes: tuple[int, ...]) -> Array:
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _padded(xp: ModuleType, array: Array, multiple: int) -> Array:
    """Zeros appended to each row up to a multiple, at most as many as the row is long."""
    missing = -array.shape[1] % multiple
    return array if missing == 0 else xp.concatenate([array, xp.zeros_like(array[:, :missing])], -1)


def _plane(fragments: Array, kind: str, lowest: int) -> Array:
    """One plane; `fragments` axes: group, h, g, unit, chunk, block, half, t, j."""
    if kind == "bytes":
        return _permute(fragments, (0, 3, 4, 5, 2, 7, 6, 1, 8))
    fields = fragments >> lowest
    low, high = fields[:, :, :, :, :, :, 0], fields[:, :, :, :, :, :, 1]  # group, h, g, unit, chunk, block, t, j
    if kind == "nibbles":
        return _permute((low & 15) | ((high & 15) << 4), (0, 3, 4, 2, 6, 5, 1, 7))
    if kind == "bits":  # bit 4 block + h + 2 half of a byte
        both = (low & 1) | ((high & 1) << 2)
        of_rows = both[:, 0] | (both[:, 1] << 1)  # group, g, unit, chunk, block, t, j
        byte = of_rows[:, :, :, :, 0] | (of_rows[:, :, :, :, 1] << 4)
        return _permute(byte, (0, 2, 1, 4, 3, 5))
    both = (low & 3) | ((high & 3) << 4)  # bits 2 (h + 2 half); two chunks side by side in the 16 bytes of a lane
    words = both[:, 0] | (both[:, 1] << 2)
    groups, _, units, chunks = words.shape[:4]
    return _permute(words.reshape(groups, 8, units, chunks // 2, 2, 2, 4, 4), (0, 2, 3, 1, 6, 4, 5, 7))


def _nibbles(xp: ModuleType, packed: Array, run: int) -> Array:
    """Each `run` bytes hold 2 * run values: their low nibbles, then their high ones."""
    rows, blocks = packed.shape[:2]
    bytes_of_run = packed.reshape(rows, blocks, -1, run)
    return xp.stack([bytes_of_run & 15, bytes_of_run >> 4], 3).reshape(rows, blocks, -1)


def _bit_rows(xp: ModuleType, packed: Array) -> Array:
    """Bit s of byte i is value i of row s: [.., n] -> [.., 8 n]."""
    return xp.concatenate([(packed >> s) & 1 for s in range(8)], -1)


def _bit_string(xp: ModuleType, packed: Array) -> Array:
    """Bit i of a little-endian integer is value i: [.., n] -> [.., 8 n]."""
    rows, blocks = packed.shape[:2]
    return xp.stack([(packed >> s) & 1 for s in range(8)], -1).reshape(rows, blocks, -1)


def _bit_pairs(xp: ModuleType, packed: Array) -> Array:
    """Each 32 bytes hold 128 values: bits 0-1 of each byte, then bits 2-3, ..."""
    rows, blocks = packed.shape[:2]
    runs = packed.reshape(rows, blocks, -1, 32)
    return xp.stack([(runs >> s) & 3 for s in (0, 2, 4, 6)], 3).reshape(rows, blocks, -1)


def _q4_0(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 2:], 16) ^ 8, [raw[..., :2]]


def _q4_1(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 4:], 16), [raw[..., :4]]


def _q5_0(xp: ModuleType, raw: Array) -> Decoded:
    codes = _nibbles(xp, raw[..., 6:], 16) | (_bit_string(xp, raw[..., 2:6]) << 4)
    return codes ^ 16, [raw[..., :2]]


def _q5_1(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 8:], 16) | (_bit_string(xp, raw[..., 4:8]) << 4), [raw[..., :4]]


def _q8_0(xp: ModuleType, raw: Array) -> Decoded:
    return raw[..., 2:], [raw[..., :2]]


def _iq4_nl(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 2:], 16), [raw[..., :2]]


def _mxfp4(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 1:], 16), [raw[..., :1]]


def _k_scales(xp: ModuleType, packed: Array) -> Array:
    """12 bytes of eight 6-bit scales and minima -> 16 bytes, scale and minimum in turn."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = xp.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minima = xp.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return xp.stack([scales, minima], -1).reshape(*packed.shape[:2], 16)


def _q4_k(xp: ModuleType, raw: Array) -> Decoded:
    return _nibbles(xp, raw[..., 16:], 32), [_k_scales(xp, raw[..., 4:16]), raw[..., :4]]


def _q5_k(xp: ModuleType, raw: Array) -> Decoded:
    codes = _nibbles(xp, raw[..., 48:], 32) | (_bit_rows(xp, raw[..., 16:48]) << 4)
    return codes, [_k_scales(xp, raw[..., 4:16]), raw[..., :4]]


def _q6_k(xp: ModuleType, raw: Array) -> Decoded:
    codes = _nibbles(xp, raw[..., :128], 64) | (_bit_pairs(xp, raw[..., 128:192]) << 4)
    return codes ^ 32, [raw[..., 192:208], raw[..., 208:]]


def _q2_k(xp: ModuleType, raw: Array) -> Decoded:
    return _bit_pairs(xp, raw[..., 16:80]), [raw[..., :16], raw[..., 80:]]


def _q3_k(xp: ModuleType, raw: Array) -> Decoded:
    codes = _bit_pairs(xp, raw[..., 32:96]) | (_bit_rows(xp, raw[..., :32]) << 2)
    packed = raw[..., 96:108]
    low = xp.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    high = xp.concatenate([(packed[..., 8:] >> s) & 3 for s in (0, 2, 4, 6)], -1)
    return codes ^ 4, [(low | (high << 4)) - 32, raw[..., 108:]]


def _iq4_xs(xp: ModuleType, raw: Array) -> Decoded:
    low = xp.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], -1).reshape(*raw.shape[:2], 8)
    high = xp.stack([(raw[..., 2:4] >> s) & 3 for s in (0, 2, 4, 6)], -1).reshape(*raw.shape[:2], 8)
    return _nibbles(xp, raw[..., 8:], 16), [(low | (high << 4)) - 32, raw[..., :2]]


_DECODERS: Mapping[GgmlType, Callable[[ModuleType, Array], Decoded]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.MXFP4: _mxfp4,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.IQ4_XS: _iq4_xs,
}
