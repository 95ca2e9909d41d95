"""Block states and conservation."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.coordinator.engine.block_pool import Block, BlockPool, BlockState
from lamina.spec.errors import CapacityExceeded, InvalidConfig

ACTIONS: dict[str, Callable[[BlockPool, Block], None]] = {
    "seal": BlockPool.seal,
    "share": BlockPool.share,
    "release": BlockPool.release,
    "free": BlockPool.free,
    "evict": BlockPool.evict,
}
LEGAL = {
    BlockState.UNALLOCATED: set(),
    BlockState.PENDING_WRITE: {"seal", "free"},
    BlockState.WRITTEN_IN_USE: {"share", "release"},
    BlockState.WRITTEN_NOT_IN_USE: {"share", "evict"},
}


def block_in(pool: BlockPool, state: BlockState) -> Block:
    """A block brought into a state by legal transitions."""
    block = pool.allocate(1)[0]
    path = {
        BlockState.UNALLOCATED: ["free"],
        BlockState.PENDING_WRITE: [],
        BlockState.WRITTEN_IN_USE: ["seal"],
        BlockState.WRITTEN_NOT_IN_USE: ["seal", "release"],
    }
    for action in path[state]:
        ACTIONS[action](pool, block)
    assert block.state is state
    return block


@pytest.mark.parametrize("state", BlockState)
@pytest.mark.parametrize("action", ACTIONS)
def test_only_legal_transitions_are_possible(state: BlockState, action: str) -> None:
    """A-44: every other (state, action) raises and changes nothing; B-11: a double free is one of them."""
    pool = BlockPool(4)
    block = block_in(pool, state)
    num_free = pool.num_free
    if action in LEGAL[state]:
        ACTIONS[action](pool, block)
        assert (block.state, block.num_users) != (state, 0) or action == "share"
        return
    with pytest.raises(RuntimeError, match=f"cannot {action} KV block"):
        ACTIONS[action](pool, block)
    assert (block.state, pool.num_free) == (state, num_free)


def test_sealed_block_lives_while_it_has_users_and_longer() -> None:
    """The last user's release keeps the content; sharing brings it back into use; eviction frees the id."""
    pool = BlockPool(1)
    block = pool.allocate(1)[0]
    pool.seal(block)
    pool.share(block)
    pool.release(block)
    assert block.state is BlockState.WRITTEN_IN_USE
    pool.release(block)
    assert block.state is BlockState.WRITTEN_NOT_IN_USE
    pool.share(block)
    assert (block.state, block.num_users) == (BlockState.WRITTEN_IN_USE, 1)
    pool.release(block)
    pool.evict(block)
    assert pool.allocate(1)[0].id == block.id


def test_no_id_is_given_twice() -> None:
    """And none once all are."""
    pool = BlockPool(3)
    assert len({pool.allocate(1)[0].id for _ in range(3)}) == 3
    with pytest.raises(CapacityExceeded, match="0 of 3 KV blocks are free"):
        pool.allocate(1)


def test_several_blocks_at_once_are_all_or_none() -> None:
    """The same ids in the same order as one by one; what does not fit takes nothing."""
    pool, singly = BlockPool(4), BlockPool(4)
    assert [block.id for block in pool.allocate(3)] == [singly.allocate(1)[0].id for _ in range(3)]
    assert pool.allocate(0) == []
    with pytest.raises(CapacityExceeded, match="1 of 4 KV blocks are free, 2 are wanted"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(1)[0].id == singly.allocate(1)[0].id


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(InvalidConfig):
        BlockPool(0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["allocate", *ACTIONS]), st.integers(0, 9)), max_size=80))
def test_ids_are_conserved(actions: list[tuple[str, int]]) -> None:
    """B-11: after any actions, legal or refused, every id is free or in exactly one block."""
    pool = BlockPool(6)
    blocks: list[Block] = []
    for action, pick in actions:
        if action == "allocate":
            if pool.num_free:
                blocks.append(pool.allocate(1)[0])
        elif blocks:
            block = blocks[pick % len(blocks)]
            if action in LEGAL[block.state]:
                ACTIONS[action](pool, block)
        held = [block.id for block in blocks if block.state is not BlockState.UNALLOCATED]
        assert len(held) == len(set(held)) == 6 - pool.num_free
