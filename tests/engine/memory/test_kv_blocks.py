"""Block ownership and the prefix cache."""

from array import array

from cflow.engine.memory.kv_blocks import BLOCK, BlockPool, block_key, n_blocks_for, root_key


def key(*numbers: int) -> bytes:
    parent = root_key(0)
    for number in numbers:
        parent = block_key(parent, array("i", [number] * BLOCK))
    return parent


def allocate(pool: BlockPool, n: int) -> list[int]:
    blocks = [pool.allocate() for _ in range(n)]
    assert None not in blocks
    return [block for block in blocks if block is not None]


def test_a_block_starts_every_32_positions() -> None:
    assert [n_blocks_for(n) for n in (0, 1, 32, 33, 64)] == [0, 1, 1, 2, 2]


def test_all_blocks_can_be_had_once() -> None:
    pool = BlockPool(3)
    assert sorted(allocate(pool, 3)) == [0, 1, 2]
    assert pool.allocate() is None
    assert (pool.n_free, pool.n_used) == (0, 3)


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(1)
    (block,) = allocate(pool, 1)
    pool.share(block)
    pool.release([block])
    assert pool.n_free == 0
    pool.release([block])
    assert pool.n_free == 1


def test_a_registered_block_is_found_after_its_owner_has_gone() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 2)
    pool.register(blocks[0], key(1))
    pool.register(blocks[1], key(1, 2))
    pool.release(blocks)
    assert pool.find([key(1), key(1, 2), key(1, 2, 3)]) == blocks
    assert pool.n_free == 2


def test_a_prefix_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 2)
    pool.register(blocks[1], key(1, 2))
    assert pool.find([key(1), key(1, 2)]) == []


def test_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 2)
    pool.register(blocks[0], key(1))
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    assert pool.allocate() == blocks[1]
    assert pool.find([key(1)]) == [blocks[0]]


def test_the_longest_unused_goes_first_and_ends_go_before_beginnings() -> None:
    pool = BlockPool(3)
    first, second, other = allocate(pool, 3)
    pool.register(first, key(1))
    pool.register(second, key(1, 2))
    pool.register(other, key(9))
    pool.release([first, second])
    pool.release([other])
    assert [pool.allocate() for _ in range(3)] == [second, first, other]
    assert pool.find([key(1)]) == []


def test_a_cached_block_in_use_is_not_evicted() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.register(first, key(1))
    pool.release([first, second])
    pool.share(first)
    assert pool.allocate() == second
    assert pool.allocate() is None


def test_a_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.register(first, key(1))
    pool.register(second, key(1))
    pool.release([second])
    assert pool.find([key(1)]) == [first]
    assert pool.allocate() == second


def test_keys_tell_content_order_and_expert_count_apart() -> None:
    tokens = array("i", range(BLOCK))
    keys = {key(1, 2), key(2, 1), key(2), block_key(root_key(1), tokens)}
    assert len(keys | {block_key(root_key(2), tokens)}) == 5
