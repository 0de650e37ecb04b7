"""Train a small GPT on text, byte by byte. Copy this file to start your own job.

`toolkit run train_lm` starts it on this host, `toolkit submit train_lm` on a cluster. By default it reads the sources
of Python's standard library; `[data] paths` selects your own text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.parallel.context.attention import Attention, Positions
from toolkit.parallel.outline import Outline
from toolkit.train.arguments import DividedBy, read_arguments
from toolkit.train.data import TokenSource, hold_out
from toolkit.train.data.text import Windows, check_same_text, named_files, read_bytes, standard_library_sources
from toolkit.train.data.token_file import read_header
from toolkit.train.held_out import HeldOut
from toolkit.train.trainer import Task, Trainer
from toolkit.world.facts import World

BYTES = 256  # the vocabulary of text: every byte is a token

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Arguments:
    """The table `[args]` of this job."""

    layers: Count = 4
    width: Annotated[Count, DividedBy("args.heads")] = 128
    heads: Annotated[Count, DividedBy("parallel.tp")] = 4
    context: Annotated[Count, DividedBy("parallel.tp"), DividedBy("parallel.cp", times=2)] = 128
    dropout: Share = 0.1
    tied: bool = True  # the head reuses the embedding's weights
    max_bytes: Count = 4_000_000  # bytes of text to read
    held_out: Share = 0.0  # fraction of the text, at its end, for validation


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron, whose outputs are added to the residual stream."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.heads = args.heads
        self.head_width = args.width // args.heads
        self.dropout = args.dropout
        self.attention_norm = nn.LayerNorm(args.width)
        self.query_key_value = nn.Linear(args.width, 3 * args.width, bias=False)
        self.attend = Attention()
        self.attention_out = nn.Linear(args.width, args.width, bias=False)
        self.perceptron_norm = nn.LayerNorm(args.width)
        self.perceptron_in = nn.Linear(args.width, 4 * args.width)
        self.perceptron_out = nn.Linear(4 * args.width, args.width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._drop(self._attention(self.attention_norm(stream)))
        hidden = nn.functional.gelu(self.perceptron_in(self.perceptron_norm(stream)))
        return stream + self._drop(self.perceptron_out(hidden))

    def _attention(self, stream: Tensor) -> Tensor:
        # Heads are the outer dimension, so that each tensor-parallel rank gets whole heads.
        by_head = self.query_key_value(stream).unflatten(2, (-1, 3, self.head_width))
        query, key, value = by_head.permute(3, 0, 2, 1, 4)  # each (batch, heads, context, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = self.attend(query, key, value, dropout=dropout)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def _drop(self, stream: Tensor) -> Tensor:
        return nn.functional.dropout(stream, self.dropout, self.training)


class GPT(nn.Module):
    """Maps tokens (batch, context) to logits of each next token (batch, context, vocabulary)."""

    def __init__(self, args: Arguments, vocabulary: int = BYTES, block: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        self.dropout = args.dropout
        self.token_embedding = nn.Embedding(vocabulary, args.width)
        self.positions = Positions()
        self.place_embedding = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, vocabulary, bias=False)
        if args.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        stream = self._embedded(text) if self.token_embedding is not None else text
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream)) if self.head is not None else stream

    def _embedded(self, text: Tensor) -> Tensor:
        stream = self.token_embedding(text) + self.place_embedding(self.positions(text))
        return nn.functional.dropout(stream, self.dropout, self.training)


# A pipeline stage receives the stream of the previous stage. Modules of other stages are None.
OUTLINE = Outline(
    blocks="blocks",
    before=("token_embedding", "place_embedding"),
    after=("norm", "head"),
    tensor={
        "token_embedding": "embedding",
        "place_embedding": "embedding",
        "blocks.*.attention_norm": "norm",
        "blocks.*.query_key_value": "column by heads",
        "blocks.*.attention_out": "row",
        "blocks.*.perceptron_norm": "norm",
        "blocks.*.perceptron_in": "column",
        "blocks.*.perceptron_out": "row",
        "norm": "norm",
        "head": "head",
    },
)


def initialise(name: str, tensor: Tensor) -> None:
    if tensor.dim() == 2:
        nn.init.normal_(tensor, std=0.02)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("norm.weight") else 0.0)


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def measure(model: nn.Module, samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the validation measurements of each sample: its loss in nats per byte."""
    text, following = samples
    losses = nn.functional.cross_entropy(model(text).flatten(0, 1).float(), following.flatten(), reduction="none")
    return {"loss": losses.view(following.shape).mean(1)}


def read_text(args: Arguments, config: ResolvedJob) -> tuple[Windows | TokenSource, int]:
    """Return the text in `[data] paths`, either plain or packed by `toolkit data pack`, and the size of its
    vocabulary.
    """
    paths = config.data.paths
    files = named_files(paths, config.job_directory) if paths else standard_library_sources()
    packed = {file: header for file in files if (header := read_header(file))}
    if packed:
        if unnamed := [file for file, header in packed.items() if not header.vocabulary]:
            raise ToolkitError(
                f"{unnamed[0].name} does not state the size of its vocabulary",
                where=str(unnamed[0]),
                fix="pack the text again with `toolkit data pack --vocabulary N`",
            )
        return TokenSource(files, args.context), max(header.vocabulary for header in packed.values())
    return Windows(read_bytes(files, max_bytes=args.max_bytes), args.context), BYTES


def main(world: World, config: ResolvedJob) -> None:
    """Train until `train.steps` or a stop request, and save the last step."""
    args = read_arguments(Arguments, config.args)
    train(world, config, args, lambda vocabulary: GPT(args, vocabulary), initialise, OUTLINE)


def train(
    world: World,
    config: ResolvedJob,
    args: Arguments,
    build: Callable[[int], nn.Module],
    initialise: Callable[[str, Tensor], None],
    outline: Outline,
) -> None:
    """Train the model that `build` returns for a size of the vocabulary."""
    text, vocabulary = read_text(args, config)
    check_same_text(text.digest)
    learned, held_out = hold_out(text, args.held_out)
    task = Task(
        build=lambda: build(vocabulary),
        initialise=initialise,
        outline=outline,
        loss_of=loss_of,
        source=learned,
        data={"windows": learned.count, "text": text.digest},
        held_out=HeldOut(held_out, measure) if held_out else None,
    )
    Trainer(world, config, task).train()
