"""Scopes of a step as a Chrome trace, as device activity and as NVTX ranges: one instrumentation for all three.

`Tracer.scope` is used by one stage on its compute thread; a `TraceFile` belongs to the process and is written by any
thread. A stage that is traced runs op by op (a replay is one launch, with nothing inside to see), and the device is
waited for after every step: a trace shows where time goes, not how much the untraced step takes. On a CPU each op then
costs some 0.1 ms of Python, which its scope includes: compare ops of models that take far longer. Untraced, scopes are
entered while a recording is made, never in a replay.

Files are arrays of events as Perfetto and chrome://tracing read them, and each write ends with a whole event: the
format allows the closing bracket to be missing, so a killed process leaves a sound file.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from lamina.kernels.backend import Backend, Event
from lamina.kernels.cuda.nvtx import NvtxRanges
from lamina.spec.errors import InvalidConfig

_log = logging.getLogger(__name__)
_MAX_FILE_BYTES = 1 << 30  # some three hours of a small model; Perfetto opens no more than that anyway
_DEVICE_TRACK = 1 << 20  # track numbers of devices begin here, those of threads are their native ids


class _Colour(NamedTuple):
    argb: int  # NVTX
    chrome: str  # one of the names that chrome://tracing has colours for


class ScopeKind(Enum):
    """What a scope stands for; each has a colour of its own (A-16)."""

    MODEL = _Colour(0xFF3B78E7, "rail_response")  # blue
    LAYER = _Colour(0xFFF57C00, "rail_animation")  # orange
    BLOCK = _Colour(0xFF43A047, "good")  # green: attention or mlp
    LINEAR = _Colour(0xFF8E24AA, "thread_state_unknown")  # purple
    ATTENTION = _Colour(0xFFD81B60, "terrible")  # crimson
    OTHER = _Colour(0xFF757575, "grey")


_INNERMOST = frozenset({ScopeKind.LINEAR, ScopeKind.ATTENTION, ScopeKind.OTHER})

Scope = Callable[[ScopeKind, str], AbstractContextManager[None]]
_NOTHING = nullcontext()


def no_scope(kind: ScopeKind, name: str) -> AbstractContextManager[None]:
    """For a stage that is not traced."""
    return _NOTHING


class Ranges(Protocol):
    """NVTX: what `push` returns means nothing (Nsight gives -1, stubs 0 or None), so nothing is made of it (A-13)."""

    def push(self, name: str, argb: int) -> object: ...

    def pop(self) -> object: ...


def find_ranges() -> Ranges | None:
    """NVTX, where the `cuda` extra has it."""
    try:
        return NvtxRanges()
    except ImportError as error:
        _log.debug("no NVTX ranges: %s", error)
        return None


class TraceFile:
    """One process's trace. `close` completes it; killed before that, it is sound as it stands."""

    def __init__(self, folder: Path, process: str) -> None:
        """Raises InvalidConfig where no file can be made."""
        self.path = folder / f"{process}-{os.getpid()}.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644
            )
        except OSError as error:
            raise InvalidConfig(f"--trace-directory {folder}: {error.strerror or error}") from None
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._named: set[int] = set()
        self._pid = os.getpid()
        self._epoch_us = time.time_ns() / 1e3 - time.perf_counter_ns() / 1e3
        self._write(b"[\n")
        self.add([{"name": "process_name", "ph": "M", "args": {"name": process}}])

    def timestamp_us(self, perf_counter_s: float) -> float:
        """Microseconds since 1970, so that the files of several machines fit together as well as their clocks do."""
        return self._epoch_us + 1e6 * perf_counter_s

    def name_track(self, track: int, name: str) -> None:
        """What the track is called; only the first time counts."""
        with self._lock:
            is_new = track not in self._named
            self._named.add(track)
        if is_new:
            self.add([{"name": "thread_name", "ph": "M", "tid": track, "args": {"name": name}}])

    def add(self, events: list[dict[str, Any]]) -> None:
        """Append whole events, in one write. Beyond the size limit they are dropped."""
        text = "".join(json.dumps({"pid": self._pid, **event}, separators=(",", ":")) + ",\n" for event in events)
        with self._lock:
            if self._descriptor is None or self._num_bytes > _MAX_FILE_BYTES:
                return
            self._write(text.encode())
            if self._num_bytes > _MAX_FILE_BYTES:
                _log.warning("%s is full, nothing more is traced", self.path)

    def close(self) -> None:
        """Make it strict JSON; a second time does nothing."""
        with self._lock:
            if self._descriptor is not None:
                self._write(json.dumps({"name": "end", "ph": "M", "pid": self._pid}).encode() + b"\n]\n")
                if self._descriptor is not None:
                    os.close(self._descriptor)
                self._descriptor = None

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, data)
            self._num_bytes += len(data)
        except OSError as error:  # a full disk ends the trace, not the worker
            _log.error("%s: %s; nothing more is traced", self.path, error.strerror)
            os.close(self._descriptor)
            self._descriptor = None


class _Interval(NamedTuple):
    """An innermost scope on the device: its events where the backend has them, else the host's own times."""

    name: str
    kind: ScopeKind
    begin: Event | float
    end: Event | float


class _Thread(threading.local):
    """What one thread has open and has not written yet (A-15)."""

    def __init__(self) -> None:
        self.depth = 0
        self.events: list[dict[str, Any]] = []
        self.intervals: list[_Interval] = []
        self.base: Event | None = None
        self.base_s = 0.0


class Tracer:
    """Traces one stage's steps into a file, and as NVTX ranges where `ranges` is given."""

    def __init__(self, file: TraceFile, backend: Backend, device: int, ranges: Ranges | None = None) -> None:
        self._file = file
        self._backend = backend
        self._ranges = ranges
        self._device_track = _DEVICE_TRACK + device
        self._here = _Thread()
        file.name_track(self._device_track, f"device {device}: {backend.name}")

    def scope(self, kind: ScopeKind, name: str) -> AbstractContextManager[None]:
        """Encloses what is launched in its body (A-14). It begins when it is entered, not when it is made (A-17)."""
        return _Scope(self, kind, name)

    def begin_span(self, name: str, number: int, **args: object) -> None:
        """Begin what may overlap with its like, or end on another thread (A-15)."""
        self._add_span("b", name, number, args)

    def end_span(self, name: str, number: int) -> None:
        """End it."""
        self._add_span("e", name, number, {})

    def _add_span(self, phase: str, name: str, number: int, args: dict[str, object]) -> None:
        now = self._file.timestamp_us(time.perf_counter())
        where = {"tid": threading.get_native_id(), "id": f"{self._device_track}.{number}", "cat": "step"}
        self._file.add([{"name": name, "ph": phase, "ts": now, **where, "args": args}])

    def _enter(self, kind: ScopeKind, name: str) -> Event | None:
        here = self._here
        if here.depth == 0 and self._backend.capabilities.events:
            self._backend.synchronize()  # so that the device's clock can be set against ours
            here.base = self._mark()
            here.base_s = time.perf_counter()
        here.depth += 1
        self._tell_ranges(name, kind)
        return self._mark() if kind in _INNERMOST and self._backend.capabilities.events else None

    def _leave(self, kind: ScopeKind, name: str, start_s: float, begin: Event | None) -> None:
        here = self._here
        end = self._mark() if begin is not None else None
        self._tell_ranges(None, kind)
        end_s = time.perf_counter()
        here.events.append(self._complete(name, kind, threading.get_native_id(), start_s, end_s))
        if kind in _INNERMOST:
            marks = (begin, end) if begin is not None and end is not None else (start_s, end_s)
            here.intervals.append(_Interval(name, kind, *marks))
        here.depth -= 1
        if here.depth == 0:
            self._flush(here)

    def _mark(self) -> Event:
        event = self._backend.create_event(timed=True)
        self._backend.record_event(event)
        return event

    def _tell_ranges(self, name: str | None, kind: ScopeKind) -> None:
        """Push a range, or pop one without a name. Whatever NVTX says to it, the other happens once, too."""
        if self._ranges is None:
            return
        try:
            if name is None:
                self._ranges.pop()
            else:
                self._ranges.push(name, kind.value.argb)
        except Exception as error:  # "NVTX functions not installed": nothing of ours depends on it
            _log.debug("NVTX: %s", error)

    def _flush(self, here: _Thread) -> None:
        if here.base is not None:
            self._backend.synchronize()
        self._file.name_track(threading.get_native_id(), threading.current_thread().name)
        activity = [
            self._complete(name, kind, self._device_track, self._seconds(here, begin), self._seconds(here, end))
            for name, kind, begin, end in here.intervals
        ]
        self._file.add(here.events + activity)
        here.events, here.intervals, here.base = [], [], None

    def _seconds(self, here: _Thread, mark: Event | float) -> float:
        """On the clock of time.perf_counter."""
        if isinstance(mark, float):
            return mark
        if here.base is None:
            raise ValueError("a device event outside of a step")
        return here.base_s + self._backend.elapsed_s(here.base, mark)

    def _complete(self, name: str, kind: ScopeKind, track: int, start_s: float, end_s: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": kind.name.lower(),
            "ph": "X",
            "ts": round(self._file.timestamp_us(start_s), 3),
            "dur": round(1e6 * (end_s - start_s), 3),
            "tid": track,
            "cname": kind.value.chrome,
        }


class _Scope:
    """A scope that is entered at most once."""

    __slots__ = ("_begin", "_kind", "_name", "_start_s", "_tracer")

    def __init__(self, tracer: Tracer, kind: ScopeKind, name: str) -> None:
        self._tracer, self._kind, self._name = tracer, kind, name
        self._start_s = 0.0
        self._begin: Event | None = None

    def __enter__(self) -> None:
        self._begin = self._tracer._enter(self._kind, self._name)
        self._start_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tracer._leave(self._kind, self._name, self._start_s, self._begin)
