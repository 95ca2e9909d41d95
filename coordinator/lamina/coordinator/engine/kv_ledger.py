"""Who has which KV blocks: admission, growth, sharing and return. Pure; owned by the engine loop.

Blocks are set aside ("promised") at admission and allocated as plans need them. The invariant that makes promises
worth something:

    slack = free blocks + unused cached blocks - promised blocks >= 0

so a promised block can always be had, if need be by evicting. A sequence without a promise left grows from the slack.
"""

from lamina.coordinator.engine.block_pool import BlockPool
from lamina.coordinator.engine.prefix_cache import Place, PrefixCache, PrefixNode, TokenBlock
from lamina.coordinator.engine.sequence import Sequence
from lamina.spec.step import BLOCK_TOKENS, TOKEN_BYTES

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES  # of its packed token ids

PrefixPlace = tuple[Place, TokenBlock]  # where in the index a block belongs


def num_blocks_for(num_positions: int) -> int:
    """Blocks that hold this many positions."""
    return -(-num_positions // BLOCK_TOKENS)


class KvLedger:
    """The pool and the prefix index, in terms of sequences."""

    def __init__(self, num_blocks: tuple[int, ...], *, prefix_caching: bool) -> None:
        """`num_blocks` by cache group. Without prefix caching nothing is ever indexed, so nothing is found."""
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool)
        self._prefix_caching = prefix_caching
        self._num_promised = 0
        self.num_returns = 0  # how often blocks came back: a refused admission is worth another look

    @property
    def capacity_tokens(self) -> int:
        """Positions of a sequence that has the whole pool to itself."""
        return self._pool.num_blocks * BLOCK_TOKENS

    @property
    def slack(self) -> int:
        """Blocks that nobody uses and that are promised to nobody."""
        return self._pool.num_free + self._cache.num_unused - self._num_promised

    @property
    def usage_ratio(self) -> float:
        """Share of the pool in the tables of sequences; what is only cached does not count."""
        return (self._pool.num_blocks - self._pool.num_free - self._cache.num_unused) / self._pool.num_blocks

    @property
    def num_by_state(self) -> dict[str, int]:
        """Blocks used by sequences, cached (prefixes nobody uses now) and free: the whole pool."""
        free, cached = self._pool.num_free, self._cache.num_unused
        return {"used": self._pool.num_blocks - free - cached, "cached": cached, "free": free}

    @property
    def num_promised(self) -> int:
        """Of the cached and free blocks, those set aside for admitted sequences."""
        return self._num_promised

    def cost(self, seq: Sequence, num_positions: int) -> int:
        """Blocks that admission would take out of the slack: blocks in use by others are shared at no cost."""
        shared = sum(1 for node in self._match(seq) if node.block.num_users)
        return num_blocks_for(num_positions) - shared

    def admit(self, seq: Sequence, num_positions: int) -> None:
        """Set aside blocks for so many positions; the caller has compared `cost` with `slack`."""
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
        """Lengthen the table to hold so many positions. False, with nothing changed, if the slack does not allow it."""
        missing = num_blocks_for(num_positions) - len(seq.blocks)
        if missing > seq.promised + self.slack:
            return False
        if missing > 0:
            self._spend_promise(seq, missing)
            for _ in range(missing - self._pool.num_free):
                self._cache.evict()
            seq.add_blocks(self._pool.allocate(missing))
        return True

    def publish(self, seq: Sequence, num_positions: int) -> None:
        """Index its full blocks below this position: their tokens are known, and issued steps write them.

        A block that the index has already, from another sequence, stays private; its twin is held in its place, so
        that what follows can be indexed too. If that would cost a block which is not there, indexing ends.
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
                seq.chain += self._cache.insert(place, keys[index:], blocks[index:])
                return
            if node.block.num_users or self.slack > 0:
                self._cache.hold(node)
            else:
                seq.indexing = False
                return
            seq.chain.append(node)
            place = node

    def prove(self, seq: Sequence) -> None:
        """It has a finite answer, so every block that it read is sound: a NaN in any would have shown (A-05)."""
        for depth in range(seq.num_proven, len(seq.chain)):
            node = seq.chain[depth]
            if node.block is seq.blocks[depth]:
                node.is_proven = True
        seq.num_proven = len(seq.chain)

    def distrust(self, seq: Sequence) -> None:
        """Its answer is not finite: what it read and nobody has proven is found no more, so that it is recomputed."""
        suspect = next((node for node in seq.chain if not node.is_proven), None)
        if suspect is not None:
            self._cache.unlink(suspect)

    def close(self, seq: Sequence) -> None:
        """Take back everything; every issued step that names the sequence is done."""
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
        return found

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
