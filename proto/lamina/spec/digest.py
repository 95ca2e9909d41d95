"""A cheap fingerprint of a model. Reads files, interprets nothing."""

import hashlib
from pathlib import Path
from typing import BinaryIO

from lamina.spec.errors import InvalidCheckpoint
from lamina.spec.gguf import GgufFile, GgufPart

SAMPLE_BYTES = 64 << 10
NUM_SAMPLES = 64


def model_digest(gguf: GgufFile) -> str:
    """SHA-256 (hex) over header bytes, file sizes and 64 KiB from each of 64 evenly spaced places of every part.

    A header ends with the tensor table. A file of at most 4 MiB is hashed whole. Paths do not enter.
    Raises InvalidCheckpoint if a file has changed its size or cannot be read.
    """
    digest = hashlib.sha256()
    for part in gguf.parts:
        digest.update(part.header_bytes.to_bytes(8, "little"))
        digest.update(part.file_bytes.to_bytes(8, "little"))
        try:
            with part.path.open("rb", buffering=0) as file:
                for start, num_bytes in _sample_ranges(part):
                    _update(digest, file, part.path, start, num_bytes)
        except OSError as error:
            raise InvalidCheckpoint(f"{part.path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _sample_ranges(part: GgufPart) -> list[tuple[int, int]]:
    """(start, bytes): the header, then the samples; the first starts the file and the last ends with it."""
    header = (0, part.header_bytes)
    last_start = part.file_bytes - SAMPLE_BYTES
    if part.file_bytes <= NUM_SAMPLES * SAMPLE_BYTES:
        return [header, (0, part.file_bytes)]
    return [header, *((last_start * place // (NUM_SAMPLES - 1), SAMPLE_BYTES) for place in range(NUM_SAMPLES))]


def _update(digest: "hashlib._Hash", file: BinaryIO, path: Path, start: int, num_bytes: int) -> None:
    file.seek(start)
    while num_bytes:
        chunk = file.read(min(num_bytes, 1 << 20))
        if not chunk:
            raise InvalidCheckpoint(f"{path}: is shorter than when its header was read; it must not change under us")
        digest.update(chunk)
        num_bytes -= len(chunk)
