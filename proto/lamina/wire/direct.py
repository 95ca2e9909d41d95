"""The direct connection of an edge, byte for byte: a TCP connection beside its Frames stream, for frames and answers.

    sender    preface: magic, version, the key that FramesOpened gave
    receiver  the magic again: the key was right (any other is hung up on without a word)
    both      messages: kind, bytes of the head, bytes of the payload (uint32 each), head, payload

| kind | head | payload |
|---|---|---|
| FRAME | epoch, step (uint64), dtype, rows, hidden (uint32) | as of a `pb.Frame` |
| TOKENS | epoch, step (uint64), then of each token sequence (uint64), position, token (uint32) | none |
| PING, answered by PONG; before the first of the others | none | anything, which comes back |

All little-endian. No protobuf: a message of one step is packed and unpacked with one call.
TLS joins here, and in `channel`.
"""

import socket
from struct import Struct
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lamina.spec.errors import InvalidPlan
from lamina.spec.ids import Epoch, SeqId, StepId
from lamina.spec.step import StepDone, StepPlan
from lamina.wire.frames import DTYPE_CODES, MAX_PAYLOAD_BYTES, Frame

HAS_DIRECT = hasattr(socket, "MSG_DONTWAIT")  # Windows has no such flag; edges stay on gRPC there
KEY_BYTES = 32
MAX_TOKENS = 2**16  # of one step
MAX_PING_BYTES = 64 * 2**10
_VERSION = 1  # of what this module describes
_SILENCE_S = 9  # a peer that the network does not let answer is given up then, as gRPC does (P-27)
_BEGINNING = Struct("<III")
_FRAME = Struct("<IIIQQIII")  # with its beginning
_FRAME_HEAD = Struct("<QQIII")
_STEP = Struct("<QQ")
_TOKEN = Struct("<QII")
BEGINNING_BYTES = _BEGINNING.size
FRAME, TOKENS, PING, PONG = 1, 2, 3, 4
MAGIC = b"lamina-edge"
PREFACE_BYTES = len(MAGIC) + 1 + KEY_BYTES


def preface(key: bytes) -> bytes:
    """What the sender begins with."""
    return MAGIC + bytes([_VERSION]) + key


def key_of(said: bytes) -> bytes | None:
    """The key of a preface; None if it is none, or one of another version."""
    head, key = said[:-KEY_BYTES], said[-KEY_BYTES:]
    return key if head == preface(b"") else None


class Beginning(NamedTuple):
    """Of a message: its kind, and the bytes of head and payload."""

    kind: int
    head_bytes: int
    payload_bytes: int


def read_beginning(raw: bytes | memoryview, start: int = 0) -> Beginning:
    """Raises InvalidPlan for what no message begins with."""
    kind, head_bytes, payload_bytes = found = Beginning(*_BEGINNING.unpack_from(raw, start))
    tokens_bytes = head_bytes - _STEP.size
    match kind:
        case 1:  # FRAME
            is_sound = head_bytes == _FRAME_HEAD.size and payload_bytes <= MAX_PAYLOAD_BYTES
        case 2:  # TOKENS
            is_sound = 0 <= tokens_bytes <= MAX_TOKENS * _TOKEN.size and not tokens_bytes % _TOKEN.size
            is_sound = is_sound and not payload_bytes
        case 3 | 4:  # PING, PONG
            is_sound = not head_bytes and payload_bytes <= MAX_PING_BYTES
        case _:
            is_sound = False
    if not is_sound:
        raise InvalidPlan(f"a message on a direct connection cannot begin with (kind, bytes, bytes) {tuple(found)}")
    return found


def frame_beginning(plan: StepPlan, hidden_state: NDArray[np.float32], wire_dtype: str, payload_bytes: int) -> bytes:
    """A frame but for its payload, which is the bytes of `frames.wire_values`."""
    rows, hidden = hidden_state.shape
    code = DTYPE_CODES[wire_dtype]
    return _FRAME.pack(FRAME, _FRAME_HEAD.size, payload_bytes, plan.epoch, plan.step, code, rows, hidden)


def read_frame_head(raw: memoryview, start: int, payload_bytes: int) -> Frame:
    """Not checked, without its payload."""
    epoch, step, dtype, rows, hidden = _FRAME_HEAD.unpack_from(raw, start)
    return Frame(epoch, step, dtype, rows, hidden, payload_bytes)


def encode_tokens(done: StepDone) -> bytes:
    """As much of an answer as stage 0 needs: its tokens, whole as a message."""
    tokens = b"".join([_TOKEN.pack(token.seq, token.pos, token.token) for token in done.tokens])
    beginning = _BEGINNING.pack(TOKENS, _STEP.size + len(tokens), 0)
    return b"".join((beginning, _STEP.pack(done.epoch, done.step), tokens))


def read_tokens(raw: memoryview) -> tuple[Epoch, StepId, list[tuple[SeqId, int, int]]]:
    """Epoch, step, and of every token (sequence, position, token), from a head whose size was checked."""
    epoch, step = _STEP.unpack_from(raw)
    tokens = cast("list[tuple[SeqId, int, int]]", list(_TOKEN.iter_unpack(raw[_STEP.size :])))
    return Epoch(epoch), StepId(step), tokens


def encode_ping(payload: bytes | memoryview, kind: int = PING) -> bytes:
    """A ping, or the PONG to one, whole."""
    return _BEGINNING.pack(kind, 0, len(payload)) + payload


def tune(connection: socket.socket) -> None:
    """Options of both ends: nothing is held back to be sent together, and silence is noticed without traffic."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # as far as the system has them
        ("TCP_KEEPIDLE", 3),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
