"""Windows of simulated ranks, for tests of the detectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.metrics.blocks import StepBlock
from toolkit.metrics.windows import STEP, WORK, Statistics, Window

NOW_S = 1_800_000_000.0
STEP_S = 0.2
STEPS = 50


def same(value: float) -> Statistics:
    return Statistics(value, value, value, value, value)


def window(rank: int, number: int = 0, *, host: str = "", steps: int = STEPS, **metrics: float | Statistics) -> Window:
    """The window of slot `number`, in which a rank did `steps` steps; each node has four ranks."""
    usual: dict[str, float | Statistics] = {STEP: STEP_S, WORK: 0.9 * STEP_S}
    values = {
        name: value if isinstance(value, Statistics) else same(value) for name, value in (usual | metrics).items()
    }
    return Window(
        rank, host or f"n{rank // 4}", NOW_S + 10 * number, 10, steps * number + 1, steps * (number + 1), steps, values
    )


def block(
    number: int,
    ranks: int | Sequence[int],
    changes: Mapping[int, Mapping[str, float]] | None = None,
    **metrics: float | Statistics,
) -> StepBlock:
    """A block of ranks that differ by `changes` per rank, and a little otherwise, as real ranks do."""
    windows = []
    for rank in range(ranks) if isinstance(ranks, int) else ranks:
        varied = {WORK: 0.9 * STEP_S * (1 + 0.005 * ((7 * rank + 3 * number) % 5 - 2))}
        windows.append(window(rank, number, **{**varied, **metrics, **(changes or {}).get(rank, {})}))
    return StepBlock(tuple(windows))
