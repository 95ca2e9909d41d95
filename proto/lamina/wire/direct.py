"""The direct connection of an edge, byte for byte: a TCP connection beside its Frames stream, for frames and answers.

    sender    preface: magic, version, the key that FramesOpened gave
    receiver  the magic again: the key was right (any other is hung up on without a word)
    both      messages: the lengths of head and payload (uint32 each, little-endian), head, payload

A head is a serialised FramesRequest, or the FramesResponse to a ping. The payload is that of its frame or ping, which
no protobuf copies. TLS joins here, and in `channel`.
"""

import socket
from struct import Struct

from lamina.spec.errors import InvalidPlan
from lamina.wire.frames import MAX_PAYLOAD_BYTES

HAS_DIRECT = hasattr(socket, "MSG_DONTWAIT")  # Windows has no such flag; edges stay on gRPC there
KEY_BYTES = 32
MAX_HEAD_BYTES = 2**20  # sampled tokens of 40,000 rows
MAX_PING_BYTES = 64 * 2**10
_VERSION = 1  # of what this module describes
_SILENCE_S = 9  # a peer that the network does not let answer is given up then, as gRPC does (P-27)
_LENGTHS = Struct("<II")
LENGTHS_BYTES = _LENGTHS.size
MAGIC = b"lamina-edge"
PREFACE_BYTES = len(MAGIC) + 1 + KEY_BYTES


def preface(key: bytes) -> bytes:
    """What the sender begins with."""
    return MAGIC + bytes([_VERSION]) + key


def key_of(said: bytes) -> bytes | None:
    """The key of a preface; None if it is none, or one of another version."""
    head, key = said[:-KEY_BYTES], said[-KEY_BYTES:]
    return key if head == preface(b"") else None


def beginning(head: bytes, num_bytes: int) -> bytes:
    """A message but for its payload of `num_bytes`."""
    return _LENGTHS.pack(len(head), num_bytes) + head


def read_lengths(raw: bytes | memoryview) -> tuple[int, int]:
    """Bytes of a message's head and payload. Raises InvalidPlan for what no message may have."""
    num_head, num_payload = _LENGTHS.unpack(raw)
    if num_head > MAX_HEAD_BYTES or num_payload > MAX_PAYLOAD_BYTES:
        limits = f"{MAX_HEAD_BYTES} and {MAX_PAYLOAD_BYTES}"
        raise InvalidPlan(f"a message of {num_head} + {num_payload} bytes on a direct connection; {limits} are allowed")
    return num_head, num_payload


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
