"""Length-delimited protobuf fields (messages and bytes) by hand, where protobuf itself would copy their content."""

_LENGTH_DELIMITED = 2  # protobuf's wire type


def field_key(number: int) -> bytes:
    """What a field of this number begins with."""
    return varint(number << 3 | _LENGTH_DELIMITED)


def delimited(key: bytes, content: bytes) -> bytes:
    """The field whole."""
    return b"".join((key, varint(len(content)), content))


def varint(value: int) -> bytes:
    """As protobuf writes numbers: seven bits at a time, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
