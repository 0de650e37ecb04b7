"""One pool of ranks for each size, kept for all tests of this folder."""

from pathlib import Path

import pytest
from rank_pool import LAYOUTS, RankPool

_FOLDER = Path(__file__).parent
_pools: dict[int, RankPool] = {}


@pytest.fixture
def ranks():
    """`ranks(4)` is a pool of four ranks, two on each of two simulated nodes."""

    def pool(size: int) -> RankPool:
        if size not in _pools:
            _pools[size] = RankPool(LAYOUTS[size])
        return _pools[size]

    return pool


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the pools behind the folder's last test: idle, each gloo group of a rank still wakes up 100 times a second."""
    if nextitem is None or _FOLDER not in nextitem.path.parents:
        while _pools:
            _pools.popitem()[1].close()
