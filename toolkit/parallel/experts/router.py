"""Which experts each token uses, and with which weights.

N. Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv:1701.06538; sigmoid scores, groups and the bias:
DeepSeek-V3, 2024, arXiv:2412.19437; experts that choose tokens: Y. Zhou et al., 2022, arXiv:2202.09368; capacity:
GShard, 2020, arXiv:2006.16668.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor, nn

from toolkit.errors import ToolkitError, counted

__all__ = ["Routed", "Router", "Routing"]


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    Args:
        experts: the number of experts.
        top: the number of experts that a token uses.
        score: turns the outputs of the gate into scores; "softmax" over experts, or "sigmoid" of each.
        is_normalised: the weights of a token's experts sum to 1; else, and with a single expert, they are its scores.
        groups, top_groups: a token chooses only experts of its `top_groups` best groups of `groups` consecutive experts.
        jitter: in training, multiplies the gate's inputs by random factors in [1 - jitter, 1 + jitter].
        chosen_by: "tokens" choose experts; or "experts" choose the tokens with the highest scores, the same number each.
            This choice depends on later tokens, so it is unsuitable for causal language models.
        capacity: the most tokens of a micro-batch that an expert takes on each rank, as a multiple of their mean number
            tokens * top / experts; 0: no limit.
        overflow: what a token does whose expert is full: "drop" uses its other experts only, "next" uses the best expert
            that has room, "pass" uses the token itself as the output of the full expert.
    """

    experts: int
    top: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    groups: int = 1
    top_groups: int = 1
    jitter: float = 0.0
    chosen_by: Literal["tokens", "experts"] = "tokens"
    capacity: float = 0.0
    overflow: Literal["drop", "next", "pass"] = "drop"

    def __post_init__(self) -> None:
        size = self.experts // max(1, self.groups)
        for is_wrong, message, fix in (
            (self.experts < 1, f"expected at least one expert, got {self.experts}", "use 8, for example"),
            (not 1 <= self.top <= self.experts, f"expected 1 to {self.experts} experts per token, got {self.top}",
             f"use 1 to {self.experts} experts per token"),
            (self.groups < 1 or self.experts % max(1, self.groups) != 0,
             f"expected a number of groups that divides {self.experts} experts, got {self.groups}", "change the number of groups"),
            (not 1 <= self.top_groups <= self.groups, f"expected 1 to {self.groups} groups per token, got {self.top_groups}",
             f"use 1 to {self.groups} groups per token"),
            (self.top > size * self.top_groups, f"expected at least {self.top} experts, which a token uses, in "
             f"{counted(self.top_groups, 'group')}, got {size * self.top_groups}", "use more groups per token"),
            (self.score not in ("softmax", "sigmoid"), f'expected score = "softmax" or "sigmoid", got "{self.score}"', "use one of them"),
            (self.chosen_by not in ("tokens", "experts"), f'expected chosen_by = "tokens" or "experts", got "{self.chosen_by}"',
             "use one of them"),
            (self.overflow not in ("drop", "next", "pass"), f'expected overflow = "drop", "next" or "pass", got "{self.overflow}"',
             "use one of them"),
            (self.chosen_by == "experts" and (self.groups > 1 or self.capacity > 0 or self.overflow != "drop"),
             'with chosen_by = "experts" each expert takes the same number of tokens, so that groups, capacity and overflow have no effect',
             "remove them"),
            (self.overflow != "drop" and self.capacity == 0, f'overflow = "{self.overflow}" has no effect without a capacity',
             "set a capacity, such as 1.25"),
            (not 0 <= self.jitter < 1, f"expected a jitter of at least 0 and less than 1, got {self.jitter:g}", "use 0.01, for example"),
            (not self.capacity >= 0, f"expected a capacity of 0 or more, got {self.capacity:g}", "set capacity to 0 for no limit"),
        ):  # fmt: skip
            if is_wrong:
                raise ToolkitError(message, where="experts", fix=fix)


@dataclass(frozen=True)
class Routed:
    """The choice of a micro-batch: assignments of tokens to experts, by token and then by preference.

    `tokens`, `experts` and `weights` are (assignments,). `passed` is (tokens,), the weight of each token itself in its
    output. `chosen` is (experts,), the number of tokens that wanted each expert, and `dropped` how many of all of them no
    expert took. `logits` and `probabilities` are (tokens, experts), in fp32.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    passed: Tensor | None
    chosen: Tensor
    dropped: Tensor
    logits: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """A linear gate in fp32, also under autocast. `bias` changes the choice of experts, not their weights."""

    bias: Tensor

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.gate = nn.Linear(width, routing.experts, bias=False)
        self.register_buffer("bias", torch.zeros(routing.experts))

    def forward(self, tokens: Tensor) -> Routed:
        """Route tokens, (tokens, width)."""
        given = self.routing
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.float()
            if given.jitter and self.training:
                tokens = tokens * torch.empty_like(tokens).uniform_(1 - given.jitter, 1 + given.jitter)
            logits = nn.functional.linear(tokens, self.gate.weight.float())
            scores = logits.softmax(-1) if given.score == "softmax" else logits.sigmoid()
            probabilities = (
                scores if given.score == "softmax" else scores / scores.sum(1, keepdim=True).clamp_min(1e-20)
            )
            ranked = scores.detach() + self.bias
            choose = self._by_tokens if given.chosen_by == "tokens" else self._by_experts
            return choose(ranked, scores, logits, probabilities)

    def capacity_of(self, tokens: int) -> int:
        """Return the most tokens that an expert takes of this number of tokens."""
        given = self.routing
        factor = given.capacity or (1.0 if given.chosen_by == "experts" else given.experts / given.top)
        return min(tokens, ceil(factor * tokens * given.top / given.experts))

    def _by_tokens(self, ranked: Tensor, scores: Tensor, logits: Tensor, probabilities: Tensor) -> Routed:
        given = self.routing
        ranked = self._allowed(ranked)
        experts = _descending(ranked)[:, : given.top]
        weights = scores.gather(1, experts)
        if given.is_normalised and given.top > 1:  # a single weight of 1 would give the gate no gradient
            weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-20)
        chosen = _count(experts, given.experts)
        numbers = torch.arange(len(scores), device=scores.device)[:, None].expand_as(experts)
        if not given.capacity:
            none = torch.zeros((), dtype=torch.long, device=scores.device)
            return Routed(
                numbers.flatten(), experts.flatten(), weights.flatten(), None, chosen, none, logits, probabilities
            )
        kept = _have_room(experts, given.experts, self.capacity_of(len(scores)))
        if given.overflow == "next":
            used, kept = self._with_next(experts, kept, ranked)
            # Gradients reach the gate through the expert that a token uses, at the weight that it gave the full one.
            score = scores.gather(1, used)
            moved = weights.detach() * score / score.detach().clamp_min(1e-20)
            weights, experts = torch.where(used == experts, weights, moved), used
        passed = (weights * ~kept).sum(1) if given.overflow == "pass" else None
        return Routed(numbers[kept], experts[kept], weights[kept], passed, chosen, (~kept).sum(), logits, probabilities)

    def _by_experts(self, ranked: Tensor, scores: Tensor, logits: Tensor, probabilities: Tensor) -> Routed:
        taken = ranked.argsort(dim=0, descending=True, stable=True)[
            : self.capacity_of(len(scores))
        ]  # (capacity, experts)
        is_taken = torch.zeros_like(ranked, dtype=torch.bool).scatter_(0, taken, True)
        tokens, experts = is_taken.nonzero(as_tuple=True)
        chosen = is_taken.sum(0)
        return Routed(tokens, experts, scores[is_taken], None, chosen, (~is_taken.any(1)).sum(), logits, probabilities)

    def _allowed(self, ranked: Tensor) -> Tensor:
        """Return the ranking, (tokens, experts), with -inf for experts outside of the token's groups."""
        given = self.routing
        if given.groups == 1:
            return ranked
        by_group = ranked.unflatten(1, (given.groups, -1))
        # The value of a group is the sum of the two best experts in it.
        best = by_group.topk(min(2, by_group.shape[2]), 2).values.sum(2)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _descending(best)[:, : given.top_groups], True)
        return by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(1)

    def _with_next(self, experts: Tensor, kept: Tensor, ranked: Tensor) -> tuple[Tensor, Tensor]:
        """Give each assignment that found no room to the token's best expert with room that it does not use yet."""
        room = self.capacity_of(len(ranked)) - _count(experts[kept], self.routing.experts)
        experts, kept = experts.clone(), kept.clone()
        order = _descending(ranked)
        allowed = self.routing.experts // self.routing.groups * self.routing.top_groups
        for preference in range(self.routing.top, allowed):
            for place in range(self.routing.top):
                wanted = order[:, preference]
                is_new = ~kept[:, place] & ~((experts == wanted[:, None]) & kept).any(1)
                before = _rank_within(wanted.masked_fill(~is_new, self.routing.experts), self.routing.experts + 1)
                takes = is_new & (before < room[wanted])
                experts[:, place] = torch.where(takes, wanted, experts[:, place])
                kept[:, place] |= takes
                room = room - _count(wanted[takes], self.routing.experts)
        return experts, kept


def _descending(values: Tensor) -> Tensor:
    """Return the places of the values in each row, the largest first; among equal ones the first, in every layout of ranks."""
    return values.argsort(dim=1, descending=True, stable=True)


def _count(experts: Tensor, number: int) -> Tensor:
    """Return how often each expert occurs, (number,); also on the meta device, which has no bincount."""
    flat = experts.flatten()
    return torch.zeros(number, dtype=torch.long, device=experts.device).index_add_(0, flat, torch.ones_like(flat))


def _have_room(experts: Tensor, number: int, capacity: int) -> Tensor:
    """Return which assignments, (tokens, top), their experts take: first choices before second ones, then by token."""
    first_choices = experts.t().flatten()
    return (_rank_within(first_choices, number) < capacity).view(experts.shape[1], -1).t()


def _rank_within(labels: Tensor, number: int) -> Tensor:
    """Return how many equal labels precede each one."""
    order = labels.argsort(stable=True)
    counts = _count(labels, number)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(labels)
    ranks[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
    return ranks
