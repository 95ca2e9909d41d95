"""The packed weight formats: which tensor types have one, how large a unit is (the CUDA twin is src/formats.cuh)."""

from dataclasses import dataclass

from lamina.spec.quant import GgmlType

GROUP_ROWS = 16
CHUNK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """A unit is 16 rows x `chunks` * 64 columns in `unit_bytes` bytes: planes of codes, then scales."""

    type: GgmlType
    chunks: int
    unit_bytes: int

    @property
    def name(self) -> str:
        """The format's name in the CUDA sources."""
        return self.type.name

    def num_units(self, columns: int) -> int:
        """Units along a row of this many columns."""
        return -(-columns // (self.chunks * CHUNK_COLUMNS))

    def group_bytes(self, columns: int) -> int:
        """Bytes of 16 rows."""
        return self.num_units(columns) * self.unit_bytes

    @property
    def bits_per_value(self) -> float:
        return 8 * self.unit_bytes / (GROUP_ROWS * self.chunks * CHUNK_COLUMNS)


PACKED_FORMATS = {
    kind: PackedFormat(kind, chunks, unit_bytes)
    for kind, chunks, unit_bytes in (
        (GgmlType.Q4_0, 1, 576),
        (GgmlType.Q4_1, 1, 640),
        (GgmlType.Q5_0, 1, 704),
        (GgmlType.Q5_1, 1, 768),
        (GgmlType.Q8_0, 1, 1088),
        (GgmlType.IQ4_NL, 1, 576),
        (GgmlType.MXFP4, 1, 544),
        (GgmlType.Q2_K, 4, 1344),
        (GgmlType.Q3_K, 4, 1824),
        (GgmlType.Q4_K, 4, 2368),
        (GgmlType.Q5_K, 4, 2880),
        (GgmlType.Q6_K, 4, 3360),
        (GgmlType.IQ4_XS, 4, 2208),
    )
}

DENSE_TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
"""Stored as they are; every type in neither table is decoded to f32 at load."""
