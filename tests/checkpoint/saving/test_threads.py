"""How many threads a rank saves and loads with: as many as it has CPUs that no other rank needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_ranks import run_ranks

from toolkit.checkpoint.saving.prepared import threads_for
from toolkit.comm.agreement import Ranks
from toolkit.world.facts import World

ALL = frozenset(range(6))
# What is given to each of four ranks, and the threads that each of them takes.
GIVEN = {
    "all have all": ([ALL] * 4, [1, 1, 1, 1]),
    "two share what taskset left": ([frozenset({0, 1, 2, 3})] * 2 + [frozenset({8}), frozenset({9, 10})], [2, 2, 1, 2]),
    "each has its own": ([frozenset({3 * rank, 3 * rank + 1, 3 * rank + 2}) for rank in range(4)], [3, 3, 3, 3]),
}


def threads(_folder: Path, world: World) -> dict[str, int]:
    found = {}
    for given, (masks, _) in GIVEN.items():
        with pytest.MonkeyPatch.context() as patch:  # this machine may have fewer CPUs
            patch.setattr(os, "sched_getaffinity", lambda _pid, masks=masks: set(masks[world.rank]))
            found[given] = threads_for(Ranks(world))
    return found


def test_ranks_divide_the_cpus_that_they_share(tmp_path: Path) -> None:
    of_ranks = run_ranks(4, threads, tmp_path)
    assert {given: [found[given] for found in of_ranks] for given in GIVEN} == {
        given: wanted for given, (_, wanted) in GIVEN.items()
    }
