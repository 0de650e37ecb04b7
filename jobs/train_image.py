"""Train a small convolutional network on handwritten digits. Copy this file to start your own job.

`toolkit run train_image` starts it on this host, `toolkit submit train_image` on a cluster. scikit-learn contains the
1,797 images of 8 x 8 pixels; a fifth of them is held out for validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.outline import Outline
from toolkit.train.arguments import read_arguments
from toolkit.train.data import MapSource, hold_out
from toolkit.train.held_out import HeldOut
from toolkit.train.trainer import Task, Trainer
from toolkit.world.facts import World

DIGITS = 10
OUTLINE = Outline(blocks="blocks", before=("pixels",), after=("norm", "head"))


@dataclass(frozen=True)
class Arguments:
    """The table `[args]` of this job."""

    blocks: Annotated[int, Field(ge=1)] = 3
    channels: Annotated[int, Field(ge=4, multiple_of=4)] = 32  # GroupNorm uses four groups
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.2  # fraction of the images for validation


class Block(nn.Module):
    """A norm and two convolutions, whose output is added to the residual stream."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.second(nn.functional.gelu(self.first(self.norm(stream))))


class Network(nn.Module):
    """Maps images (batch, 1, 8, 8) to logits of the digits (batch, 10)."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(1, args.channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(args.channels) for _ in range(args.blocks))
        self.norm = nn.GroupNorm(4, args.channels)
        self.head = nn.Linear(args.channels, DIGITS)

    def forward(self, stream: Tensor) -> Tensor:
        if self.pixels is not None:
            stream = self.pixels(stream)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream).mean((2, 3))) if self.head is not None else stream


def initialise(name: str, tensor: Tensor) -> None:
    if tensor.dim() > 1:
        nn.init.kaiming_normal_(tensor)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("norm.weight") else 0.0)


def measure(model: nn.Module, samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the validation loss and accuracy of each image."""
    images, digits = samples
    logits = model(images).float()
    return {
        "loss": nn.functional.cross_entropy(logits, digits, reduction="none"),
        "accuracy": (logits.argmax(1) == digits).double(),
    }


def read_digits() -> MapSource:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ToolkitError(
            "scikit-learn is not installed, but this job uses its images",
            where="train_image",
            fix="pip install 'toolkit[image]'",
        ) from None
    images, digits = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(images))  # shuffled, since validation uses the last ones
    pixels = torch.tensor(images[mixed], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return MapSource(TensorDataset(pixels, torch.tensor(digits[mixed])))


def main(world: World, config: ResolvedJob) -> None:
    """Train until `train.steps` or a stop request, and save the last step."""
    args = read_arguments(Arguments, config.args)
    images = read_digits()
    learned, held_out = hold_out(images, args.held_out)
    task = Task(
        build=lambda: Network(args),
        initialise=initialise,
        outline=OUTLINE,
        loss_of=nn.functional.cross_entropy,
        source=learned,
        data={"images": learned.count},
        held_out=HeldOut(held_out, measure) if held_out else None,
    )
    Trainer(world, config, task).train()
