"""The JSON state of a job's objects: schedules, scalers, samplers, counters, plain values."""

from collections import Counter, OrderedDict
from typing import Any, Protocol, runtime_checkable

from toolkit.errors import ToolkitError

_DICTS = (Counter, OrderedDict)  # subclasses of dict that a load restores


@runtime_checkable
class Stateful(Protocol):
    """The interface of torch's learning-rate schedulers, gradient scalers and data loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


def values_of(things: dict[str, Any]) -> dict[str, Any]:
    """Return the state of each object, or a plain value itself; a save rejects values that JSON does not support."""
    return {name: _plain(_state_of(thing)) for name, thing in things.items()}


def take_state(name: str, thing: Stateful, saved: Any) -> bool:
    """Load an object's saved state; return True if the checkpoint has none.

    Raises:
        ToolkitError: the state belongs to another kind of object.
    """
    fresh = thing.state_dict()
    if not saved:
        return bool(fresh)
    if isinstance(saved, dict) and fresh and not saved.keys() & fresh.keys():
        raise ToolkitError(
            f"expected state with {', '.join(map(str, fresh))}, got {', '.join(map(str, saved))} from the checkpoint",
            where=name,
            fix="resume with the kind of object that was saved",
        )
    thing.load_state_dict(_as_before(saved, fresh))
    return False


def take_extra(things: dict[str, Any], name: str, saved: dict[str, Any]) -> bool:
    """Load the saved state of `things[name]`; a plain value is replaced. Return True if the checkpoint has none."""
    if name not in saved:
        return True
    thing = things[name]
    if isinstance(thing, Stateful):
        return take_state(name, thing, saved[name])
    things[name] = _as_before(saved[name], thing)
    return False


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if isinstance(thing, Stateful) else thing


def _plain(value: Any) -> Any:
    if type(value) in (dict, *_DICTS):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if type(value) is list else value


def _as_before(value: Any, fresh: Any) -> Any:
    """Return a saved value, with its dicts converted to the dict types of `fresh` at the same positions."""
    if type(value) is dict and type(fresh) in (dict, *_DICTS):
        return type(fresh)({key: _as_before(item, fresh.get(key)) for key, item in value.items()})
    if type(value) is list and type(fresh) is list and len(value) == len(fresh):
        return [_as_before(item, other) for item, other in zip(value, fresh, strict=True)]
    return value
