"""llama.cpp as a contestant: local, or over its RPC backend. Runs in the peer's own environment (`make peer`).

Owns everything that is known about llama.cpp here. The libraries are loaded by the `.so.0` names that libllama itself
links: the wheel holds the plain `.so` files as second copies with a device registry of their own.

    $LAMINA_PEER_PYTHON benchmarks/peer.py                      contestant on standard input and output
    $LAMINA_PEER_PYTHON benchmarks/peer.py serve HOST:PORT N    RPC server with N threads
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contest import HERE, REPO, STREAM_PROMPT_TOKENS, Contestant, random_ids, serve_commands

_DEVICE_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_FLASH_ATTENTION_ON = 1
_ASSIGNED = re.compile(r"layer +\d+ assigned to device (\w+)")
_ALL_LAYERS = 999
ISA_VARIABLE = "LAMINA_CPU_ISA"
_ISA_OF_FEATURE = (("AMX_INT8", "amx"), ("AVX512_VNNI", "avx512"), ("AVX2", "avx2"))


def peer_python() -> str:
    """The interpreter of the peer's environment: LAMINA_PEER_PYTHON, else .venv-peer. Raises FileNotFoundError."""
    path = Path(os.environ.get("LAMINA_PEER_PYTHON") or REPO / ".venv-peer" / "bin" / "python")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no llama.cpp to compare with; run `make peer` or set LAMINA_PEER_PYTHON")
    return str(path)


def use_isa_of_peer() -> str:
    """Have workers that are started from now on use the instruction set that the peer was built with; which one it is.

    Without this a machine with AMX would compare tiles with vectors. LAMINA_CPU_ISA, where set, is left alone.
    """
    if ISA_VARIABLE not in os.environ:
        command = [peer_python(), "-c", "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"]
        system = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        known = [isa for feature, isa in _ISA_OF_FEATURE if f"{feature} = 1" in system]
        if known:
            os.environ[ISA_VARIABLE] = known[0]
    return os.environ.get(ISA_VARIABLE, "")


def start_peer(name: str = "llama.cpp", prefix: Sequence[str] = ()) -> Contestant:
    """The contestant, before `load`."""
    return Contestant(name, [*prefix, peer_python(), str(HERE / "peer.py")])


def server_command(endpoint: str, num_threads: int) -> list[str]:
    """Command line of an RPC server."""
    return [peer_python(), str(HERE / "peer.py"), "serve", endpoint, str(num_threads)]


def load_library(name: str) -> ctypes.CDLL:
    """The very library that libllama links."""
    import llama_cpp  # type: ignore[import-not-found]

    package = Path(llama_cpp.__file__).parent
    for folder in (package / "lib", package.parent / "lib", package.parent / "lib64"):
        if (folder / f"{name}.so.0").exists():
            return ctypes.CDLL(str(folder / f"{name}.so.0"), mode=ctypes.RTLD_GLOBAL)
    raise FileNotFoundError(f"{name}.so.0 beside {package}")


def serve_rpc(endpoint: str, num_threads: int) -> None:
    """One RPC server on the CPU device; never returns."""
    ggml, rpc = load_library("libggml"), load_library("libggml-rpc")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_by_type.argtypes = [ctypes.c_int]
    cpu = ggml.ggml_backend_dev_by_type(_DEVICE_CPU)
    if not cpu:
        sys.exit("llama.cpp has no CPU device")
    devices = (ctypes.c_void_p * 1)(cpu)
    rpc.ggml_backend_rpc_start_server.restype = None
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    ]  # fmt: skip
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, num_threads, 1, devices)


def add_server(endpoint: str) -> None:
    """Make a server's device known to this process; before the model is loaded."""
    ggml, rpc = load_library("libggml"), load_library("libggml-rpc")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.restype = None
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
    if not registry:
        raise ConnectionError(f"no llama.cpp RPC server at {endpoint}")
    ggml.ggml_backend_register(registry)


class Peer:
    """A loaded model and one context at a time."""

    def __init__(self) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log: list[str] = []

        @llama_cpp.llama_log_callback
        def keep(level: int, text: bytes, _: object) -> None:
            self._log.append(text.decode(errors="replace"))

        self._keep = keep  # ctypes does not
        llama_cpp.llama_log_set(keep, None)
        llama_cpp.llama_backend_init()
        self._context: Any = None
        self._context_key = (0, 0)
        self._held: tuple[int, int] = (0, 0)  # (salt, depth) of what sequence 0 holds

    def load(self, model: str, threads: int, servers: Sequence[str] = (), num_ctx: int = 4096) -> dict[str, object]:
        """Load the file, onto RPC servers if any. Raises ValueError if they did not get all the layers."""
        for endpoint in servers:
            add_server(endpoint)
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = _ALL_LAYERS if servers else 0
        self._log.clear()
        self._model = self._api.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise ValueError(f"{model}: llama.cpp cannot load it: {' '.join(self._log[-4:])}")
        layers = Counter(_ASSIGNED.findall("".join(self._log)))
        wanted = {f"RPC{i}" for i in range(len(servers))} or {"CPU"}
        if set(layers) - {"CPU"} != wanted - {"CPU"} or (servers and layers.get("CPU", 0) > 1):
            raise ValueError(f"layers were assigned to {dict(layers)}, not to {sorted(wanted)}")
        self._threads = threads
        self._num_ctx = num_ctx
        vocab = self._api.llama_model_get_vocab(self._model)
        self._num_vocab = self._api.llama_vocab_n_tokens(vocab)
        system = self._api.llama_print_system_info().decode().strip()
        return {"layers": dict(layers), "version": self._api.__version__, "system": system}

    def prefill(self, num_tokens: int, salt: int) -> float:
        """Tokens per second until the prompt's first token is sampled."""
        self._open(1, self._num_ctx)
        self._clear()
        ids = random_ids(num_tokens, salt)
        start = time.perf_counter()
        self._feed([(0, i, token) for i, token in enumerate(ids)], [num_tokens - 1])
        return num_tokens / (time.perf_counter() - start)

    def decode(self, depth: int, num_tokens: int, salt: int) -> float:
        """Tokens per second of `num_tokens` steps after a prompt of `depth` tokens (at least 1) and its first token."""
        depth = max(1, depth)
        self._open(1, self._num_ctx)
        ids = random_ids(depth, salt)
        if self._held != (salt, depth):
            self._clear()
            for start_at in range(0, depth - 1, 512):
                chunk = ids[start_at : min(start_at + 512, depth - 1)]
                self._feed([(0, start_at + i, token) for i, token in enumerate(chunk)], [])
            self._held = (salt, depth)
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, 0, depth - 1, -1)
        token = self._feed([(0, depth - 1, ids[-1])], [0])[0]
        start = time.perf_counter()
        for pos in range(depth, depth + num_tokens):
            token = self._feed([(0, pos, token)], [0])[0]
        return num_tokens / (time.perf_counter() - start)

    def streams(self, num_streams: int, num_tokens: int, salt: int) -> float:
        """Tokens per second in all, of `num_streams` sequences that decode in the same batches."""
        self._open(num_streams, num_streams * (STREAM_PROMPT_TOKENS + num_tokens + 16))
        self._clear()
        prompts = [random_ids(STREAM_PROMPT_TOKENS, salt * 1000 + i) for i in range(num_streams)]
        rows = [(seq, i, token) for seq, ids in enumerate(prompts) for i, token in enumerate(ids)]
        last = STREAM_PROMPT_TOKENS - 1
        tokens = self._feed(rows, [seq * STREAM_PROMPT_TOKENS + last for seq in range(num_streams)])
        start = time.perf_counter()
        for step in range(num_tokens):
            pos = STREAM_PROMPT_TOKENS + step
            tokens = self._feed([(seq, pos, token) for seq, token in enumerate(tokens)], range(num_streams))
        return num_streams * num_tokens / (time.perf_counter() - start)

    def _open(self, num_streams: int, num_ctx: int) -> None:
        if self._context_key == (num_streams, num_ctx):
            return
        if self._context:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx = num_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp makes no context of {num_ctx} tokens: {' '.join(self._log[-4:])}")
        self._context_key = (num_streams, num_ctx)
        self._held = (0, 0)

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._held = (0, 0)

    def _feed(self, rows: Sequence[tuple[int, int, int]], logit_rows: Sequence[int]) -> list[int]:
        """One batch of (sequence, position, token); the greedy token after each row of `logit_rows`."""
        import numpy as np

        api = self._api
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (seq, pos, token) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, pos, 1, 0
            batch.seq_id[row][0] = seq
        for row in logit_rows:
            batch.logits[row] = 1
        status = api.llama_decode(self._context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status} for {len(rows)} rows")
        pointers = [api.llama_get_logits_ith(self._context, row) for row in logit_rows]
        return [int(np.ctypeslib.as_array(pointer, (self._num_vocab,)).argmax()) for pointer in pointers]


def main() -> None:
    """A contestant, or with `serve` an RPC server."""
    if sys.argv[1:2] == ["serve"]:
        serve_rpc(sys.argv[2], int(sys.argv[3]))
        return
    peer = Peer()
    serve_commands({name: getattr(peer, name) for name in ("load", "prefill", "decode", "streams")})
    os._exit(0)  # the library's own teardown order is not our subject


if __name__ == "__main__":
    main()
