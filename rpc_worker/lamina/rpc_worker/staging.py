"""The host's side of a stage's transfers: what a step reads goes up in one piece, what it left comes back.

Owned by the compute thread. Where the device runs asynchronously the memory is page-locked, and there are as many slots
as steps may be launched and not finished: a slot is written again only when its step is finished. Elsewhere every copy
is done at once, and one slot serves.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from lamina.kernels.backend import Backend, Event, HostCopy
from lamina.kernels.buffer import Buffer
from lamina.rpc_worker.arena import Arena, shape_of
from lamina.rpc_worker.loan import Loan

Array = NDArray[np.generic]
MAX_LAUNCHED = 2  # steps on an asynchronous device: one runs while the next waits, so that it never idles


class StepTransfers:
    """One step's slot."""

    def __init__(self, backend: Backend, arena: Arena) -> None:
        self._backend = backend
        self._arena = arena
        self._is_async = backend.capabilities.asynchronous
        self._event: Event | None = backend.create_event() if self._is_async else None
        self._taken: Event | None = backend.create_event() if self._is_async else None
        self._is_done = True
        self._given: dict[str, HostCopy] = {}  # by buffer, made when first needed, as are those of what it left
        self._left: dict[str, HostCopy] = {}
        self._parts: dict[str, tuple[Array, int]] = {}  # by name: its place here, and where it starts
        self._staged = None
        if arena.staged is not None:
            self._staged = backend.host_copy(arena.staged)
            self._place_parts(self._staged.values)

    def _place_parts(self, staged: Array) -> None:
        start = 0
        for item in self._arena.staged_parts:
            end = start + item.rows * item.columns
            part = staged[start:end].view(self._arena[item.name].dtype.host_dtype)
            self._parts[item.name] = (part.reshape(shape_of(item)), start)
            start = end

    def upload_staged(self, values: Mapping[str, Array]) -> None:
        """The first rows of the staged buffers, in one transfer; what lies between them is of earlier steps."""
        end = 0
        for name, rows in values.items():
            place, start = self._parts[name]
            count = len(rows)
            if rows.ndim == 1:
                place[:count] = rows
                end = max(end, start + count)
            else:
                place[:count, : rows.shape[1]] = rows
                end = max(end, start + count * place.shape[1])
        if self._staged is not None:
            self._staged.upload(end)

    def upload(self, buffer: Buffer, name: str, values: Array) -> None:
        """The first rows of another buffer of the arena."""
        if not self._is_async:
            self._backend.upload(buffer, values)
            return
        host, count = self._host_side(self._given, name, buffer), len(values)
        host.values[:count] = values
        host.upload(count)

    def download(self, buffer: Buffer, name: str, num_rows: int) -> Array:
        """The first rows of a buffer: there once `is_done`, and until the slot is used again."""
        if not self._is_async:
            return self._backend.download(buffer, num_rows)
        host = self._host_side(self._left, name, buffer)
        if num_rows:
            host.download(num_rows)
        return host.values[:num_rows]

    def borrow(self, loan: Loan, target: Buffer, runs: Iterable[tuple[int, int, int]]) -> None:
        """Runs of (row of the target, row of the loan, rows) from another stage, on the device. Raises StaleEpoch."""
        loan.copy_to(self._backend, target, runs, self._taken)

    def lend(self, buffer: Buffer, num_rows: int) -> Loan:
        """What the step leaves in a buffer, once everything of it has been launched."""
        self.close()
        return Loan(self._backend, buffer, num_rows, self._event)

    def close(self) -> None:
        """Everything of this step has been launched."""
        if self._event is not None:
            self._backend.record_event(self._event)
            self._is_done = False

    @property
    def event(self) -> Event | None:
        """Where the device is through with the step; None on one that is so at once."""
        return self._event

    def is_done(self) -> bool:
        """Whether the device is through with the step."""
        if self._event is not None and not self._is_done:
            self._is_done = self._backend.event_done(self._event)
        return self._is_done

    def wait(self) -> None:
        """Until it is."""
        if self._event is not None and not self._is_done:
            self._backend.wait_event(self._event)
            self._is_done = True

    def _host_side(self, copies: dict[str, HostCopy], name: str, buffer: Buffer) -> HostCopy:
        copy = copies.get(name)
        if copy is None:
            copy = copies[name] = self._backend.host_copy(buffer)
        return copy
