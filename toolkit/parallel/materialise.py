"""Allocate and initialize a model that was built on torch's meta device.

Initial values depend only on the seed and the parameter name: a rank initializes one whole tensor at a time and keeps
its shard. All layouts therefore start with the same weights, without communication, and a rank needs no more memory
than for its shards and one whole tensor.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.boxes import box_of

__all__ = ["Initialise", "Read", "allocate", "buffers_on_meta", "own_value", "parameters_on_meta", "tied_names"]

# Sets the initial values of the parameter with that name, drawn from torch's default generator.
Initialise = Callable[[str, Tensor], None]
Names = Mapping[str, str] | None
# Returns the part at an offset, with a shape, of the parameter with that name; None if `Initialise` sets its values.
Read = Callable[[str, Sequence[int], Sequence[int]], Tensor | None]


@contextmanager
def parameters_on_meta(seed: int) -> Iterator[None]:
    """Create modules with parameters on the meta device within this context.

    Buffers are real and equal on all ranks. A parameter's memory is freed when its module registers it, before
    initialization.
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
    """Move buffers to the meta device within this context, like the parameters, and restore them on exit."""
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
    module: nn.Module, initialise: Initialise, seed: int, device: str, known_as: Names = None, read: Read | None = None
) -> None:
    """Allocate and initialize all parameters of `module`, which are on the meta device and may be split or sharded.

    `initialise` gets every parameter unsharded, at its global shape. Buffers keep their values, and the default random
    generators their state.

    Args:
        known_as: maps parameter names in `module` to those in the whole model, if they differ.
        read: returns this rank's part of a value without the whole one.
    """
    allocate(module, device)
    with torch.no_grad():
        for own_name, tensor in module.named_parameters():  # a tied parameter is listed once
            name = (known_as or {}).get(own_name, own_name)
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            own.copy_(own_value(name, tensor, initialise, seed, device, read))


def allocate(module: nn.Module, device: str) -> None:
    """Allocate the parameters of `module`, with undefined values; buffers keep theirs, and tied parameters stay tied."""
    tied = tied_names(module)
    values = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for first, *others in tied:  # `to_empty` unties: it creates a tensor for each name
        for name in others:
            set_parameter(module, name, module.get_parameter(first))
    with torch.no_grad():
        for own_name, buffer in module.named_buffers():
            buffer.copy_(values[own_name])


def own_value(
    name: str, parameter: Tensor, initialise: Initialise, seed: int, device: str, read: Read | None = None
) -> Tensor:
    """Return this rank's part of the initial value of a parameter, which may be split or sharded."""
    whole_box = (0,) * parameter.dim(), tuple(parameter.shape)
    offset, shape = box_of(parameter, name) if isinstance(parameter, DTensor) else whole_box
    if read is not None and (found := read(name, offset, shape)) is not None:
        return found.to(device, parameter.dtype)
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    with torch.random.fork_rng([torch.device(device)] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(_seed_of(seed, name))
        initialise(name, whole)
    return whole[tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))]


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names, in model order."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter of that name."""
    owner, _, own_name = name.rpartition(".")
    setattr(module.get_submodule(owner), own_name, parameter)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
