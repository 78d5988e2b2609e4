"""The invariants of a block pool."""

from verbatim.kv.blocks import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Assert that each block is free, cached or used, and that the index holds no free block."""
    free, cached = set(pool._free), set(pool._cached)
    used = {block for block, count in enumerate(pool._ref_counts) if count}
    assert len(free) == len(pool._free)
    assert not (free & cached or free & used or cached & used)
    assert free | cached | used == set(range(1, pool.num_blocks))
    assert {key: block for block, key in pool._keys.items()} == pool._by_key
    assert cached <= set(pool._keys) and not free & set(pool._keys)
