"""The prefix index: a radix tree whose edges are full token blocks. Pure; owned by the engine loop.

An entry is found by (parent, the block's own tokens), under one root per salt (A-45, B-22): equal blocks in another
context or of another tenant never alias, and the tokens themselves are compared, never a hash alone (B-23).

Invariant: who uses a node's block uses those of all its ancestors, and gives them up from the deepest to the root. So
a child becomes unused no later than its parent, and the least recently used unused node is always a leaf.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.coordinator.engine.block_pool import Block, BlockPool
from lamina.coordinator.engine.window_pool import WindowBlock, WindowPool

TokenBlock = bytes  # BLOCK_TOKENS token ids, packed


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A full block in its context: everything from the root down to it."""

    parent: "Place"
    tokens: TokenBlock
    block: Block
    is_linked: bool  # False: never found again, and its block is free as soon as nobody uses it
    is_proven: bool  # somebody read the block and got a finite answer
    child: "PrefixNode | None"  # most have one at most, so a dict is only made for the `others`
    others: "dict[TokenBlock, PrefixNode] | None"
    window: WindowBlock | None = None  # the same positions in the windowed layers; it may be gone, or never have been

    @property
    def is_suspect(self) -> bool:
        """Whether anything of it may be what makes an answer not finite."""
        window = self.window
        return not (self.is_proven and (window is None or window.is_gone or window.is_proven))

    def take_children(self) -> "list[PrefixNode]":
        """Those it has, for the last time."""
        children = [] if self.child is None else [self.child]
        children += (self.others or {}).values()
        self.child = self.others = None
        return children


Place = PrefixNode | str  # a node, or the root of a salt


class PrefixCache:
    """Finds, adds, unlinks and evicts nodes; counts no tokens and knows no sequence."""

    def __init__(self, pool: BlockPool, windows: WindowPool | None = None) -> None:
        """`windows` is the pool of the windowed layers, if there are any."""
        self._pool = pool
        self._windows = windows
        self._roots: dict[str, dict[TokenBlock, PrefixNode]] = {}
        self._unused: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first

    @property
    def num_unused(self) -> int:
        """Blocks that are kept for later and may be evicted, all of them."""
        return len(self._unused)

    def find(self, parent: Place, tokens: TokenBlock) -> PrefixNode | None:
        """The child of `parent` that holds exactly these tokens."""
        if isinstance(parent, str):
            others = self._roots.get(parent)
        else:
            child, others = parent.child, parent.others
            if child is not None and child.tokens == tokens:
                return child
        return others.get(tokens) if others else None

    def insert(self, parent: Place, tokens: Sequence[TokenBlock], blocks: Sequence[Block]) -> list[PrefixNode]:
        """Index blocks that follow each other and that their writer, who uses `parent` too, has filled.

        They are sealed. `find` came back empty for the first.
        """
        is_linked = isinstance(parent, str) or parent.is_linked
        nodes: list[PrefixNode] = []
        seal, above = self._pool.seal, parent
        for key, block in zip(tokens, blocks, strict=True):
            seal(block)
            node = PrefixNode(above, key, block, is_linked, False, None, None)
            if nodes and is_linked:
                nodes[-1].child = node
            nodes.append(node)
            above = node
        if is_linked:
            self._link(nodes[0])
        return nodes

    def _link(self, node: PrefixNode) -> None:
        """Have a node found below its parent."""
        parent = node.parent
        if isinstance(parent, str):
            self._roots.setdefault(parent, {})[node.tokens] = node
        elif parent.child is None:
            parent.child = node
        else:
            parent.others = parent.others or {}
            parent.others[node.tokens] = node

    def hold(self, node: PrefixNode) -> None:
        """One more user; the caller uses the parent already."""
        self._pool.share(node.block)
        self._unused.pop(node, None)

    def replace(self, node: PrefixNode, block: Block) -> None:
        """Nobody uses the node: a block of the same content, which its writer has filled, takes the place of its own.

        The writer uses the parent, and from now on the node.
        """
        self._pool.evict(node.block)
        del self._unused[node]
        self._pool.seal(block)
        node.block, node.is_proven = block, False

    def leave(self, node: PrefixNode) -> None:
        """One user less; the caller has left all nodes below."""
        self._pool.release(node.block)
        if node.block.num_users:
            return
        if node.is_linked:
            self._unused[node] = None
        else:
            self._pool.evict(node.block)

    def unlink(self, node: PrefixNode) -> None:
        """Have nobody find the node again, nor what follows it; those who use it keep it. Twice is once."""
        if not node.is_linked:
            return
        self._drop(node)
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.take_children()
            node.is_linked = False
            self._unindex_window(node)
            if not node.block.num_users:
                del self._unused[node]
                self._pool.evict(node.block)

    def evict(self) -> None:
        """Drop the least recently used leaf, so that its block is free. Raises KeyError if every node is in use."""
        node, _ = self._unused.popitem(last=False)
        self._pool.evict(node.block)
        self._unindex_window(node)
        self._drop(node)

    def _unindex_window(self, node: PrefixNode) -> None:
        if self._windows is not None and node.window is not None:
            self._windows.unindex(node.window)
            node.window = None

    def _drop(self, node: PrefixNode) -> None:
        """Take a node out of its parent."""
        parent = node.parent
        if isinstance(parent, str):
            siblings = self._roots[parent]
            del siblings[node.tokens]
            if not siblings:
                del self._roots[parent]
        elif parent.child is node:
            parent.child = None
        elif parent.others is not None:
            del parent.others[node.tokens]
