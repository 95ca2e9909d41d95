"""Who holds which blocks of the windowed layers: they come back while their sequence goes on. Pure.

A sequence's block i holds positions 16 i to 16 i + 15, as in the other cache groups, but is held only as long as a
position still to be computed, or a step under way, sees any of them. The widest window counts for all windowed groups.
The invariant that keeps every admitted sequence going, whatever is shared (a shared block counts for each holder):

    sum of max(quota, blocks held) <= blocks of the pool

So each can have its quota, which is enough for its window and one more chunk; beyond it, it borrows what nobody is
entitled to, to run ahead.
"""

from collections.abc import Sequence as Run
from dataclasses import dataclass

from lamina.coordinator.engine.prefix_cache import PrefixNode
from lamina.coordinator.engine.sequence import Sequence
from lamina.coordinator.engine.window_pool import WindowPool
from lamina.spec.errors import InvalidConfig
from lamina.spec.ids import StepId
from lamina.spec.memory import window_blocks
from lamina.spec.step import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """The pool of the windowed groups, and what one sequence may want of it."""

    num_blocks: int
    window: int  # the widest, tokens
    max_chunk: int  # rows of one sequence in a step
    run_ahead: int  # rows of a decoding sequence that may be under way

    def __post_init__(self) -> None:
        for name in ("num_blocks", "window", "max_chunk", "run_ahead"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def prefill_quota(self) -> int:
        """Blocks with which a sequence of any length gets through its prefill."""
        return window_blocks(self.window, self.max_chunk)

    @property
    def decode_quota(self) -> int:
        """Blocks with which it decodes."""
        return min(self.prefill_quota, window_blocks(self.window, self.run_ahead))

    @property
    def capacity_tokens(self) -> int | None:
        """Positions of the longest sequence, None if any length will do."""
        return None if self.prefill_quota <= self.num_blocks else self.num_blocks * BLOCK_TOKENS


class WindowLedger:
    """The blocks of the windowed groups, in terms of sequences."""

    def __init__(self, limits: WindowLimits) -> None:
        self.pool = WindowPool(limits.num_blocks)
        self._limits = limits
        self._num_spoken_for = 0  # the left side of the invariant
        self._leaving: dict[StepId, list[tuple[Sequence, int]]] = {}  # blocks before this one, after the step

    @property
    def capacity_tokens(self) -> int | None:
        """Positions of the longest sequence, None if any length will do."""
        return self._limits.capacity_tokens

    @property
    def num_by_state(self) -> dict[str, int]:
        """Blocks held by sequences, cached (nobody holds them now) and free: the whole pool."""
        free, cached = self.pool.num_free, self.pool.num_unused
        return {"used": self.pool.num_blocks - free - cached, "cached": cached, "free": free}

    @property
    def is_waiting(self) -> bool:
        """Whether blocks come back when a step that is under way is done."""
        return bool(self._leaving)

    def first_needed(self, pos: int) -> int:
        """The first block of which position `pos` sees something."""
        return max(0, pos - self._limits.window + 1) // BLOCK_TOKENS

    def quota(self, seq: Sequence, num_positions: int) -> int:
        """Blocks to be set aside for a sequence that is to be admitted with so many positions, and one block more."""
        return min(-(-min(num_positions + BLOCK_TOKENS, seq.limit) // BLOCK_TOKENS), self._limits.prefill_quota)

    def fits(self, seq: Sequence, num_positions: int) -> bool:
        """Whether the quota can be set aside."""
        return self._num_spoken_for + self.quota(seq, num_positions) <= self.pool.num_blocks

    def admit(self, seq: Sequence, num_positions: int) -> None:
        """Set its quota aside; the caller has asked `fits`."""
        seq.window_quota = self.quota(seq, num_positions)
        self._num_spoken_for += seq.window_quota

    def end_prefill(self, seq: Sequence) -> None:
        """From now on it needs less."""
        before = _claim(seq)
        seq.window_quota = min(seq.window_quota, self._limits.decode_quota)
        self._num_spoken_for += _claim(seq) - before

    def num_usable(self, seq: Sequence, found: Run[PrefixNode]) -> int:
        """How many of these nodes, which follow its table, are a hit: the last window before their end must be there.

        The blocks before it are needed by nobody and may be gone.
        """
        first, usable, missing = len(seq.blocks), 0, -1
        for index, node in enumerate(found, first):
            if node.window is None or node.window.is_gone:
                missing = index
            if self.first_needed((index + 1) * BLOCK_TOKENS) > missing:
                usable = index + 1 - first
        return usable

    def adopt(self, seq: Sequence, found: Run[PrefixNode]) -> None:
        """Hold what it needs of a hit that follows its table; no step that names it has been issued."""
        first = len(seq.blocks)
        start = self.first_needed((first + len(found)) * BLOCK_TOKENS)
        self._let_go(seq, min(start, first))
        seq.window_start = max(seq.window_start, start)
        before = _claim(seq)
        for node in found[max(0, start - first) :]:
            if node.window is not None:
                self.pool.hold(node.window)
                seq.windows.append(node.window)
        self._num_spoken_for += _claim(seq) - before

    def grow(self, seq: Sequence, count: int) -> bool:
        """Take so many blocks more. False, with nothing changed, if others are entitled to them."""
        more = max(0, len(seq.windows) + count - _claim(seq))
        if self._num_spoken_for + more > self.pool.num_blocks:
            return False
        seq.windows += self.pool.take(count)
        self._num_spoken_for += more
        return True

    def pass_by(self, seq: Sequence, done_step: StepId) -> None:
        """All positions below its `pos` are planned: what no later one sees goes when the last of its steps is done."""
        start = self.first_needed(seq.pos)
        if start <= seq.window_passed:
            return
        seq.window_passed = start
        if seq.last_step > done_step:
            self._leaving.setdefault(seq.last_step, []).append((seq, start))
        else:
            self._let_go(seq, start)

    def end_step(self, step: StepId) -> None:
        """The step is done, and so are all before it."""
        for seq, start in self._leaving.pop(step, ()):
            self._let_go(seq, start)

    def index(self, seq: Sequence, depth: int, nodes: Run[PrefixNode]) -> None:
        """Have its full blocks from `depth` on found where the index has none: a window that is gone comes back."""
        for at, node in enumerate(nodes, depth - seq.window_start):
            if node.is_linked and at >= 0 and (node.window is None or node.window.is_gone):
                block = seq.windows[at]
                if not block.is_indexed:
                    block.is_indexed = True
                    node.window = block

    def prove(self, seq: Sequence, depth: int) -> None:
        """It has a finite answer and has read all that it holds from `depth` to the end of its indexed blocks."""
        start = seq.window_start
        for block in seq.windows[max(0, depth - start) : max(0, len(seq.chain) - start)]:
            block.is_proven = True

    def close(self, seq: Sequence) -> None:
        """Take back everything; every issued step that names the sequence is done."""
        self._num_spoken_for -= _claim(seq)
        self.pool.leave(seq.windows)
        seq.windows = []
        seq.window_quota = 0

    def _let_go(self, seq: Sequence, start: int) -> None:
        """Hold nothing before block `start`."""
        count = start - seq.window_start
        if count > 0:
            before = _claim(seq)
            self.pool.leave(seq.windows[:count])
            del seq.windows[:count]
            seq.window_start = start
            self._num_spoken_for += _claim(seq) - before


def _claim(seq: Sequence) -> int:
    """What counts for it in the invariant."""
    return max(seq.window_quota, len(seq.windows))
