"""One pool of ranks for each size, kept for all tests of this folder."""

import pytest
from rank_pool import LAYOUTS, RankPool


@pytest.fixture(scope="session")
def ranks():
    """`ranks(4)` is a pool of four ranks, two on each of two simulated nodes."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(LAYOUTS[size])
        return pools[size]

    yield pool
    for one in pools.values():
        one.close()
