"""A cheap fingerprint of a model, and the full hash of a file. Reads files, interprets nothing."""

from pathlib import Path

from lamina.spec.gguf import GgufFile


def model_digest(gguf: GgufFile) -> str:
    """SHA-256 (hex) over header bytes, file sizes and 64 KiB from each of 64 evenly spaced places of every part."""
    raise NotImplementedError


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a whole file."""
    raise NotImplementedError
