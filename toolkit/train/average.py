"""Exponential moving average of the weights. Checkpoints contain it, and validations use it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from toolkit.errors import ToolkitError
from toolkit.train.memory.local_parts import local_of


class WeightAverage(nn.Module):
    """Exponential moving average of a model's parameters and buffers, under their checkpoint names.

    Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992; Tarvainen and Valpola, mean
    teacher, arXiv 1703.01780. As in TensorFlow, the decay of step n is at most (1 + n) / (10 + n), so that the initial
    weights fade early. The average is fp32 or wider, because 16-bit types lose small changes. Each rank averages only
    its own shards. Integer and boolean values are copied, not averaged.

    Pass it to `TrainingState(modules={"average": ...})`, and call `update` after each optimizer step.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        if not 0.0 <= decay < 1.0:
            raise ToolkitError(
                f"expected a decay in [0, 1), got {decay}",
                where="train.average_decay",
                fix="choose a value such as 0.999",
            )
        self.decay = decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.weights = nn.Module()
        kept: dict[tuple[int, torch.Size], nn.Parameter] = {}
        for name, value in _values(model).items():
            place = (local_of(value).data_ptr(), value.shape)
            if place not in kept or not local_of(value).numel():  # a tied weight is averaged once
                kept[place] = nn.Parameter(_wide(value).clone(), requires_grad=False)
            _place(self.weights, name, kept[place])

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's current weights."""
        count = int(self.updates)
        decay = min(self.decay, (1 + count) / (10 + count))
        pairs = self._pairs(model)
        floating = [(local_of(kept), local_of(_wide(value))) for kept, value in pairs if kept.is_floating_point()]
        if floating:
            averages, current = map(list, zip(*floating, strict=True))
            get_ema_multi_avg_fn(decay)(averages, current, count)
        for kept, value in pairs:
            if not kept.is_floating_point():
                kept.copy_(value)
        self.updates += 1

    def of(self, model: nn.Module, tensor: Tensor) -> list[Tensor]:
        """Return the average of a tensor of the model, in a list."""
        place = local_of(tensor).data_ptr()
        return [kept for kept, value in self._pairs(model) if local_of(value).data_ptr() == place]

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Copy the averaged weights into the model within this context, and restore its own weights on exit."""
        pairs = self._pairs(model)
        own = [value.clone() for _, value in pairs]
        try:
            _write(model, [(value, kept) for kept, value in pairs])
            yield
        finally:
            _write(model, [(value, before) for (_, value), before in zip(pairs, own, strict=True)])

    def _pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return (average, model tensor) pairs; tied weights are listed once."""
        values = _values(model)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        kept = dict(self.weights.named_parameters(remove_duplicate=False))
        if differing := kept.keys() ^ values.keys():
            raise ToolkitError(
                f"the average was created from another model; only one of the models has "
                f"{', '.join(sorted(differing)[:10])}",
                where="average",
                fix="create the average from the model that you pass to update",
            )
        for name, average in kept.items():
            found.setdefault(id(average), (average, values[name]))
        return list(found.values())


@torch.no_grad()
def _write(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first one, which belongs to the model."""
    for to, value in pairs:
        to.copy_(value)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # FSDP2's root keeps gathered weights, now outdated, after a forward pass
            module.reshard()


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors, not copies, by checkpoint name, without the prefixes of wrappers."""
    return {name: value for name, value in get_model_state_dict(model).items() if isinstance(value, Tensor)}


def _wide(value: Tensor) -> Tensor:
    narrow = value.is_floating_point() and value.dtype.itemsize < 4
    return value.detach().float() if narrow else value.detach()


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name; create an empty module for each prefix."""
    *above, last = name.split(".")
    for part in above:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, parameter)
