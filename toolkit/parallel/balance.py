"""Split a row of blocks into pipeline stages that minimize the slowest stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Costs:
    """Costs of a model's parts, in any unit: before the blocks, each block, and after them."""

    before: float
    blocks: tuple[float, ...]
    after: float

    def of_stages(self, cut: Sequence[range]) -> list[float]:
        """Return the cost of each stage of a cut."""
        costs = [sum(self.blocks[blocks.start : blocks.stop]) for blocks in cut]
        costs[0] += self.before
        costs[-1] += self.after
        return costs


def cut_evenly(costs: Costs, stages: int) -> tuple[range, ...]:
    """Return the number of consecutive blocks of each stage, at least one, that minimizes the largest cost.

    Ties go to the cut with the longest last stages. Exact, by dynamic programming: O(stages x blocks^2).

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

    worst = [[0.0, *[inf] * count]]  # [stages assigned][blocks assigned]: the largest cost of these stages
    begun: list[list[int]] = []  # where the last of these stages starts
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
