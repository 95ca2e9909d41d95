"""The prefix index alone: context, tenants, collisions, order of eviction."""

import pytest

from lamina.coordinator.engine.block_pool import BlockPool, BlockState
from lamina.coordinator.engine.prefix_cache import Place, PrefixCache, PrefixNode, TokenBlock
from lamina.spec.step import pack_ids

A: TokenBlock = pack_ids(range(16))
B: TokenBlock = pack_ids(range(16, 32))
C: TokenBlock = pack_ids(range(32, 48))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool)


def insert(cache: PrefixCache, pool: BlockPool, place: Place, tokens: TokenBlock) -> PrefixNode:
    """A new node with one user."""
    assert cache.find(place, tokens) is None
    return cache.insert(place, [tokens], pool.allocate(1))[0]


def test_equal_blocks_in_other_contexts_never_alias(cache: PrefixCache, pool: BlockPool) -> None:
    """A-45: the same 16 tokens after another parent are another node with another block."""
    a, b = insert(cache, pool, "", A), insert(cache, pool, "", B)
    after_a, after_b = insert(cache, pool, a, C), insert(cache, pool, b, C)
    assert cache.find("", C) is None
    assert cache.find(a, C) is after_a
    assert cache.find(b, C) is after_b
    assert after_a.block.id != after_b.block.id


def test_another_root_has_no_hit(cache: PrefixCache, pool: BlockPool) -> None:
    """B-22: the same tokens under another salt are not found."""
    insert(cache, pool, "tenant-1", A)
    assert cache.find("tenant-2", A) is None
    assert cache.find("", A) is None


def test_colliding_hashes_are_told_apart_by_the_tokens(cache: PrefixCache, pool: BlockPool) -> None:
    """B-23: -1 and -2 have one hash in CPython, and so have tuples that differ in them only."""
    first, second = (-1, *A[1:]), (-2, *A[1:])
    assert hash(first) == hash(second)
    node = insert(cache, pool, "", first)
    assert cache.find("", second) is None
    other = insert(cache, pool, "", second)
    assert cache.find("", first) is node
    assert cache.find("", second) is other


def test_eviction_takes_the_least_recently_used_leaf(cache: PrefixCache, pool: BlockPool) -> None:
    """Two chains, the older one used again: the younger one goes first, from its leaf up."""
    a = insert(cache, pool, "", A)
    a_b = insert(cache, pool, a, B)
    c = insert(cache, pool, "", C)
    c_b = insert(cache, pool, c, B)
    for node in (a_b, a, c_b, c):
        cache.leave(node)
    cache.hold(a)
    cache.hold(a_b)
    assert cache.num_unused == 2
    cache.leave(a_b)
    cache.leave(a)
    evicted = []
    for _ in range(4):
        cache.evict()
        evicted.append([node for node in (a, a_b, c, c_b) if node.block.state is BlockState.UNALLOCATED])
    assert [nodes[-1] for nodes in evicted[:1]] == [c_b]
    assert evicted[1] == [c, c_b]
    assert evicted[2] == [a_b, c, c_b]
    assert evicted[3] == [a, a_b, c, c_b]
    assert pool.num_free == pool.num_blocks
    assert cache.find("", A) is cache.find("", C) is None


def test_nodes_in_use_are_never_evicted(cache: PrefixCache, pool: BlockPool) -> None:
    """With a user on every node there is nothing to evict; a shared one goes with its last user only."""
    a = insert(cache, pool, "", A)
    cache.hold(a)
    cache.leave(a)
    with pytest.raises(KeyError):
        cache.evict()
    cache.leave(a)
    cache.evict()
    assert cache.find("", A) is None


def test_roots_of_tenants_that_left_are_forgotten(cache: PrefixCache, pool: BlockPool) -> None:
    """Salts come from requests: what is kept of them must not grow."""
    for i in range(100):
        cache.leave(insert(cache, pool, f"tenant-{i}", A))
        cache.evict()
    assert not cache._roots


def test_an_unlinked_node_is_found_no_more_and_freed_by_its_last_user(cache: PrefixCache, pool: BlockPool) -> None:
    """Its subtree goes with it; what its users add below is nobody else's."""
    a = insert(cache, pool, "", A)
    b = insert(cache, pool, a, B)
    unused = insert(cache, pool, b, C)
    cache.leave(unused)
    free = pool.num_free
    cache.unlink(b)
    cache.unlink(b)
    assert (pool.num_free, cache.num_unused) == (free + 1, 0)
    assert cache.find("", A) is a
    assert cache.find(a, B) is None
    own = insert(cache, pool, b, C)
    assert cache.find(b, C) is None
    again = insert(cache, pool, a, B)
    for node in (own, b, again, a):
        cache.leave(node)
    assert (pool.num_free, cache.num_unused) == (free + 1, 2)
    assert cache.find(a, B) is again


def test_a_run_of_blocks_is_found_one_below_the_other(cache: PrefixCache, pool: BlockPool) -> None:
    """Also where the parent has other children; below a node that is unlinked nothing is found."""
    root = insert(cache, pool, "", A)
    insert(cache, pool, root, A)
    first, second = cache.insert(root, [B, C], pool.allocate(2))
    assert cache.find(root, B) is first
    assert cache.find(first, C) is second
    cache.unlink(root)
    below = cache.insert(second, [A, B], pool.allocate(2))
    assert not any(node.is_linked for node in (first, second, *below))
    assert cache.find(root, B) is cache.find(second, A) is cache.find(below[0], B) is None


def test_siblings_are_evicted_one_by_one(cache: PrefixCache, pool: BlockPool) -> None:
    """Whichever goes first, the others are found as before, and a place that is free is taken again."""
    root = insert(cache, pool, "", A)
    nodes = {tokens: insert(cache, pool, root, tokens) for tokens in (A, B, C)}
    for gone in (A, C):
        cache.leave(nodes[gone])
        cache.evict()
        assert cache.find(root, gone) is None
        assert cache.find(root, B) is nodes[B]
    again = insert(cache, pool, root, C)
    assert cache.find(root, C) is again
    assert cache.find(root, B) is nodes[B]


def test_a_block_that_nobody_uses_is_replaced(cache: PrefixCache, pool: BlockPool) -> None:
    """By another of the same content: the old one is free, what is below stays, and the new one is yet to be proven."""
    root = insert(cache, pool, "", A)
    below = insert(cache, pool, root, B)
    root.is_proven = True
    cache.leave(below)
    cache.leave(root)
    (block,) = pool.allocate(1)
    free = pool.num_free
    cache.replace(root, block)
    assert (pool.num_free, cache.num_unused) == (free + 1, 1)
    assert (root.block, root.is_proven) == (block, False)
    assert cache.find("", A) is root
    assert cache.find(root, B) is below
    cache.leave(root)
    assert cache.num_unused == 2
