"""Who has which KV blocks: admission, growth, sharing and return. Pure; owned by the engine loop.

Blocks are set aside ("promised") at admission and allocated as plans need them. The invariant that makes promises
worth something:

    slack = free blocks + unused cached blocks - promised blocks >= 0

so a promised block can always be had, if need be by evicting. A sequence without a promise left grows from the slack.

That is said of the blocks that are kept for as long as their sequence: one id in every cache group with full attention.
Groups with a window have a ledger of their own (`window_ledger`), where blocks come and go.
"""

from lamina.coordinator.engine.block_pool import BlockPool
from lamina.coordinator.engine.policy import SchedulerConfig
from lamina.coordinator.engine.prefix_cache import Place, PrefixCache, PrefixNode, TokenBlock
from lamina.coordinator.engine.sequence import Sequence
from lamina.coordinator.engine.window_ledger import WindowLedger
from lamina.spec.ids import BlockId, StepId
from lamina.spec.step import BLOCK_TOKENS, TOKEN_BYTES

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES  # of its packed token ids

PrefixPlace = tuple[Place, TokenBlock]  # where in the index a block belongs


def num_blocks_for(num_positions: int) -> int:
    """Blocks that hold this many positions."""
    return -(-num_positions // BLOCK_TOKENS)


class KvLedger:
    """The pools and the prefix index, in terms of sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Without prefix caching nothing is ever indexed, so nothing is found."""
        limits = config.window_limits
        self._windows = WindowLedger(limits) if limits is not None else None
        self._is_windowed = config.is_windowed
        self._pool = BlockPool(config.num_kept_blocks)
        self._cache = PrefixCache(self._pool, self._windows.pool if self._windows is not None else None)
        self._prefix_caching = config.prefix_caching
        self._num_promised = 0
        self.num_returns = 0  # how often blocks came back: a refused admission is worth another look

    @property
    def capacity_tokens(self) -> int:
        """Positions of a sequence that has the pools to itself."""
        kept = self._pool.num_blocks * BLOCK_TOKENS
        return kept if self._windows is None else min(kept, self._windows.capacity_tokens or kept)

    @property
    def slack(self) -> int:
        """Blocks that nobody uses and that are promised to nobody."""
        return self._pool.num_free + self._cache.num_unused - self._num_promised

    @property
    def usage_ratio(self) -> float:
        """Share of the pool that sequences hold, of the fuller one if some layers have a window; cached is not held."""
        pools = [self.num_by_state] if self._windows is None else [self.num_by_state, self._windows.num_by_state]
        return max(states["used"] / sum(states.values()) for states in pools)

    @property
    def num_by_state(self) -> dict[str, int]:
        """Blocks used by sequences, cached (prefixes nobody uses now) and free: all that keep their positions."""
        free, cached = self._pool.num_free, self._cache.num_unused
        return {"used": self._pool.num_blocks - free - cached, "cached": cached, "free": free}

    @property
    def num_window_by_state(self) -> dict[str, int] | None:
        """The same of the blocks of layers with a window, None if there are none."""
        return None if self._windows is None else self._windows.num_by_state

    @property
    def num_promised(self) -> int:
        """Of the cached and free blocks, those set aside for admitted sequences."""
        return self._num_promised

    def cost(self, seq: Sequence, num_positions: int) -> int:
        """Blocks that admission would take out of the slack: blocks in use by others are shared at no cost."""
        shared = sum(1 for node in self._match(seq) if node.block.num_users)
        return num_blocks_for(num_positions) - shared

    def fits_windows(self, seq: Sequence, num_positions: int) -> bool:
        """Whether the layers with a window have blocks for one more sequence of so many positions."""
        return self._windows is None or self._windows.fits(seq, num_positions)

    def admit(self, seq: Sequence, num_positions: int) -> None:
        """Set aside blocks for so many positions; the caller has compared `cost` with `slack`, asked `fits_windows`."""
        if self._windows is not None:
            self._windows.admit(seq, num_positions)
        seq.indexing = self._prefix_caching
        seq.promised = num_blocks_for(num_positions)
        self._num_promised += seq.promised
        self.adopt(seq)

    def adopt(self, seq: Sequence) -> None:
        """Take over what the index has of its next blocks; only before its first slice, for positions have no gaps."""
        found = self._match(seq)
        for node in found:
            self._cache.hold(node)
        self._spend_promise(seq, len(found))
        if self._windows is not None:
            self._windows.adopt(seq, found)
        seq.chain += found
        seq.add_blocks([node.block for node in found])
        seq.pos = seq.room

    def awaited_block(self, seq: Sequence) -> PrefixPlace | None:
        """Where the index would have to grow for `adopt` to find more, or None."""
        if not seq.indexing or seq.room + BLOCK_TOKENS >= len(seq.tokens):
            return None
        return _next_place(seq)

    def coming_block(self, seq: Sequence) -> PrefixPlace | None:
        """Where its prefill lets the index grow next, or None."""
        if not seq.indexing or (len(seq.chain) + 1) * BLOCK_TOKENS > len(seq.tokens):
            return None
        return _next_place(seq)

    def grow(self, seq: Sequence, num_positions: int) -> bool:
        """Lengthen the table to hold so many positions. False, with nothing changed, if there are not enough blocks."""
        missing = num_blocks_for(num_positions) - len(seq.blocks)
        if missing > seq.promised + self.slack:
            return False
        if missing > 0:
            if self._windows is not None and not self._windows.grow(seq, missing):
                return False
            self._spend_promise(seq, missing)
            for _ in range(missing - self._pool.num_free):
                self._cache.evict()
            seq.add_blocks(self._pool.allocate(missing))
        return True

    def pass_by(self, seq: Sequence, done_step: StepId) -> None:
        """Before it grows: blocks out of the window of its `pos` go, those that steps after `done_step` read later."""
        if self._windows is not None:
            self._windows.pass_by(seq, done_step)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks of a running sequence come back when a step that is under way is done."""
        return self._windows is not None and self._windows.is_waiting

    def end_prefill(self, seq: Sequence) -> None:
        """Its last chunk is planned."""
        if self._windows is not None:
            self._windows.end_prefill(seq)

    def end_step(self, step: StepId) -> None:
        """The step is done, and so are all before it."""
        if self._windows is not None:
            self._windows.end_step(step)

    def take_new_blocks(self, seq: Sequence) -> tuple[tuple[BlockId, ...], ...]:
        """The blocks of its table that no plan has named yet, by cache group."""
        first, kept = seq.num_sent_blocks, seq.take_new_blocks()
        if self._windows is None:
            return (kept,) * len(self._is_windowed)
        windowed = seq.window_ids(first)
        return tuple([windowed if is_windowed else kept for is_windowed in self._is_windowed])

    def publish(self, seq: Sequence, num_positions: int) -> None:
        """Index its full blocks below this position: their tokens are known, and issued steps write them.

        A block that the index has already, from another sequence that uses it, stays private; its twin is held in its
        place, so that what follows can be indexed too. One that nobody uses is replaced.
        """
        depth = len(seq.chain)
        if not seq.indexing or (depth + 1) * BLOCK_TOKENS > num_positions:
            return
        place, blocks = _end_of(seq), seq.blocks[depth : num_positions // BLOCK_TOKENS]
        packed = seq.tokens[depth * BLOCK_TOKENS : num_positions].tobytes()
        keys = [packed[at : at + _BLOCK_BYTES] for at in range(0, len(blocks) * _BLOCK_BYTES, _BLOCK_BYTES)]
        for index, tokens in enumerate(keys):
            node = self._cache.find(place, tokens)
            if node is None:  # and so is everything below it
                nodes = self._cache.insert(place, keys[index:], blocks[index:])
                self._index_windows(seq, nodes)
                seq.chain += nodes
                return
            if node.block.num_users:
                self._cache.hold(node)
            else:
                self._cache.replace(node, blocks[index])
            self._index_windows(seq, [node])
            seq.chain.append(node)
            place = node

    def _index_windows(self, seq: Sequence, nodes: list[PrefixNode]) -> None:
        """Nodes that will follow its chain have its windows, unless they have others."""
        if self._windows is not None:
            self._windows.index(seq, len(seq.chain), nodes)

    def prove(self, seq: Sequence) -> None:
        """It has a finite answer, so every block that it read is sound: a NaN in any would have shown (A-05)."""
        for depth in range(seq.num_proven, len(seq.chain)):
            node = seq.chain[depth]
            if node.block is seq.blocks[depth]:
                node.is_proven = True
        if self._windows is not None:
            self._windows.prove(seq, seq.num_proven)
        seq.num_proven = len(seq.chain)

    def distrust(self, seq: Sequence) -> None:
        """Its answer is not finite: what it read and nobody has proven is found no more, so that it is recomputed."""
        suspect = next((node for node in seq.chain if node.is_suspect), None)
        if suspect is not None:
            self._cache.unlink(suspect)

    def close(self, seq: Sequence) -> None:
        """Take back everything; every issued step that names the sequence is done."""
        if self._windows is not None:
            self._windows.close(seq)
        self._num_promised -= seq.promised
        seq.promised = 0
        for depth in reversed(range(len(seq.blocks))):  # deepest first: see the invariant of the index
            block = seq.blocks[depth]
            node = seq.chain[depth] if depth < len(seq.chain) else None
            if node is None or node.block is not block:
                self._pool.free(block)
            if node is not None:
                self._cache.leave(node)
        self.num_returns += 1

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        """What the index has of the blocks after its table, less the last known token: one must be computed."""
        found: list[PrefixNode] = []
        if not self._prefix_caching:
            return found
        place = _end_of(seq)
        tokens = seq.tokens
        for start in range(seq.room, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            node = self._cache.find(place, tokens[start : start + BLOCK_TOKENS].tobytes())
            if node is None:
                break
            found.append(node)
            place = node
        return found if self._windows is None else found[: self._windows.num_usable(seq, found)]

    def _spend_promise(self, seq: Sequence, num_blocks: int) -> None:
        """So many blocks that it takes now were promised, as far as any are."""
        spent = min(num_blocks, seq.promised)
        seq.promised -= spent
        self._num_promised -= spent


def _end_of(seq: Sequence) -> Place:
    """Below which place its next block is indexed."""
    return seq.chain[-1] if seq.chain else seq.request.cache_salt


def _next_place(seq: Sequence) -> PrefixPlace:
    start = len(seq.chain) * BLOCK_TOKENS
    return _end_of(seq), seq.tokens[start : start + BLOCK_TOKENS].tobytes()
