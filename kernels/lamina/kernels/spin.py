"""Waiting without sleeping: for a bell that other threads ring, events of a device and sockets, for a bounded time.

A thread that has slept for a millisecond is woken late, and finds its core at rest and its caches cold: on a GPU's host
that costs more than what it is woken for. The interpreter is let go meanwhile, and the core to others that want it.
Native; there is none where the native library is not built.
"""

import ctypes
import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from lamina.kernels.backend import EventProbe, Unsupported
from lamina.kernels.cpu.library import load_library
from lamina.spec.errors import InvalidConfig

MAX_WATCHED = 16  # events, and as many sockets


class Woken(IntEnum):
    """Why a wait is over."""

    TIME = 0
    BELL = 1
    EVENT = 2  # one of them is done, or has failed
    SOCKET = 3  # one of them can be read, or has ended


class _Probe(ctypes.Structure):
    _fields_ = (("query", ctypes.c_void_p), ("event", ctypes.c_void_p), ("pending", ctypes.c_int64))


class _Watch(ctypes.Structure):
    _fields_ = (
        ("bell", ctypes.c_uint64),
        ("num_events", ctypes.c_int64),
        ("num_sockets", ctypes.c_int64),
        ("events", _Probe * MAX_WATCHED),
        ("sockets", ctypes.c_int32 * MAX_WATCHED),
    )


class Spinner:
    """One thread waits, any thread rings. Built by `create`."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._watch = _Watch()
        self._address = ctypes.addressof(self._watch)
        self._rings = itertools.count(1)

    @classmethod
    def create(cls) -> "Spinner | None":
        """None where there is no native library, or one of before."""
        try:
            function = load_library().functions.lamina_spin
        except (Unsupported, InvalidConfig, AttributeError):
            return None
        function.restype = ctypes.c_int
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64)
        return cls(function)

    @property
    def bell(self) -> int:
        """Another number after every ring."""
        return int(self._watch.bell)

    def ring(self) -> None:
        """Wake whoever waits. No ring is like another, so two at once are not taken for none."""
        self._watch.bell = next(self._rings)

    def wait(self, seen: int, events: Sequence[EventProbe], sockets: Sequence[int], for_s: float) -> Woken:
        """Until there is something, at once if the bell is not as `seen`. At most MAX_WATCHED of each."""
        watch = self._watch
        for place, event in zip(watch.events, events, strict=False):
            place.query, place.event, place.pending = event
        for index, socket in enumerate(sockets):
            watch.sockets[index] = socket
        watch.num_events, watch.num_sockets = len(events), len(sockets)
        return Woken(self._function(self._address, seen, max(0, int(for_s * 1e9))))
