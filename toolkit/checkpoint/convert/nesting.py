"""Flattens nested state dicts to keys as DCP (torch 2.13) does, and reverses this.

DCP descends into dicts, and into lists that contain a tensor or a dict. Keys of dicts become strings. The inverse needs
the paths of a manifest, because a key does not distinguish a list from a dict, or a separator from a dot in a name.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from toolkit.checkpoint.format.jsonvalues import MOST_LEVELS, too_deep
from toolkit.errors import ToolkitError

Path = tuple[str | int, ...]
_PARTS_SHOWN = 3  # how many parts of a path a message shows if a state contains itself, so that its path has no end
_MOST_ITEMS = 10_000_000  # far above the number of parameters, values and containers of any model


def leaves(state: Any, is_tensor: Callable[[Any], bool], path: Path = (), *, where: str) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and values of a nested state with their paths. `where` names its file in errors.

    Raises ToolkitError if a key is neither a string nor an integer, or the state contains itself.
    """
    if len(path) > MOST_LEVELS:
        raise too_deep(f"{where}: {joined(path[:_PARTS_SHOWN])}")
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise ToolkitError(
                    f"expected a string or an integer as a key, got {key!r:.80}",
                    where=f"{where}: {joined(path)}" if path else where,
                    fix="save this part with other keys, or select another part with --only",
                )
            yield from leaves(value, is_tensor, (*path, str(key)), where=where)
    elif isinstance(state, list) and _is_entered(state, is_tensor, MOST_LEVELS - len(path)):
        for index, value in enumerate(state):
            yield from leaves(value, is_tensor, (*path, index), where=where)
    else:
        yield path, state


def refuse_unfolding(state: Any, where: str) -> None:
    """Raise a ToolkitError if lists or dicts share contents so often that they expand to over ten million items."""
    counts: dict[int, int] = {}  # items of each container, by identity: the items of a shared one are counted once
    waiting = [(state, False)]
    while waiting:
        part, parts_are_counted = waiting.pop()
        if parts_are_counted:
            counts[id(part)] = min(1 + sum(counts.get(id(item), 1) for item in _items(part)), _MOST_ITEMS + 1)
        elif isinstance(part, (Mapping, list, tuple)) and id(part) not in counts:
            counts[id(part)] = 1  # prevents an endless loop if a part contains itself, which `leaves` rejects
            waiting.append((part, True))
            waiting.extend((item, False) for item in _items(part))
    if counts.get(id(state), 1) > _MOST_ITEMS:
        raise ToolkitError(
            f"shared references to the same lists or dicts would expand to over {_MOST_ITEMS:,} items",
            where=where,
            fix="save the state without these shared references",
        )


class Omitted:
    """Replaces an object of an imported file that cannot be read without running its code; `name` is its class."""

    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    __setstate__ = __init__


def omitted_in(value: Any) -> str:
    """Return the class of an object in `value` that `Omitted` replaces; "" if there is none."""
    waiting, seen = [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Omitted):
            return part.name
        if isinstance(part, (Mapping, list, tuple, set, frozenset)) and id(part) not in seen:
            seen.add(id(part))  # it may contain itself
            waiting.extend(part)
            waiting.extend(part.values() if isinstance(part, Mapping) else ())
    return ""


def _items(part: Any) -> Collection[Any]:
    return part.values() if isinstance(part, Mapping) else part


def _is_entered(items: Sequence[Any], is_tensor: Callable[[Any], bool], levels: int) -> bool:
    """Return whether `leaves` descends into a list: it contains a tensor or dict, or `leaves` must report its depth."""
    return levels < 0 or any(
        is_tensor(item)
        or isinstance(item, Mapping)
        or (isinstance(item, list) and _is_entered(item, is_tensor, levels - 1))
        for item in items
    )


def joined(path: Path) -> str:
    """Return the key for a path: its parts joined with dots."""
    return ".".join(map(str, path))


def nested(entries: Mapping[Path, Any]) -> dict[str, Any]:
    """Build the state dict from values by path. Raises ToolkitError if paths conflict, or a list lacks items."""
    root: dict[str | int, Any] = {}
    for path, value in entries.items():
        if len(path) > MOST_LEVELS:
            raise too_deep(joined(path[:_PARTS_SHOWN]))
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, _Node())
            if not isinstance(node, _Node):
                raise _contradiction(path)
        if path[-1] in node:
            raise _contradiction(path)
        node[path[-1]] = value
    if any(not isinstance(part, str) for part in root):
        raise ToolkitError("expected a dict, got a list", where="the exported part", fix="export the dict above it")
    return {str(part): _finished(value, (part,)) for part, value in root.items()}


class _Node(dict[str | int, Any]):
    """A dict or list that is being built, as opposed to a dict that is a value of the state."""


def _finished(value: Any, path: Path) -> Any:
    if not isinstance(value, _Node):
        return value
    parts = {part: _finished(item, (*path, part)) for part, item in value.items()}
    if all(isinstance(part, str) for part in parts):
        return parts
    if set(parts) == set(range(len(parts))):
        return [parts[index] for index in range(len(parts))]
    fix = "choose another part with --only"
    raise ToolkitError("is a list with missing items", where=joined(path), fix=fix)


def _contradiction(path: Path) -> ToolkitError:
    return ToolkitError(
        "conflicts with another value, which has the same path or a prefix of it",
        where=joined(path),
        fix="choose another part with --only",
    )
