"""Move experts between the ranks of `ep`, so that each rank gets about as many tokens.

An expert takes its weights, the state of the optimizer and every other copy along, between two steps, and its name in the
model stays: only its place changes, which checkpoints contain. Ranks exchange the two experts that even the loads of the
busiest and the idlest rank best, after EPLB (https://github.com/deepseek-ai/EPLB), but with few moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.config.train import ParallelTable
from toolkit.parallel.experts.layer import MoE

__all__ = ["Migration", "exchanged"]

# Returns the other tensors of a parameter that move with it, in its shape: the state of the optimizer, an average.
Companions = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Migration:
    """Moves experts of a layer whose busiest rank had more than `limit` times the mean load in `checks` checks in a row.

    Args:
        layers: the layers of this rank, by name.
        settings: `expert_migration` is the limit; with the frequency of checks, and the steps between moves of a layer.
        companions: returns the tensors that move with a parameter.
    """

    layers: dict[str, MoE]
    settings: ParallelTable
    companions: Companions

    def after_step(self, step: int) -> list[str]:
        """Move experts if it is time; return a line for each layer that changed. Collective over the ranks of `ep`."""
        if step % self.settings.expert_check_every:
            return []
        return [line for name, layer in self.layers.items() if (line := self._checked(name, layer, step))]

    def _checked(self, name: str, layer: MoE, step: int) -> str:
        group, balance = layer.experts.ranks.experts, layer.balance
        if group is None:
            return ""
        ranks, loads, places = dist.get_world_size(group), balance.history.tolist(), balance.places.tolist()
        before = _imbalance(loads, places, ranks)
        over, moved = balance.trigger.tolist()
        over = over + 1 if before > self.settings.expert_migration else 0
        waited = moved < 0 or step - moved >= self.settings.expert_cooldown
        line = ""
        if over >= self.settings.expert_checks and waited:
            found = exchanged(loads, places, ranks)
            changed = sum(one != other for one, other in zip(places, found, strict=True))
            if changed:
                self._move(layer, group, found)
                after = _imbalance(loads, found, ranks)
                line = f"{name}: {changed} experts moved; the busiest rank has {after:.2f} instead of {before:.2f} of the mean load"
                over, moved = 0, step
        balance.trigger.copy_(torch.tensor([over, moved]))
        return line

    @torch.no_grad()
    def _move(self, layer: MoE, group: dist.ProcessGroup, places: list[int]) -> None:
        known = layer.balance.places.tolist()
        expert_at = sorted(range(len(places)), key=places.__getitem__)
        sources = [known[expert] for expert in expert_at]  # by new place, the old one
        for parameter in layer.experts.parameters():
            for tensor in (parameter, *self.companions(parameter)):
                _exchange_rows(tensor.to_local() if isinstance(tensor, DTensor) else tensor, sources, group)
        for kept in (layer.balance.places, *self.companions(layer.balance.places)):
            kept.copy_(torch.tensor(places))
        if isinstance(layer.experts, FSDPModule):  # it may keep gathered weights, which are outdated
            layer.experts.reshard()


def exchanged(loads: Sequence[float], places: Sequence[int], ranks: int) -> list[int]:
    """Return places of experts from which exchanges of two no longer lower the load of the busiest rank.

    Args:
        loads: the load of each expert.
        places: the place of each expert; each rank has an equal number of consecutive places.
    """
    found = list(places)
    each = len(found) // ranks
    for _ in range(len(found)):
        of_rank = _by_rank(loads, found, ranks)
        busiest, idlest = max(range(ranks), key=of_rank.__getitem__), min(range(ranks), key=of_rank.__getitem__)
        pairs = [
            (max(of_rank[busiest] - loads[one] + loads[other], of_rank[idlest] + loads[one] - loads[other]), one, other)
            for one in range(len(found)) if found[one] // each == busiest
            for other in range(len(found)) if found[other] // each == idlest
        ]  # fmt: skip
        highest, one, other = min(pairs)
        if highest >= of_rank[busiest] * (1 - 1e-9):
            break
        found[one], found[other] = found[other], found[one]
    return found


def _by_rank(loads: Sequence[float], places: Sequence[int], ranks: int) -> list[float]:
    sums = [0.0] * ranks
    for load, place in zip(loads, places, strict=True):
        sums[place * ranks // len(places)] += load
    return sums


def _imbalance(loads: Sequence[float], places: Sequence[int], ranks: int) -> float:
    return max(_by_rank(loads, places, ranks)) * ranks / max(sum(loads), 1e-20)


def _exchange_rows(tensor: Tensor, sources: Sequence[int], group: dist.ProcessGroup) -> None:
    """Move the rows of `tensor`, (places of this rank, ...), so that place p of the group gets the row of sources[p]."""
    ranks, own, each = dist.get_world_size(group), dist.get_rank(group), len(tensor)
    places = range(own * each, (own + 1) * each)
    arriving = [[place - own * each for place in places if sources[place] // each == rank] for rank in range(ranks)]
    leaving = [
        [source - own * each for source in sources[rank * each : (rank + 1) * each] if source // each == own]
        for rank in range(ranks)
    ]
    rows = tensor[_indices(leaving, tensor)].flatten(1)
    received = torch.empty_like(rows)  # a rank gets as many rows as it gives
    dist.all_to_all_single(received, rows, [len(one) for one in arriving], [len(one) for one in leaving], group=group)
    tensor.index_copy_(0, _indices(arriving, tensor), received.view(-1, *tensor.shape[1:]))


def _indices(by_rank: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor([row for of_rank in by_rank for row in of_rank], dtype=torch.long, device=like.device)
