"""Frames of hidden state: exact where the wire dtype is, rounded to nearest even elsewhere, checked before decoding."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.spec.errors import InvalidConfig, InvalidPlan
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.placement import WIRE_DTYPES, StageSettings
from lamina.spec.step import SeqSlice, StepPlan, Tokens
from lamina.v1 import step_pb2 as pb
from lamina.wire.channel import MAX_MESSAGE_BYTES
from lamina.wire.direct import BEGINNING_BYTES, FRAME, frame_beginning, read_beginning, read_frame_head
from lamina.wire.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    check_frame,
    check_frame_size,
    check_frames_fit,
    decode_frame,
    encode_frame,
    frame_bytes,
    read_frame,
    wire_values,
)

F32 = NDArray[np.float32]
PLAN = StepPlan(Epoch(2), StepId(7), (SeqSlice(SeqId(0), 0, 3, Tokens((1, 2, 3)), ((),), True),))
HIDDEN = 5


def hidden_state(seed: int = 0, scale: float = 1.0) -> F32:
    return np.random.default_rng(seed).normal(0, scale, (3, HIDDEN)).astype(np.float32)


def over_the_wire(values: F32, wire_dtype: str) -> F32:
    frame = read_frame(pb.FramesRequest.FromString(encode_frame(PLAN, values, wire_dtype)).frame)
    check_frame(frame, PLAN, HIDDEN, wire_dtype)
    return decode_frame(frame)


def sound_frame() -> Frame:
    return read_frame(pb.FramesRequest.FromString(encode_frame(PLAN, hidden_state(), "f32")).frame)


@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 300, 70_000])
def test_the_message_is_the_one_that_protobuf_writes(num_rows: int) -> None:
    """Lengths of one to four bytes, at the turn from one to two (128) as well."""
    values = np.random.default_rng(0).normal(0, 1, (num_rows, HIDDEN)).astype(np.float32)
    frame = pb.Frame(epoch=2, step=7, dtype=pb.FRAME_DTYPE_F32, rows=num_rows, hidden=HIDDEN, payload=values.tobytes())
    assert encode_frame(PLAN, values, "f32") == pb.FramesRequest(frame=frame).SerializeToString(deterministic=True)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_head_and_values_apart_are_the_same_frame(wire_dtype: str) -> None:
    """As a direct connection has them: the payload is counted, not in the message."""
    whole = read_frame(pb.FramesRequest.FromString(encode_frame(PLAN, hidden_state(), wire_dtype)).frame)
    values = wire_values(hidden_state(), wire_dtype).reshape(-1).view(np.uint8)
    head = frame_beginning(PLAN, hidden_state(), wire_dtype, values.nbytes)
    beginning = read_beginning(head)
    assert beginning == (FRAME, len(head) - BEGINNING_BYTES, values.nbytes)
    frame = read_frame_head(memoryview(head), BEGINNING_BYTES, values.nbytes)
    assert frame == whole._replace(payload=b"")
    check_frame(frame, PLAN, HIDDEN, wire_dtype)
    assert (decode_frame(frame._replace(payload=values)) == decode_frame(whole)).all()


def test_float32_is_exact() -> None:
    """Every bit arrives: subnormals, infinities and the payload of a NaN."""
    values = hidden_state(scale=1e4)
    values[0] = np.array([0x00000001, 0x7F800000, 0xFF800000, 0x7FC12345, 0x80000000], np.uint32).view(np.float32)
    assert over_the_wire(values, "f32").tobytes() == values.tobytes()


def nearest_bf16(value: float) -> float:
    """By definition: the nearer of the two neighbours, the even one of two equally near."""
    low = np.array([value], np.float32).view(np.uint32)[0] & np.uint32(0xFFFF0000)
    near = [np.array([bits], np.uint32).view(np.float32)[0] for bits in (low, low + np.uint32(0x10000))]
    if abs(value - near[0]) == abs(near[1] - value):
        return float(near[0] if not (int(low) >> 16) & 1 else near[1])
    return float(min(near, key=lambda other: abs(float(other) - value)))


@given(st.floats(-(2.0**126), 2.0**126, width=32))
def test_bf16_rounds_to_nearest_even(value: float) -> None:
    values = np.full((3, HIDDEN), value, np.float32)
    assert over_the_wire(values, "bf16")[0, 0] == nearest_bf16(value)


def test_bf16_ties() -> None:
    """1 + 2^-8 lies between 1 (even) and 1 + 2^-7; 1 + 3 * 2^-8 between that (odd) and 1 + 2^-6."""
    values = np.full((3, HIDDEN), 1 + 2**-8, np.float32)
    values[1] = 1 + 3 * 2**-8
    assert over_the_wire(values, "bf16")[:2, 0].tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_nan_stays_a_nan(wire_dtype: str) -> None:
    """A-05: a non-finite value must reach the sampler as one; rounding 0x7FFFFFFF by adding would make it -0."""
    values = hidden_state()
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0xFFC00000], np.uint32)
    values[1] = bits.view(np.float32)
    found = over_the_wire(values, wire_dtype)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.filterwarnings("error")
def test_f16_overflow_becomes_infinite_without_noise() -> None:
    values = hidden_state()
    values[0, 0], values[0, 1] = 1e6, -1e6
    assert over_the_wire(values, "f16")[0, :2].tolist() == [np.inf, -np.inf]


def test_f16_is_numpys() -> None:
    values = hidden_state(scale=100)
    assert (over_the_wire(values, "f16") == values.astype(np.float16)).all()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_slice_of_a_wider_array(wire_dtype: str) -> None:
    """Columns of a wider buffer are sent, not what lies beside them."""
    wide = np.random.default_rng(1).normal(0, 1, (3, 2 * HIDDEN)).astype(np.float32)
    part = wide[:, 2 : 2 + HIDDEN]
    assert (over_the_wire(part, wire_dtype) == over_the_wire(part.copy(), wire_dtype)).all()


def test_sizes() -> None:
    """C-06: 2,880 float32 values are 11,520 bytes a token."""
    assert frame_bytes(1, 2880, "f32") == 11520
    assert frame_bytes(7, 10, "bf16") == frame_bytes(7, 10, "f16") == 140


MISMATCHES = {
    "epoch": 3,
    "step": 8,
    "rows": 4,
    "hidden": 6,
    "dtype": pb.FRAME_DTYPE_BF16,
    "num_bytes": 4 * 3 * HIDDEN - 1,
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_refused_with_both_sides(name: str) -> None:
    frame = sound_frame()._replace(**{name: MISMATCHES[name]})  # type: ignore[arg-type]
    wanted = re.escape(str((2, 7, 3, HIDDEN, pb.FRAME_DTYPE_F32, 60)))
    with pytest.raises(InvalidPlan, match=f"the plan says {wanted}"):
        check_frame(frame, PLAN, HIDDEN, "f32")


@pytest.mark.parametrize("dtype", [pb.FRAME_DTYPE_UNSPECIFIED, 9])
def test_unknown_dtypes(dtype: int) -> None:
    frame = sound_frame()._replace(dtype=dtype)
    with pytest.raises(InvalidPlan):
        check_frame(frame, PLAN, HIDDEN, "f32")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0, "num_bytes": 0},
        {"rows": 9, "num_bytes": 4 * 9 * HIDDEN},
        {"rows": 2**32 - 1},
        {"hidden": HIDDEN + 1},
        {"hidden": 2**32 - 1, "rows": 2**32 - 1},
        {"num_bytes": 61},
        {"dtype": pb.FRAME_DTYPE_F16},
    ],
)
def test_a_frame_before_its_plan_is_held_to_the_placement(change: dict[str, object]) -> None:
    """What waits for its plan is bounded: at most max_rows rows, of the placement's width and dtype."""
    frame = sound_frame()
    check_frame_size(frame, 8, HIDDEN, "f32")
    frame = frame._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match="frame of step 7"):
        check_frame_size(frame, 8, HIDDEN, "f32")


@pytest.mark.parametrize(("wire_dtype", "most"), [("f32", 2048), ("bf16", 4096), ("f16", 4096)])
def test_the_largest_frame_fits_a_message(wire_dtype: str, most: int) -> None:
    """One row more than fits is refused before anything is loaded, with the number that fits."""
    check_frames_fit(StageSettings(max_rows=most, wire_dtype=wire_dtype), 8192)
    with pytest.raises(InvalidConfig, match=f"{most + 1} rows x 8192 {wire_dtype} .*a --max-rows of at most {most}$"):
        check_frames_fit(StageSettings(max_rows=most + 1, wire_dtype=wire_dtype), 8192)


def test_a_full_payload_and_what_is_around_it_fit_a_message() -> None:
    """64 MiB of values at the largest numbers of every other field."""
    frame = pb.Frame(epoch=2**32 - 1, step=2**32 - 1, dtype=pb.FRAME_DTYPE_F32, rows=2**31 - 1, hidden=2**31 - 1)
    frame.payload = bytes(MAX_PAYLOAD_BYTES)
    message = pb.FramesRequest(frame=frame)
    assert MAX_PAYLOAD_BYTES < message.ByteSize() <= MAX_MESSAGE_BYTES
