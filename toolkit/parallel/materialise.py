"""Gives memory and first values to a model that was laid out on torch's "meta" device.

A value depends on the seed and the parameter's name alone, not on who holds it: a rank makes each tensor whole, one at a
time, and keeps its own part. So all layouts begin with the same weights, without a message, and no rank ever holds more
than its share and one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import box_of

# Fills the parameter of that name with its first values, drawn from torch's default generator.
Initialise = Callable[[str, Tensor], None]


@contextmanager
def parameters_on_meta(seed: int) -> Iterator[None]:
    """Modules that are made within have parameters without memory; their buffers are real, and the same on all ranks.

    A parameter is given up as soon as its module has it, before anything is drawn for it.
    """
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


@contextmanager
def buffers_on_meta(module: nn.Module) -> Iterator[None]:
    """Within, buffers are shapes without values, as parameters on the meta device are; afterwards they are themselves."""
    places = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    shapes = {id(buffer): torch.empty_like(buffer, device="meta") for _, _, buffer in places if buffer is not None}
    try:
        for owner, name, buffer in places:
            owner._buffers[name] = shapes.get(id(buffer))
        yield
    finally:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer


def materialise(
    module: nn.Module, initialise: Initialise, seed: int, device: str, known_as: Mapping[str, str] | None = None
) -> None:
    """Fill all parameters of `module`, which are on the meta device and may be split or sharded; buffers keep their values.

    `initialise` sees every parameter whole, in its global shape. The default generators are left as they were.

    Args:
        known_as: names in the whole model of parameters that have another one in `module`, a part of it.
    """
    tied = tied_names(module)
    values = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for first, *others in tied:  # `to_empty` makes a tensor for each name
        for name in others:
            set_parameter(module, name, module.get_parameter(first))
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        for own_name, buffer in module.named_buffers():
            buffer.copy_(values[own_name])
        for own_name, tensor in module.named_parameters():  # tied ones once
            name = (known_as or {}).get(own_name, own_name)
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            torch.manual_seed(_seed_of(seed, name))
            initialise(name, whole)
            if isinstance(tensor, DTensor):
                offset, shape = box_of(tensor, name)
                own = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
                tensor.to_local().copy_(whole[own])
            else:
                tensor.copy_(whole)


def tied_names(module: nn.Module) -> list[list[str]]:
    """Names of one parameter, for each that has several, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put `parameter` in the place of the one of that name."""
    owner, _, own_name = name.rpartition(".")
    setattr(module.get_submodule(owner), own_name, parameter)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
