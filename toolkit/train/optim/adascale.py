"""AdaScale: the gain of a larger batch, measured from the variance of its micro-batch gradients.

Johnson, Agrawal, Gu and Guestrin, AdaScale SGD: A User-Friendly Algorithm for Distributed Training, ICML 2020, arXiv
2007.05105. It applies to SGD. The run ends when `progress`, not the number of steps, reaches its limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.train.schedule import Schedule

_SMALLEST_VARIANCE = 1e-6  # with this minimum, a gain of 0/0 is 1, as in the paper's appendix B


def gain_of(variance: float, square: float, scale: float) -> float:
    """Return the gain r in [1, scale]: the paper's equation for r_t, with `scale` for S.

    Args:
        variance: trace of the covariance of a gradient of the reference batch.
        square: squared norm of the true gradient.
        scale: the batch as a multiple of the reference batch, 1 or more.
    """
    return (variance + square) / (variance / scale + square)


def check_parts(batch: int, micro_batch: int, ranks: int) -> None:
    """Check, before training starts, that AdaScale can compare the micro-batches.

    Args:
        batch: samples per step over all ranks.
        micro_batch: samples per forward pass; 0 means all samples of the rank.
        ranks: the number of ranks with different samples.

    Raises:
        ToolkitError: the micro-batches have several sizes, or there is only one.
    """
    if batch % ranks:
        raise ToolkitError(
            f"AdaScale requires equal micro-batches, but a batch of {batch} is not divisible by {ranks} ranks",
            where="train.batch",
            fix=f"set batch = {batch // ranks * ranks or ranks} or {(batch // ranks + 1) * ranks}",
        )
    share = batch // ranks
    length = micro_batch or share
    if share % length:
        fitting = max(size for size in range(1, min(length, share) + 1) if share % size == 0)
        raise ToolkitError(
            f"AdaScale requires equal micro-batches, but {share} samples per rank are not divisible by {length}",
            where="train.micro_batch",
            fix=f"set micro_batch = {fitting}",
        )
    if ranks * (share // length) < 2:
        raise _one_part()


def _one_part() -> ToolkitError:
    return ToolkitError(
        "AdaScale requires two or more micro-batches per step, got one",
        where="train.lr_scaling",
        fix="use two or more ranks, or a train.micro_batch of at most half of train.batch",
    )


def moments_of(part_squares: float, mean_square: float, parts: int, scale: float) -> tuple[float, float]:
    """Return the unbiased variance of a gradient of the reference batch, and the true gradient's squared norm.

    Args:
        part_squares: mean of the squared gradient norms of the parts, which are equal micro-batches of all ranks.
        mean_square: squared norm of the mean of these gradients.
        parts: the number of parts, 2 or more.
        scale: the batch as a multiple of the reference batch; if it equals `parts`, these are the paper's estimates.

    Raises:
        ToolkitError: there is only one part, which has no variance.
    """
    if parts < 2:
        raise _one_part()
    of_the_mean = (part_squares - mean_square) / (parts - 1)  # variance of the gradient of the whole batch
    return scale * of_the_mean, mean_square - of_the_mean


@dataclass
class AdaScale:
    """A learning-rate schedule in steps of the reference batch; each step advances it by its gain.

    Call `observe` after the backward passes of a step, then `rate`, the update, and `advance`.
    """

    schedule: Schedule
    scale: float
    progress: float = 0.0
    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0  # weight of the observations in the moving averages

    def __post_init__(self) -> None:
        if self.scale < 1:
            raise ToolkitError(
                f"AdaScale requires a batch of at least the reference batch, got {self.scale:g} times that batch",
                where="train.lr_reference_batch",
                fix="set train.lr_reference_batch to train.batch or less",
            )

    def observe(self, part_squares: float, mean_square: float, parts: int) -> None:
        """Record the gradient norms of a step (see `moments_of`); all ranks must pass the same numbers.

        The moving averages decay as in the paper: by 1 - S/1000 per step, with `scale` for S.
        """
        variance, square = moments_of(part_squares, mean_square, parts, self.scale)
        keep = max(0.0, 1.0 - self.scale / 1000.0)
        self.variance = keep * self.variance + (1.0 - keep) * variance
        self.square = keep * self.square + (1.0 - keep) * square
        self.weight = keep * self.weight + (1.0 - keep)

    def gain(self) -> float:
        """Return how many steps of the reference batch the next step is worth; 1 before the first observation."""
        if not self.weight:
            return 1.0
        variance = max(_SMALLEST_VARIANCE, self.variance / self.weight)
        return gain_of(variance, max(0.0, self.square / self.weight), self.scale)

    def rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return self.gain() * self.schedule.rate_at(int(self.progress))

    @property
    def finished(self) -> bool:
        """True if `progress` has reached `schedule.steps` steps of the reference batch."""
        return self.progress >= self.schedule.steps

    def advance(self) -> None:
        self.progress += self.gain()
        self.schedule.advance()

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("progress", "variance", "square", "weight")}
        return self.schedule.state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state)
        self.progress, self.variance = state["progress"], state["variance"]
        self.square, self.weight = state["square"], state["weight"]


class PartGradients:
    """Records the squared gradient norms of single micro-batches during backward passes.

    Unsharded models only. Call `begin` before the backward pass of each micro-batch, `mean_square` after the last one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._squares: list[Tensor] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._add)

    def begin(self) -> None:
        """Start the next micro-batch."""
        self._squares.append(torch.zeros((), dtype=torch.float64))

    def _add(self, gradient: Tensor) -> None:
        if self._squares:
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            self._squares[-1] = self._squares[-1].to(square.device) + square

    def mean_square(self, share: float, group: dist.ProcessGroup | None = None) -> tuple[float, int]:
        """Return the mean of the squared norms over the micro-batches of all ranks, and their number. Collective.

        Args:
            share: the factor by which the loss of a micro-batch was multiplied before its backward pass.
        """
        mean, parts = mean_over(self._squares, group)
        self.forget()
        return mean / share**2, parts

    def forget(self) -> None:
        self._squares = []


def mean_over(squares: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> tuple[float, int]:
    """Return the mean of the squared norms of all parts in the group, and their number.

    Collective if the process group exists; all ranks get bitwise the same result.
    """
    sums = torch.stack([torch.stack(list(squares)).sum(), torch.tensor(len(squares), device=squares[0].device)])
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
    total, count = sums.tolist()
    return total / count, int(count)
