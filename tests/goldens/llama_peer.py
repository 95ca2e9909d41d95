"""What the golden makers need of llama.cpp, through llama-cpp-python's C bindings: vocabulary, logits, versions.

Imported only by the makers, never by the test suite, which therefore needs no llama-cpp-python.
"""

import ctypes
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt

# 1e-5 nats: the unit of every log-probability in the golden files.
UNITS_PER_NAT = 100_000

LOG_LEVEL_ERROR = 4  # ggml_log_level; the bindings leave it out

PEER_COMMIT_DATE = "2026-10-01"  # of the llama.cpp that this version of llama-cpp-python vendors


def peer_facts() -> dict[str, str]:
    """Version and CPU features of the library, as it reports them."""
    return {
        "llama_cpp_python": llama_cpp.__version__,
        "llama_cpp_commit_date": PEER_COMMIT_DATE,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
        "machine": f"{os.uname().machine}, CPU only",
    }


def file_facts(path: Path) -> dict[str, str | int]:
    """Name, size in bytes and SHA-256 of a model file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def log_errors(level: int, text: bytes, _data: object) -> None:
    """Passes on errors only; llama.cpp tells thousands of lines about a load."""
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class PeerModel:
    """A model (or, with `vocab_only`, just its vocabulary) loaded by llama.cpp; lives until the process ends."""

    def __init__(self, path: Path, *, vocab_only: bool) -> None:
        llama_cpp.llama_log_set(log_errors, None)
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        self.handle: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ValueError(f"{path}: llama.cpp cannot load this file")
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.handle)
        self.num_tokens: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def adds_bos(self) -> bool:
        """Whether `add_special` puts a BOS token in front."""
        return bool(llama_cpp.llama_vocab_get_add_bos(self.vocab))

    def chat_template(self) -> str:
        """The Jinja template stored in the file."""
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        if template is None:
            raise ValueError("the model file holds no chat template")
        return str(template.decode())

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of `text`."""
        encoded = text.encode()
        capacity = len(encoded) + 8
        ids = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(self.vocab, encoded, len(encoded), ids, capacity, add_special, parse_special)
        if count < 0:
            raise ValueError(f"llama.cpp needs {-count} tokens for {text[:40]!r}, more than its bytes")
        return list(ids[:count])

    def detokenize(self, ids: list[int], *, keep_special: bool) -> bytes:
        """The bytes of `ids` joined piece by piece; control tokens are spelt out if `keep_special`, else dropped."""
        buffer = ctypes.create_string_buffer(1024)
        pieces = []
        for token in ids:
            length = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, keep_special)
            if length < 0:
                raise ValueError(f"token {token} has a piece of {-length} bytes, more than {len(buffer)}")
            pieces.append(buffer.raw[:length])
        return b"".join(pieces)


class PeerContext:
    """One sequence on a PeerModel: feed tokens, read the logits of the last ones."""

    def __init__(
        self,
        model: PeerModel,
        *,
        num_ctx: int = 2048,
        flash_attention: bool | None = None,
        cache_type: int | None = None,
        num_threads: int = 1,
    ) -> None:
        """`cache_type`: a GGML_TYPE of keys and values; None is llama.cpp's default, f16."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_ctx
        params.n_batch = num_ctx
        params.n_threads = params.n_threads_batch = num_threads
        if flash_attention is not None:
            params.flash_attn_type = int(flash_attention)
        if cache_type is not None:
            params.type_k = params.type_v = cache_type
        self.num_tokens = model.num_tokens
        self.handle: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ValueError("llama.cpp cannot make a context with these parameters")
        self.position = 0

    def clear(self) -> None:
        """Forgets the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)
        self.position = 0

    def feed(self, ids: list[int], num_logits: int = 1) -> npt.NDArray[np.float32]:
        """Appends `ids` in one batch; returns the logits [num_logits, num_tokens] of the last rows."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row] = token
            batch.pos[row] = self.position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = row >= len(ids) - num_logits
        status = llama_cpp.llama_decode(self.handle, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status} for {len(ids)} tokens at position {self.position}")
        self.position += len(ids)
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.handle, row), (self.num_tokens,)).copy()
            for row in range(len(ids) - num_logits, len(ids))
        ]
        return np.stack(rows)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Log-probabilities in nats over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
