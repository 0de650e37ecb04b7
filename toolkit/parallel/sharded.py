"""Shard parameters, gradients and optimizer state over the ranks of `shard`, by torch's FSDP2.

`[parallel] zero`, after S. Rajbhandari et al., "ZeRO", SC 2020, arXiv:1910.02054:

    1  shards the optimizer state. Parameters are all-gathered once per step; gradients accumulate unsharded over the
       micro-batches and are reduce-scattered once.
    2  also shards gradients, which are reduce-scattered after every micro-batch.
    3  also shards parameters; each block is all-gathered for its forward pass and again for its backward pass.

With `replicate`, there are several copies of the shards (hybrid sharding): parameters are gathered within `shard` only,
and gradients are reduced across copies once per step.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_composable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel.experts.balance import LayerBalance
from toolkit.parallel.experts.router import Router
from toolkit.parallel.experts.sharding import shard_experts
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline

__all__ = ["Between", "reduce_sharded_parts", "replicate_composable", "shard"]


_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "as_is": None}

Between = Callable[[], AbstractContextManager[None]]


def shard(
    model: nn.Module, outline: Outline, mesh: DeviceMesh, settings: ParallelTable, whole: Mesh | None = None
) -> Between:
    """Shard `model` over the ranks of `mesh`, whose dimensions are "replicate", "shard" or both. Collective.

    Either may be merged with "cp", as in "shard_cp". With the `whole` mesh, experts are sharded over its own
    dimensions for them.

    Without "shard" in the mesh, FSDP2 replicates the model. Unlike DDP, it accepts models that are split over
    tensor-parallel ranks.

    Returns:
        The context for all backward passes of a step except the last.
    """
    is_sharded = any(name.startswith("shard") for name in mesh.mesh_dim_names or ())
    units = MixedPrecisionPolicy(_TYPES[settings.gather_type], _TYPES[settings.reduce_type])
    if whole is not None:
        shard_experts(model, whole, units, reshard=is_sharded and settings.zero == 3)
    for part in (*_wrapped(model, outline, settings), model):
        # Only the model's own outputs: those of inner modules keep the type of the computation.
        precision = replace(units, output_dtype=_TYPES[settings.output_type]) if part is model else units
        if is_sharded:
            fully_shard(part, mesh=mesh, reshard_after_forward=settings.zero == 3, mp_policy=precision)
        else:
            replicate_composable(part, mesh=mesh, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    zero = settings.zero if is_sharded else 1
    return lambda: _between(model, zero)


def _wrapped(model: nn.Module, outline: Outline, settings: ParallelTable) -> list[nn.Module]:
    """Return the modules that are each gathered as a unit, inner modules before outer ones."""
    if settings.wrap == "blocks":
        return list(outline.blocks_of(model))
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {identity for identity, count in names.items() if count > 1}
    if settings.wrap != "size":
        return _chosen(model, settings, tied)
    found: list[nn.Module] = []
    for child in model.children():
        _by_size(child, settings.wrap_parameters, tied, found)
    return found


def _chosen(model: nn.Module, settings: ParallelTable, tied: set[int]) -> list[nn.Module]:
    """Return the modules of `wrap_classes`, or those that `wrap_function` chooses.

    Raises:
        ToolkitError: none is chosen, or one cannot be gathered separately: it shares a parameter, or is only a list.
    """
    where = f"parallel.wrap_{settings.wrap}"
    classes = settings.wrap_classes
    by_class = settings.wrap == "classes"
    choose = (
        (lambda _, module: type(module).__name__ in classes) if by_class else _function(settings.wrap_function, where)
    )
    inner = [(name, module) for name, module in model.named_modules() if module is not model]
    found = [(name, module) for name, module in reversed(inner) if choose(name, module)]
    for name, module in found:
        why = ""
        if any(id(parameter) in tied for parameter in module.parameters()):
            why = "shares a parameter with another module"
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            why = "is only a list of modules"
        elif isinstance(module, FSDPModule):
            why = "has experts, which are sharded already"
        elif any(module in router.children() for router in model.modules() if isinstance(router, Router)):
            why = "is the gate of a router, which uses its weights without calling it"
        if why:
            raise ToolkitError(f"{name} cannot be gathered separately: it {why}", where=where, fix="do not choose it")
    lacking = {*classes} - {type(module).__name__ for _, module in found}
    if settings.pp == 1 and (lacking or not found):  # a pipeline stage may lack a class that another one has
        known = ", ".join(sorted({type(module).__name__ for _, module in inner}))
        what = f"modules of the classes {', '.join(sorted(lacking))}" if lacking else "at least one chosen module"
        raise ToolkitError(f"expected {what} in {type(model).__name__}", where=where, fix=f"its classes are {known}")
    return [module for _, module in found]


def _function(name: str, where: str) -> Callable[[str, nn.Module], bool]:
    """Import the function `module:function`. Raises ToolkitError if this is impossible."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Callable[[str, nn.Module], bool] = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # an import runs user code, which may raise any exception
        message = f"cannot import {name!r}: {type(error).__name__}: {error}"
        raise ToolkitError(message, where=where, fix='pass "module:function" of an importable module') from error
    return found


def convert_buffers(model: nn.Module, settings: ParallelTable) -> None:
    """Convert the floating-point buffers of a model to `buffer_type`, except those that sum up small changes of experts."""
    dtype = _TYPES[settings.buffer_type]
    for module in model.modules() if dtype is not None else ():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not isinstance(module, LayerBalance | Router):
                setattr(module, name, buffer.to(dtype))


def _by_size(module: nn.Module, least: int, tied: set[int], found: list[nn.Module]) -> int:
    """Append modules with at least `least` parameters outside of appended inner ones; return how many remain.

    A list is not callable, so it is never wrapped itself. A tied parameter belongs to several modules, so it stays with
    the whole model.
    """
    if isinstance(module, FSDPModule):  # experts, which are sharded already
        return 0
    if isinstance(module, Router):  # it uses the weights of its gate without calling it
        return sum(parameter.numel() for parameter in module.parameters())
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    left = own + sum(_by_size(child, least, tied, found) for child in module.children())
    shares = any(id(parameter) in tied for parameter in module.parameters())
    if left < least or shares or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return left
    found.append(module)
    return 0


def reduce_sharded_parts(model: nn.Module) -> None:
    """Reduce the gradients of the sharded parts of a replicated model, such as its experts, after the last backward pass of a pipeline.

    torch 2.13 does so for the parts that are wrapped as the whole model is (`PipelineStage.perform_reduce_grad`). Without it,
    the optimizer would find no gradients of experts.
    """
    for part in model.modules() if isinstance(model, ReplicateModule) else ():
        if isinstance(part, FSDPModule) and not isinstance(part, ReplicateModule):
            state = fully_shard.state(part)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:
                group.post_backward()
            state._root_post_backward_final_callback()


@contextmanager
def _between(model: FSDPModule, zero: int) -> Iterator[None]:
    if zero == 1:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
    else:
        model.set_requires_all_reduce(False)
        model.set_reshard_after_backward(zero == 3)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
