"""Logical KV blocks: which are free, and what may be done with those that are not. Pure; owned by the engine loop.

A block is one id in every cache group that keeps all positions. The states are explicit and only PENDING_WRITE is
mutable (A-44):

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
    """BLOCK_TOKENS positions of KV, and how many sequences have it in their table."""

    id: BlockId
    state: BlockState
    num_users: int


class BlockPool:
    """The free ids and the states of what was taken from them; every operation is O(1) for a block."""

    def __init__(self, num_blocks: int) -> None:
        """Raises InvalidConfig if there is none."""
        if num_blocks < 1:
            raise InvalidConfig(f"the pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]

    @property
    def num_free(self) -> int:
        """Blocks that may be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[Block]:
        """So many blocks with one user each, their writer. Raises CapacityExceeded, taking none, if fewer are free."""
        if count > self.num_free:
            raise CapacityExceeded(f"{self.num_free} of {self.num_blocks} KV blocks are free, {count} are wanted")
        pending, free = BlockState.PENDING_WRITE, self._free
        blocks = [Block(id_, pending, 1) for id_ in free[: -count - 1 : -1]]
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
        self._free.append(block.id)


def _refusal(block: Block, action: str) -> RuntimeError:
    return RuntimeError(f"cannot {action} KV block {block.id}: it is {block.state.value}")
