"""Train a small GPT with experts on text, byte by byte. Copy this file to start your own job.

`toolkit run train_moe` starts it on this host, `toolkit submit train_moe` on a cluster. It is `train_lm` with a mixture of
experts in place of each perceptron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from toolkit.config.resolved import ResolvedJob
from toolkit.jobs import train_lm
from toolkit.jobs.train_lm import Count, Share
from toolkit.parallel.experts.balance import Balance
from toolkit.parallel.experts.layer import MoE
from toolkit.parallel.experts.router import Routing
from toolkit.parallel.outline import Outline
from toolkit.train.arguments import DividedBy, read_arguments
from toolkit.world.facts import World

Factor = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Arguments(train_lm.Arguments):
    """The table `[args]` of this job."""

    experts: Annotated[Count, DividedBy("parallel.ep")] = 8
    experts_per_token: Count = 2
    expert_hidden: Annotated[Count, DividedBy("parallel.tp", times=8)] = 128
    shared_hidden: Annotated[int, DividedBy("parallel.tp"), Field(ge=0)] = (
        0  # of an expert that every token uses; 0: none
    )
    score: Literal["softmax", "sigmoid"] = "softmax"
    expert_groups: Count = 1  # a token uses only experts of its best groups
    groups_per_token: Count = 1
    chosen_by: Literal["tokens", "experts"] = "tokens"  # "experts" reads later tokens
    capacity: Factor = 0.0  # of an expert, as a multiple of its mean number of tokens; 0: no limit
    overflow: Literal["drop", "next", "pass"] = "drop"  # what a token does whose expert is full
    jitter: Share = 0.0
    expert_dropout: Share = 0.0
    balance_loss: Factor = 0.01
    z_loss: Factor = 1e-3
    bias_rate: Factor = 0.0  # change of an expert's bias per step
    expert_init: Literal["normal", "truncated_normal", "uniform", "xavier", "kaiming"] = "normal"


class SharedExpert(nn.Module):
    """The perceptron that every token uses."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden_in = nn.Linear(width, hidden, bias=False)
        self.hidden_out = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.hidden_out(nn.functional.gelu(self.hidden_in(tokens)))
        return hidden


class Block(train_lm.Block):
    """Attention as in `train_lm`, then a mixture of experts."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        del self.perceptron_in, self.perceptron_out
        routing = Routing(
            args.experts,
            args.experts_per_token,
            score=args.score,
            groups=args.expert_groups,
            top_groups=args.groups_per_token,
            jitter=args.jitter,
            chosen_by=args.chosen_by,
            capacity=args.capacity,
            overflow=args.overflow,
        )
        balance = Balance(args.balance_loss, args.z_loss, args.bias_rate)
        shared = SharedExpert(args.width, args.shared_hidden) if args.shared_hidden else None
        self.moe = MoE(args.width, args.expert_hidden, routing, balance, shared, args.expert_dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._drop(self._attention(self.attention_norm(stream)))
        return stream + self._drop(self.moe(self.perceptron_norm(stream)))


def outline_of(args: Arguments) -> Outline:
    """Return the outline of `train_lm` with a shared expert, if any, in place of its perceptrons."""
    of_lm = train_lm.OUTLINE
    styles = {name: style for name, style in of_lm.tensor.items() if not name.startswith("blocks.*.perceptron_i")}
    del styles["blocks.*.perceptron_out"]
    if args.shared_hidden:
        styles |= {"blocks.*.moe.shared.hidden_in": "column", "blocks.*.moe.shared.hidden_out": "row"}
    return Outline(of_lm.blocks, of_lm.before, of_lm.after, styles)


def initialise_experts(kind: str, tensor: Tensor) -> None:
    """Set the initial weights of experts, (experts, outputs, inputs)."""
    for of_expert in tensor:
        match kind:
            case "normal":
                nn.init.normal_(of_expert, std=0.02)
            case "truncated_normal":
                nn.init.trunc_normal_(of_expert, std=0.02, a=-0.04, b=0.04)
            case "uniform":
                nn.init.uniform_(of_expert, -0.035, 0.035)  # the same standard deviation
            case "xavier":
                nn.init.xavier_uniform_(of_expert)
            case "kaiming":
                nn.init.kaiming_uniform_(of_expert, nonlinearity="relu")


def main(world: World, config: ResolvedJob) -> None:
    """Train until `train.steps` or a stop request, and save the last step."""
    args = read_arguments(Arguments, config.args)

    def initialise(name: str, tensor: Tensor) -> None:
        if ".moe.experts." in name:
            initialise_experts(args.expert_init, tensor)
        else:
            train_lm.initialise(name, tensor)

    train_lm.train(
        world, config, args, lambda vocabulary: train_lm.GPT(args, vocabulary, Block), initialise, outline_of(args)
    )
