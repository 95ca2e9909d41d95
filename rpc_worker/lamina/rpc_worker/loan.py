"""What a stage leaves on its device for another stage of this process, and who may touch that buffer when.

A step's hidden state is lent to the next stage, the last stage's tokens to stage 0. Whoever borrows copies what it
needs to its own device, which may be the same one; neither host waits for either device.

| thread | does |
|---|---|
| owner's | makes the loan once what writes the buffer is launched; ends it before it is written again or freed |
| borrower's | copies, any number of times; gives the loan back once the copies that the owner waits for are launched |

The lock orders `copy_to` and `end` on the host: nothing is copied from a buffer after its loan has ended. On devices
events keep the order: a copy follows what wrote the buffer, and what the owner launches after `end` follows the copies.
Where both stages are on one device, its thread is one and its stream keeps the order: no events are needed.
"""

from collections.abc import Callable, Iterable
from threading import Lock

from lamina.kernels.backend import Backend, Event
from lamina.kernels.buffer import Buffer
from lamina.spec.errors import StaleEpoch


def _nobody_waits() -> None:
    pass


class Loan:
    """See the module docstring. What is lent begins in row `first` of the buffer.

    `lasts`: it may be copied for as many steps after the one that it is of. `on_back` is called by the borrower's
    thread when it gives the loan back.
    """

    def __init__(
        self,
        owner: Backend,
        buffer: Buffer,
        num_rows: int,
        written: Event | None = None,
        *,
        first: int = 0,
        lasts: int = 1,
    ) -> None:
        """`written` is recorded on the owner's stream; None where nobody but the owner's thread borrows."""
        self.first = first
        self.lasts = lasts
        self.is_back = False
        self.on_back: Callable[[], None] = _nobody_waits
        self._owner = owner
        self._buffer = buffer
        self._num_rows = num_rows
        self._written = written
        self._taken: Event | None = None  # recorded on the borrower's stream, after its last copy
        self._is_over = False
        self._lock = Lock()

    def __len__(self) -> int:
        return self._num_rows

    def copy_to(
        self, borrower: Backend, target: Buffer, runs: Iterable[tuple[int, int, int]], taken: Event | None
    ) -> None:
        """Copy runs of (row of the target, row of the buffer, rows) in the order of the borrower's stream.

        `taken`, an event of the borrower's, is recorded behind them. Raises StaleEpoch if the loan has ended.
        """
        with self._lock:
            if self._is_over:
                raise StaleEpoch("the epoch of the stage before has ended")
            if borrower is self._owner:
                self._copy(borrower, target, runs)
                return
            if self._written is None or taken is None:
                raise ValueError("a loan without events does not leave its device")
            borrower.follow(self._written)
            try:
                self._copy(borrower, target, runs)
            finally:  # some of them may be under way
                borrower.record_event(taken)
                self._taken = taken

    def _copy(self, borrower: Backend, target: Buffer, runs: Iterable[tuple[int, int, int]]) -> None:
        for row, source, count in runs:
            if row == source == 0:  # most steps, and views cost time
                borrower.copy_from(self._owner, self._buffer, target, count)
            else:
                borrower.copy_from(
                    self._owner, self._buffer.rows(source, source + count), target.rows(row, row + count), count
                )

    def give_back(self) -> None:
        """The owner need not wait any longer."""
        self.is_back = True
        self.on_back()

    def end(self) -> None:
        """On the owner's thread: no copy is begun any more, and what is launched next follows those that were."""
        with self._lock:
            self._is_over = True
            if self._taken is not None:
                self._owner.follow(self._taken)


class TokenLender:
    """Where the last stage keeps the tokens of its last steps for stage 0. Owned by its compute thread.

    With several stages the sequences take turns in as many steps, so tokens are fed on some steps later. A stage that
    is first and last needs no such place (`kept` None): its own next step, nobody else, reads them from where they are.
    """

    def __init__(self, backend: Backend, best: Buffer, kept: Buffer | None) -> None:
        """`best` int32 [logit rows] is what a step writes, `kept` int32 [steps x logit rows]."""
        self._backend = backend
        self._best = best
        self._kept = kept
        self._num_places = 1 if kept is None else kept.shape[0] // best.shape[0]
        self._place = 0
        self._events: list[Event] = []

    def lend(self, num_rows: int) -> Loan:
        """The tokens of the step launched last; the same buffer has those of the steps before."""
        if self._kept is None:
            return Loan(self._backend, self._best, num_rows)
        if not self._events:
            self._events = [self._backend.create_event() for _ in range(self._num_places)]
        event, first = self._events[self._place], self._place * self._best.shape[0]
        self._place = (self._place + 1) % self._num_places
        self._backend.copy(self._best, self._kept.rows(first, first + num_rows), num_rows)
        self._backend.record_event(event)
        return Loan(self._backend, self._kept, num_rows, event, first=first, lasts=self._num_places)
