"""Sizes as people write them: 512M, 8G, 1.5GiB."""

import re

from lamina.spec.errors import InvalidConfig

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a size; K, M, G and T are powers of 1,024. Raises InvalidConfig."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise InvalidConfig(f"size {text!r} is not of the form 512M, 8G or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
