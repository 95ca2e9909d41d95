"""Logical KV blocks: which are free, and what may be done with those that are not. Pure; owned by the engine loop.

A block is one BlockId in every cache group, so a sequence's table is equally long in each. The states are explicit and
only PENDING_WRITE is mutable (A-44):

    UNALLOCATED --allocate--> PENDING_WRITE --seal--> WRITTEN_IN_USE <--share / release--> WRITTEN_NOT_IN_USE
         ^                        |  one user, the writer                                         |
         +--------- free ---------+---------------------------- evict ----------------------------+

It knows nothing of sequences, of tokens, or of who may be evicted.
"""

from dataclasses import dataclass
from enum import Enum

from lamina.spec.errors import CapacityExceeded, InvalidConfig
from lamina.spec.ids import BlockId


class BlockState(Enum):
    """Where a block is in its life."""

    UNALLOCATED = "unallocated"
    PENDING_WRITE = "pending write"
    WRITTEN_IN_USE = "written, in use"
    WRITTEN_NOT_IN_USE = "written, not in use"


@dataclass(slots=True, eq=False)
class Block:
    """BLOCK_TOKENS positions of KV: its id in each cache group, and how many sequences have it in their table."""

    ids: tuple[BlockId, ...]
    state: BlockState
    num_users: int


class BlockPool:
    """Free lists and the states of what was taken from them; every operation is O(groups) for a block."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        """`num_blocks` by cache group. Raises InvalidConfig if a group has none."""
        if not num_blocks or min(num_blocks) < 1:
            raise InvalidConfig(f"every cache group needs at least one block, got {num_blocks}")
        self.num_blocks = min(num_blocks)
        # An id of each group, always the same: those of a larger group that are left over are never used.
        self._free = [(BlockId(i),) * len(num_blocks) for i in reversed(range(self.num_blocks))]

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[Block]:
        """So many blocks with one user each, their writer. Raises CapacityExceeded, taking none, if fewer are free."""
        if count > self.num_free:
            raise CapacityExceeded(f"{self.num_free} of {self.num_blocks} KV blocks are free, {count} are wanted")
        pending, free = BlockState.PENDING_WRITE, self._free
        blocks = [Block(ids, pending, 1) for ids in free[: -count - 1 : -1]]
        del free[len(free) - count :]
        return blocks

    def seal(self, block: Block) -> None:
        """The block is full: nobody writes it any more, others may read it."""
        if block.state is not BlockState.PENDING_WRITE:
            raise _refusal(block, "seal")
        block.state = BlockState.WRITTEN_IN_USE

    def share(self, block: Block) -> None:
        """One more user of a sealed block."""
        if block.state not in (BlockState.WRITTEN_IN_USE, BlockState.WRITTEN_NOT_IN_USE):
            raise _refusal(block, "share")
        block.state = BlockState.WRITTEN_IN_USE
        block.num_users += 1

    def release(self, block: Block) -> None:
        """One user less of a sealed block; its content stays until it is evicted."""
        if block.state is not BlockState.WRITTEN_IN_USE:
            raise _refusal(block, "release")
        block.num_users -= 1
        if not block.num_users:
            block.state = BlockState.WRITTEN_NOT_IN_USE

    def free(self, block: Block) -> None:
        """The writer gives up a block that was never sealed."""
        if block.state is not BlockState.PENDING_WRITE:
            raise _refusal(block, "free")
        self._take_back(block)

    def evict(self, block: Block) -> None:
        """Forget the content of a sealed block without users."""
        if block.state is not BlockState.WRITTEN_NOT_IN_USE:
            raise _refusal(block, "evict")
        self._take_back(block)

    def _take_back(self, block: Block) -> None:
        block.state = BlockState.UNALLOCATED
        block.num_users = 0
        self._free.append(block.ids)


def _refusal(block: Block, action: str) -> RuntimeError:
    return RuntimeError(f"cannot {action} KV block {block.ids}: it is {block.state.value}")
