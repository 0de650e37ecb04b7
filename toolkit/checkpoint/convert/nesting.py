"""Nested state dicts and their keys: how DCP flattens one (torch 2.13), and the way back.

Dicts are always entered, lists when a tensor or a dict stands in them; anything else is a value. The keys of dicts become
text. The way back needs the paths, which a manifest keeps: a key alone does not tell a list from a dict, or a dot in a name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from toolkit.checkpoint.format.jsonvalues import MOST_LEVELS, too_deep
from toolkit.errors import ToolkitError

Path = tuple[str | int, ...]
_PARTS_SHOWN = 3  # of a path without end
_MOST_PLACES = 10_000_000  # of a state; no model has as many parameters, values and containers


def leaves(state: Any, is_tensor: Callable[[Any], bool], path: Path = (), *, where: str) -> Iterator[tuple[Path, Any]]:
    """The tensors and values of a nested state with their paths. `where` names what holds it.

    Raises:
        ToolkitError: a key is neither text nor a whole number, or the state holds itself.
    """
    if len(path) > MOST_LEVELS:
        raise too_deep(f"{where}: {joined(path[:_PARTS_SHOWN])}")
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise ToolkitError(
                    f"{key!r:.80} is a key, which neither text nor a whole number is",
                    where=f"{where}: {joined(path)}" if path else where,
                    fix="save this part with other keys, or take another part with --only",
                )
            yield from leaves(value, is_tensor, (*path, str(key)), where=where)
    elif isinstance(state, list) and _is_entered(state, is_tensor, MOST_LEVELS - len(path)):
        for place, value in enumerate(state):
            yield from leaves(value, is_tensor, (*path, place), where=where)
    else:
        yield path, state


def refuse_unfolding(state: Any, where: str) -> None:
    """Refuse a few lists that stand in one another so often that writing each place out would never end.

    Raises:
        ToolkitError: it would have more than ten million places.
    """
    places: dict[int, int] = {}  # of each container, by identity: what a shared one holds is counted once
    waiting = [(state, False)]
    while waiting:
        part, parts_are_counted = waiting.pop()
        if parts_are_counted:
            places[id(part)] = min(1 + sum(places.get(id(item), 1) for item in _items(part)), _MOST_PLACES + 1)
        elif isinstance(part, (Mapping, list, tuple)) and id(part) not in places:
            places[id(part)] = 1  # for a part that holds itself, which is refused on the way down
            waiting.append((part, True))
            waiting.extend((item, False) for item in _items(part))
    if places.get(id(state), 1) > _MOST_PLACES:
        raise ToolkitError(
            f"the same lists or dicts stand in one another so often that they make over {_MOST_PLACES:,} places",
            where=where,
            fix="save it without that part",
        )


def _items(part: Any) -> Collection[Any]:
    return part.values() if isinstance(part, Mapping) else part


def _is_entered(items: Sequence[Any], is_tensor: Callable[[Any], bool], levels: int) -> bool:
    """Whether a tensor or a dict stands in a list, or more levels than there may be: they are refused on the way down."""
    return levels < 0 or any(
        is_tensor(item)
        or isinstance(item, Mapping)
        or (isinstance(item, list) and _is_entered(item, is_tensor, levels - 1))
        for item in items
    )


def joined(path: Path) -> str:
    """The key of a path."""
    return ".".join(map(str, path))


def nested(entries: Mapping[Path, Any]) -> dict[str, Any]:
    """The state dict in which each value of `entries` stands at its path.

    Raises:
        ToolkitError: the paths do not make one: a value has others below it, a list has holes, or there is no end to them.
    """
    root: dict[str | int, Any] = {}
    for path, value in entries.items():
        if len(path) > MOST_LEVELS:
            raise too_deep(joined(path[:_PARTS_SHOWN]))
        place = root
        for part in path[:-1]:
            place = place.setdefault(part, _Node())
            if not isinstance(place, _Node):
                raise _contradiction(path)
        if path[-1] in place:
            raise _contradiction(path)
        place[path[-1]] = value
    if any(not isinstance(part, str) for part in root):
        raise ToolkitError("is a list and no dict", where="the exported part", fix="export what is around it")
    return {str(part): _finished(value, (part,)) for part, value in root.items()}


class _Node(dict[str | int, Any]):
    """A dict or list that is being put together, and no value of the state."""


def _finished(value: Any, path: Path) -> Any:
    if not isinstance(value, _Node):
        return value
    parts = {part: _finished(item, (*path, part)) for part, item in value.items()}
    if all(isinstance(part, str) for part in parts):
        return parts
    if set(parts) == set(range(len(parts))):
        return [parts[place] for place in range(len(parts))]
    raise ToolkitError(
        "is a list of which not every place is stored", where=joined(path), fix="choose another part with --only"
    )


def _contradiction(path: Path) -> ToolkitError:
    return ToolkitError(
        "cannot stand in a nested state: something else has its place, or that of what is around it",
        where=joined(path),
        fix="choose another part with --only",
    )
