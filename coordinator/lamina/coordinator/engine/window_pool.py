"""KV blocks of the layers that attend to a window: free, held by sequences, or kept as cache entries. Pure.

All windowed cache groups are one pool here: an id means a block in each of them. Owned by the engine loop.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.spec.ids import BlockId


@dataclass(slots=True, eq=False)
class WindowBlock:
    """BLOCK_TOKENS positions of KV in every windowed layer. Whoever still refers to it once it `is_gone` forgets it."""

    id: BlockId
    num_users: int = 1  # sequences that hold it
    is_indexed: bool = False  # found through the prefix index, so full and written no more
    is_proven: bool = False  # somebody read the block and got a finite answer
    is_gone: bool = False  # its id is free, or another block's


class WindowPool:
    """Free ids, and the indexed blocks that nobody holds, least recently used first to go."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._unused: OrderedDict[WindowBlock, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Ids that are no block's."""
        return len(self._free)

    @property
    def num_unused(self) -> int:
        """Blocks that are kept for later and may be evicted, all of them."""
        return len(self._unused)

    def take(self, count: int) -> list[WindowBlock]:
        """So many blocks with one holder each; the caller knows that they are free or unused."""
        for _ in range(count - len(self._free)):
            self._give_back(self._unused.popitem(last=False)[0])
        return [WindowBlock(self._free.pop()) for _ in range(count)]

    def hold(self, block: WindowBlock) -> None:
        """One more holder of an indexed block."""
        block.num_users += 1
        self._unused.pop(block, None)

    def leave(self, blocks: Iterable[WindowBlock]) -> None:
        """One holder less of each."""
        for block in blocks:
            block.num_users -= 1
            if block.num_users:
                continue
            if block.is_indexed:
                self._unused[block] = None
            else:
                self._give_back(block)

    def unindex(self, block: WindowBlock) -> None:
        """Nobody will find the block again; those who hold it keep it. One that is gone is fine."""
        if block.is_indexed and not block.is_gone:
            block.is_indexed = False
            if not block.num_users:
                del self._unused[block]
                self._give_back(block)

    def _give_back(self, block: WindowBlock) -> None:
        block.is_gone = True
        self._free.append(block.id)
