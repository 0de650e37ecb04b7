"""Find the blocks of a model: its repeated layers, which account for most weights, activations and compute time."""

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from toolkit.errors import ToolkitError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: nn.Module, below: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks by name, in model order.

    Args:
        below: names of the modules whose children are the blocks, such as "encoder.layers". By default, the outermost
            containers (ModuleList, ModuleDict, Sequential) whose members have one class and child modules.

    Raises:
        ToolkitError: the model has no module of a name in `below`.
    """
    containers = _named(model, below) if below else dict(_lists(model, ""))
    return {_joined(name, child): block for name, holder in containers.items() for child, block in _members(holder)}


def needed_blocks(model: nn.Module, what_for: str, below: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return `blocks_of`, and reject a model without blocks.

    Raises:
        ToolkitError: the model has no blocks.
    """
    blocks = blocks_of(model, below)
    if not blocks:
        raise ToolkitError(
            f"{what_for} requires a model with repeated blocks, and {type(model).__name__} has no blocks",
            where="model",
            fix="put the repeated layers into an nn.ModuleList, or pass their parent, such as below=['encoder.layers']",
        )
    return blocks


def is_below(name: str, modules: Collection[str]) -> bool:
    """Return whether a name is that of one of these modules, or of something in it."""
    return any(name == one or name.startswith(f"{one}.") for one in modules)


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _CONTAINERS) and _is_repeated([block for _, block in _members(module)]):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _lists(child, _joined(name, child_name))


def _is_repeated(members: Sequence[nn.Module]) -> bool:
    """Return True if all members have one class and child modules; a list of leaf modules is part of one block."""
    return len({type(member) for member in members}) == 1 and all(any(member.children()) for member in members)


def _named(model: nn.Module, below: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if unknown := [name for name in below if name not in modules]:
        raise ToolkitError(
            f"{type(model).__name__} has no module {', '.join(unknown)}",
            where="model",
            fix=f"use names of its modules, such as {', '.join(name for name, _ in model.named_children())}",
        )
    return {name: modules[name] for name in below}


def _members(holder: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(holder.named_children())


def _joined(above: str, name: str) -> str:
    return f"{above}.{name}" if above else name
