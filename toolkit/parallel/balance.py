"""Deals a row of blocks to pipeline stages so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Costs:
    """What the parts of a model cost, in a unit of the caller's: before the blocks, each block, and after them."""

    before: float
    blocks: tuple[float, ...]
    after: float

    def of_stages(self, cut: Sequence[range]) -> list[float]:
        """The cost of each stage of a cut."""
        costs = [sum(self.blocks[blocks.start : blocks.stop]) for blocks in cut]
        costs[0] += self.before
        costs[-1] += self.after
        return costs


def cut_evenly(costs: Costs, stages: int) -> tuple[range, ...]:
    """The blocks of each stage: neighbours, one at least, and the costliest stage as cheap as any cut has it.

    Of equally good cuts it is the one whose last stages are the longest. Exact, by dynamic programming over the
    costliest stage of the first blocks: O(stages x blocks^2).

    Raises:
        ToolkitError: there are fewer blocks than stages.
    """
    count = len(costs.blocks)
    if count < stages:
        raise ToolkitError(
            f"{stages} pipeline stages need {stages} blocks, and the model has {count}",
            where="parallel.pp",
            fix=f"pp x stages_per_rank = {count} at most, or a model of more blocks",
        )
    until = [0.0, *accumulate(costs.blocks)]

    def of_stage(number: int, start: int, stop: int) -> float:
        ends = (costs.before if number == 0 else 0.0) + (costs.after if number == stages - 1 else 0.0)
        return until[stop] - until[start] + ends

    worst = [[0.0, *[inf] * count]]  # [stages dealt][blocks dealt]: cost of the costliest of these stages
    begun: list[list[int]] = []  # where the last of these stages begins
    for number in range(stages):
        row, starts = [inf] * (count + 1), [0] * (count + 1)
        for stop in range(number + 1, count + 1):
            choices = ((max(worst[-1][start], of_stage(number, start, stop)), start) for start in range(number, stop))
            row[stop], starts[stop] = min(choices)
        worst.append(row)
        begun.append(starts)
    ends = [count]
    for starts in reversed(begun):
        ends.append(starts[ends[-1]])
    return tuple(range(start, stop) for start, stop in pairwise(reversed(ends)))
