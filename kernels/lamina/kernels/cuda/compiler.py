"""NVRTC, the run-time compiler, and the folder that keeps what it made from start to start.

Compiles for the very card. A file of the folder is named by all that decides about its content (source, options,
compiler), written in one go, and checked by a digest when it is read, so any number of workers may share it.
"""

import ctypes
import hashlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lamina.kernels.cuda.libcuda import Arguments, CudaError, declare

_log = logging.getLogger(__name__)
_OPTIONS = ("-std=c++17", "-ftz=true", "--diag-suppress=177")
_NUM_THREADS = 8
_DIGEST_BYTES = 32
_SAY_AGAIN_S = 5.0

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: Arguments = {
    "nvrtcVersion": (_pointer, _pointer),
    "nvrtcGetNumSupportedArchs": (_pointer,),
    "nvrtcGetSupportedArchs": (_pointer,),
    "nvrtcCreateProgram": (_pointer, _pointer, _pointer, _int, _pointer, _pointer),
    "nvrtcDestroyProgram": (_pointer,),
    "nvrtcCompileProgram": (_pointer, _int, _pointer),
    "nvrtcGetProgramLogSize": (_pointer, _pointer),
    "nvrtcGetProgramLog": (_pointer, _pointer),
    "nvrtcGetCUBINSize": (_pointer, _pointer),
    "nvrtcGetCUBIN": (_pointer, _pointer),
    "nvrtcGetPTXSize": (_pointer, _pointer),
    "nvrtcGetPTX": (_pointer, _pointer),
}


class Source(NamedTuple):
    """A text to compile, what to call it, and options beyond those of every text."""

    name: str
    text: str
    options: tuple[str, ...]


def declared(library: Any) -> Any:
    """The library libnvrtc, its functions told what they take. Raises Unsupported if it lacks one."""
    return declare(library, _ARGUMENTS, "the installed libnvrtc is too old; CUDA 12.4 or later is wanted")


class Nvrtc:
    """The compiler. `library` is `declared`. May be used by several threads at once."""

    def __init__(self, library: Any) -> None:
        self._library = library
        major, minor, count = _int(), _int(), _int()
        self._require(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "its version")
        self._require(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "its architectures")
        numbers = (_int * count.value)()
        self._require(library.nvrtcGetSupportedArchs(numbers), "its architectures")
        self.version = (major.value, minor.value)
        self.capabilities = tuple((number // 10, number % 10) for number in numbers)

    def compile(self, source: Source, target: str) -> bytes:
        """Machine code for a target like sm_90a; PTX for one like compute_120. Raises CudaError with what it says."""
        program = ctypes.c_void_p()
        text, name = source.text.encode(), source.name.encode()
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        self._require(created, source.name)
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *_OPTIONS, *source.options)]
            given = (ctypes.c_char_p * len(options))(*options)
            if self._library.nvrtcCompileProgram(program, len(options), given):
                said = self._get("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise CudaError(f"cuda: {source.name} {' '.join(source.options)} does not compile for {target}: {said}")
            return self._get("CUBIN" if target.startswith("sm_") else "PTX", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._require(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        content = ctypes.create_string_buffer(size.value)
        self._require(getattr(self._library, f"nvrtcGet{what}")(program, content), what)
        return content.raw

    def _require(self, status: int, what: str) -> None:
        if status:
            raise CudaError(f"cuda: NVRTC fails at {what}: status {status}")


class Compiler:
    """NVRTC for one target, with the folder in front. One thread, which several more help."""

    def __init__(self, nvrtc: Nvrtc, target: str, folder: Path) -> None:
        self._nvrtc = nvrtc
        self._target = target
        self._folder = folder
        self._keeps = True
        self._giving_up = threading.Lock()
        self._progress = _Progress(f"kernels for {target}, to be kept in {folder}")

    def compile_all(self, sources: Sequence[Source]) -> list[bytes]:
        """The code of each: from the folder, else compiled, in parallel. Raises CudaError."""
        found = [self._read(source) for source in sources]
        missing = [source for source, code in zip(sources, found, strict=True) if code is None]
        if not missing:
            return [code for code in found if code is not None]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            made = iter(list(pool.map(self._compile, missing)))
        return [next(made) if code is None else code for code in found]

    def _compile(self, source: Source) -> bytes:
        with self._progress:
            code = self._nvrtc.compile(source, self._target)
        try:
            if self._keeps:
                self._write(source, code)
        except OSError as error:
            with self._giving_up:  # other threads meet the same
                was_keeping, self._keeps = self._keeps, False
            if was_keeping:
                _log.warning("compiled kernels are not kept, every start compiles them: %s", error)
        return code

    def _path(self, source: Source) -> Path:
        decisive = [source.text, *_OPTIONS, *source.options, self._target, *map(str, self._nvrtc.version)]
        return self._folder / f"{hashlib.sha256(chr(0).join(decisive).encode()).hexdigest()[:40]}.bin"

    def _read(self, source: Source) -> bytes | None:
        try:
            content = self._path(source).read_bytes()
        except OSError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return code if hashlib.sha256(code).digest() == digest else None

    def _write(self, source: Source, code: bytes) -> None:
        path = self._path(source)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            pass
        try:
            Path(file.name).write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(file.name, path)
        except OSError:  # a full disk is to get its bytes back
            os.unlink(file.name)
            raise


class _Progress:
    """Says that compilers are at work, and every few seconds how far they are. A context a compilation; any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._num_done = 0
        self._said_at = -math.inf

    def __enter__(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _SAY_AGAIN_S:
                return
            self._said_at, num_done = now, self._num_done
        _log.info("compiling %s: %d done", self._what, num_done)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._num_done += 1
