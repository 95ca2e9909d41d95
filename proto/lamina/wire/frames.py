"""Hidden-state frames: raw little-endian values, checked against the plan before anything is allocated.

A frame of a prompt's chunk is tens of MiB, and protobuf copies it at every turn: to set a payload, to put one message
into another, to serialise, and to read. So a payload is joined to its serialised header here, and read once.
"""

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.spec.errors import InvalidConfig, InvalidPlan
from lamina.spec.placement import StageSettings
from lamina.spec.step import StepPlan
from lamina.v1 import step_pb2 as pb
from lamina.wire.delimited import field_key, varint

DTYPE_CODES = {"f32": pb.FRAME_DTYPE_F32, "bf16": pb.FRAME_DTYPE_BF16, "f16": pb.FRAME_DTYPE_F16}
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_FRAME_KEY = field_key(pb.FramesRequest.FRAME_FIELD_NUMBER)
_PAYLOAD_KEY = field_key(pb.Frame.PAYLOAD_FIELD_NUMBER)
MAX_PAYLOAD_BYTES = 64 * 2**20  # of a frame: 2,048 rows x 8,192 float32 values

_IS_LITTLE_ENDIAN = sys.byteorder == "little"
Payload = bytes | NDArray[np.uint8]


def frame_bytes(rows: int, hidden: int, wire_dtype: str) -> int:
    """Payload size of a frame."""
    return rows * hidden * _ITEM_BYTES[wire_dtype]


def check_frames_fit(settings: StageSettings, hidden: int) -> None:
    """Raise InvalidConfig if the largest step's frame would exceed what a message may have; for two stages or more."""
    num_bytes = frame_bytes(settings.max_rows, hidden, settings.wire_dtype)
    if num_bytes > MAX_PAYLOAD_BYTES:
        fitting = MAX_PAYLOAD_BYTES // frame_bytes(1, hidden, settings.wire_dtype)
        raise InvalidConfig(
            f"a step of {settings.max_rows} rows x {hidden} {settings.wire_dtype} values is {num_bytes} bytes between"
            f" stages, a message holds {MAX_PAYLOAD_BYTES}; use a --max-rows of at most {fitting}"
        )


class Frame(NamedTuple):
    """The fields of a `pb.Frame`; `payload` is empty until its `num_bytes` have come."""

    epoch: int
    step: int
    dtype: int
    rows: int
    hidden: int
    num_bytes: int
    payload: Payload = b""


def read_frame(message: pb.Frame) -> Frame:
    """The message's fields, not checked."""
    payload = message.payload
    return Frame(message.epoch, message.step, message.dtype, message.rows, message.hidden, len(payload), payload)


def encode_frame(plan: StepPlan, hidden_state: NDArray[np.float32], wire_dtype: str) -> bytes:
    """A serialised FramesRequest: float32 [rows, hidden] in the edge's wire dtype (bf16 rounds to nearest even)."""
    values = wire_values(hidden_state, wire_dtype)
    rows, hidden = hidden_state.shape
    header = pb.Frame(epoch=plan.epoch, step=plan.step, dtype=DTYPE_CODES[wire_dtype], rows=rows, hidden=hidden)
    head = header.SerializeToString() + _PAYLOAD_KEY + varint(values.nbytes)
    length = varint(len(head) + values.nbytes)
    return b"".join((_FRAME_KEY, length, head, values.data))


def wire_values(hidden_state: NDArray[np.float32], wire_dtype: str) -> NDArray[np.generic]:
    """What a payload is made of, contiguous: the hidden state itself where nothing is to be converted."""
    match wire_dtype:
        case "f32":
            values: NDArray[np.generic] = hidden_state if _IS_LITTLE_ENDIAN else hidden_state.astype("<f4")
        case "f16":
            with np.errstate(over="ignore"):  # becomes infinite, which the last stage reports for its sequence
                values = hidden_state.astype("<f2")
        case _:
            values = _bf16_bits(hidden_state)
    return values if values.flags.c_contiguous else np.ascontiguousarray(values)


def check_frame_size(frame: Frame, max_rows: int, hidden: int, wire_dtype: str) -> None:
    """Raise InvalidPlan for a frame that no step of the placement can have; for one that comes before its plan."""
    found = (frame.hidden, frame.dtype, frame.num_bytes)
    wanted = (hidden, DTYPE_CODES[wire_dtype], frame_bytes(frame.rows, hidden, wire_dtype))
    if found != wanted or not 1 <= frame.rows <= max_rows:
        raise InvalidPlan(
            f"frame of step {frame.step}: {frame.rows} rows with (hidden, dtype, bytes) {found}; up to {max_rows} rows"
            f" with {wanted} are due"
        )


def check_frame(frame: Frame, plan: StepPlan, hidden: int, wire_dtype: str) -> None:
    """Raise InvalidPlan unless the frame is exactly what the plan and the placement's settings say it must be."""
    found = (frame.epoch, frame.step, frame.rows, frame.hidden, frame.dtype, frame.num_bytes)
    rows = plan.num_rows
    wanted = (plan.epoch, plan.step, rows, hidden, DTYPE_CODES[wire_dtype], frame_bytes(rows, hidden, wire_dtype))
    if found != wanted:
        raise InvalidPlan(f"frame (epoch, step, rows, hidden, dtype, bytes) is {found}, the plan says {wanted}")


def decode_frame(frame: Frame) -> NDArray[np.float32]:
    """float32 [rows, hidden] of a checked frame, whole: a view of the payload where nothing is to be converted."""
    shape = (frame.rows, frame.hidden)
    match frame.dtype:
        case pb.FRAME_DTYPE_F32:
            return np.frombuffer(frame.payload, "<f4").reshape(shape)
        case pb.FRAME_DTYPE_F16:
            return np.frombuffer(frame.payload, "<f2").astype(np.float32).reshape(shape)
        case _:
            bits = np.frombuffer(frame.payload, "<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(shape)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even. A NaN stays one: adding to its bits could carry it into a zero."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
