"""A small GPT that learns to write, byte by byte. Copy this file and make it yours.

`toolkit run train_lm` starts it on this machine, `toolkit submit train_lm` on a cluster. By default it reads
the sources of Python's standard library; name your own text in `[data] paths`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.retention import Retention
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.metrics.training import TrainLog
from toolkit.parallel.distribute import distribute
from toolkit.parallel.mesh import make_mesh
from toolkit.parallel.outline import Outline
from toolkit.topology.gather import gather_topology
from toolkit.train.arguments import read_arguments
from toolkit.train.loop import training_steps
from toolkit.train.order import SampleOrder
from toolkit.train.picture import draw_loss
from toolkit.train.precision import autocast, use_deterministic_kernels
from toolkit.train.randomness import seed_rank
from toolkit.train.saves import Saves
from toolkit.train.schedule import Schedule
from toolkit.train.state import TrainingState
from toolkit.train.step import OptimizerStep
from toolkit.train.text import Windows, check_same_text, named_files, read_bytes, standard_library_sources
from toolkit.world.facts import World

BYTES = 256  # the vocabulary: every byte is a token


@dataclass(frozen=True)
class Arguments:
    """The table `[args]` of this job."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.1
    tied: bool = True  # the head reuses the embedding's weights
    max_bytes: int = 4_000_000  # how much of the text is read

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ToolkitError(
                f"a width of {self.width} does not divide into {self.heads} heads",
                where="args.heads",
                fix=f"make args.width a multiple of {self.heads}",
            )


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to the stream after."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.heads = args.heads
        self.dropout = args.dropout
        self.attention_norm = nn.LayerNorm(args.width)
        self.query_key_value = nn.Linear(args.width, 3 * args.width, bias=False)
        self.attention_out = nn.Linear(args.width, args.width, bias=False)
        self.perceptron_norm = nn.LayerNorm(args.width)
        self.perceptron_in = nn.Linear(args.width, 4 * args.width)
        self.perceptron_out = nn.Linear(4 * args.width, args.width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._drop(self._attention(self.attention_norm(stream)))
        hidden = nn.functional.gelu(self.perceptron_in(self.perceptron_norm(stream)))
        return stream + self._drop(self.perceptron_out(hidden))

    def _attention(self, stream: Tensor) -> Tensor:
        batch, context, width = stream.shape
        # Heads come first, so that tensor parallel ranks take whole ones; a rank sees its own.
        by_head = self.query_key_value(stream).view(batch, context, -1, 3, width // self.heads)
        query, key, value = by_head.permute(3, 0, 2, 1, 4)  # each (batch, heads, context, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def _drop(self, stream: Tensor) -> Tensor:
        return nn.functional.dropout(stream, self.dropout, self.training)


class GPT(nn.Module):
    """Bytes (batch, context) in, logits of each next byte (batch, context, 256) out."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.dropout = args.dropout
        self.byte_embedding = nn.Embedding(BYTES, args.width)
        self.place_embedding = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, BYTES, bias=False)
        if args.tied:
            self.head.weight = self.byte_embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        stream = self._embedded(text) if self.byte_embedding is not None else text
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream)) if self.head is not None else stream

    def _embedded(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        stream = self.byte_embedding(text) + self.place_embedding(places)
        return nn.functional.dropout(stream, self.dropout, self.training)


# A pipeline stage gets the stream of the one before it, and lacks the modules that others run.
OUTLINE = Outline(blocks="blocks", before=("byte_embedding", "place_embedding"), after=("norm", "head"))


def initialise(name: str, tensor: Tensor) -> None:
    if tensor.dim() == 2:
        nn.init.normal_(tensor, std=0.02)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("norm.weight") else 0.0)


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def optimizer_of(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def read_windows(args: Arguments, config: ResolvedJob) -> Windows:
    paths = config.data.paths
    files = named_files(paths, config.job_directory) if paths else standard_library_sources()
    return Windows(read_bytes(files, max_bytes=args.max_bytes), args.context)


def main(world: World, config: ResolvedJob) -> None:
    """Train until `train.steps`, or until asked to stop; either way the last step is in a checkpoint."""
    args, train = read_arguments(Arguments, config.args), config.train
    if train.deterministic:
        use_deterministic_kernels()
    windows = read_windows(args, config)
    check_same_text(windows)
    order = SampleOrder(windows.count, train.seed)

    def take_samples(samples: range) -> tuple[Tensor, Tensor]:
        return windows.take(order.positions(samples), world.device)

    topology = gather_topology(world)
    mesh = make_mesh(world, config, topology)
    parallel = distribute(lambda: GPT(args), initialise, OUTLINE, world, mesh, config, topology)
    model = parallel.module
    optimizer = optimizer_of(model, train.weight_decay)
    schedule = Schedule(train.lr, train.steps, train.warmup_steps, train.min_lr_ratio, train.schedule)
    precision = autocast(world.device, train.precision)
    step = OptimizerStep(parallel, optimizer, schedule, loss_of, precision, train.batch, train.clip_norm)
    step.rehearse(take_samples(range(1)))
    seed_rank(train.seed, 0, world.rank)  # another dropout on every rank

    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(world, f"{parameters:,} parameters, {world.size} x {world.device}, {windows.count:,} windows of text")
    data = {"seed": train.seed, "windows": windows.count, "text": windows.digest}
    state = TrainingState(model, optimizer, schedule, train.seed, data)
    saves = log = None
    if world.run_dir is None:
        say(world, "no run directory: neither checkpoints nor metrics are written")
    else:
        directory = world.run_dir / "checkpoints"
        retention = Retention.of(config.checkpoint)
        checkpointer = Checkpointer(
            directory,
            world,
            retention=retention,
            aggregate=config.checkpoint.aggregate,
            compression=config.checkpoint.compression,
        )
        source = config.job_directory / config.checkpoint.source if config.checkpoint.source else None
        take, without = config.checkpoint.take, config.checkpoint.without
        say(world, state.resume(checkpointer, world, source=source, take=take, without=without))
        saves = Saves(world, state, checkpointer, config.checkpoint)
        log = TrainLog(world.run_dir / "metrics" / "train.jsonl") if world.rank == 0 else None

    for record in training_steps(world, train, state, step, take_samples, saves):
        if log:
            log.write(record)
        if record.step % max(1, train.steps // 10) == 0 or record.step == train.steps:
            say(world, f"step {record.step} of {record.steps}: loss {record.loss:.4f}")
    if log:
        log.close()
        if state.step == train.steps:
            say(world, picture_of(log.path))


def picture_of(log: Path) -> str:
    picture = log.parent.parent / "loss.png"
    try:
        draw_loss(log, picture)
    except ImportError:
        return "no picture of the loss: matplotlib is missing; pip install 'toolkit[plot]'"
    return f"the loss is drawn in {picture}"


def say(world: World, line: str) -> None:
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)
