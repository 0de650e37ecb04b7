"""Split a sequence of blocks into pipeline stages so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a model, in any unit: the modules before the blocks, each block, the modules after them."""

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
    """Return the blocks of each stage, consecutive and at least one, so that the largest stage cost is minimal.

    Of equal cuts, the one with the longest last stages is chosen. Exact dynamic programming, O(stages x blocks^2).

    Raises:
        ToolkitError: there are fewer blocks than stages.
    """
    count = len(costs.blocks)
    if count < stages:
        raise ToolkitError(
            f"expected at least {stages} blocks for {stages} pipeline stages, got {count}",
            where="parallel.pp",
            fix=f"set pp x stages_per_rank to {count} at most, or use a model with more blocks",
        )
    until = [0.0, *accumulate(costs.blocks)]

    def of_stage(number: int, start: int, stop: int) -> float:
        ends = (costs.before if number == 0 else 0.0) + (costs.after if number == stages - 1 else 0.0)
        return until[stop] - until[start] + ends

    worst = [[0.0, *[inf] * count]]  # [stages assigned][blocks assigned]: the largest cost of these stages
    begun: list[list[int]] = []  # [stage][blocks assigned up to its end]: its first block
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
