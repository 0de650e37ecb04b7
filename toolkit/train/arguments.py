"""Read a job's `[args]` table into the dataclass that the job script defines."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from toolkit.config.table import form_of, nearest
from toolkit.errors import ToolkitError

__all__ = ["DividedBy", "check_divided", "read_arguments"]

Arguments = TypeVar("Arguments")

# Arguments of other trainers, whose effect other tables of the job file have.
_ELSEWHERE = {"device_map": "remove it: parallel.shard and parallel.tp split a model over ranks, one device each"}
_AS_IN_TABLES = ConfigDict(strict=True, allow_inf_nan=False)


@dataclasses.dataclass(frozen=True)
class DividedBy:
    """Annotates a field whose value must be divisible by that of another key, such as "args.heads" or "parallel.tp".

    With `times`, it must be divisible by this multiple of it, unless the other value is 1.
    """

    key: str
    times: int = 1


def read_arguments(kind: type[Arguments], table: Mapping[str, Any]) -> Arguments:
    """Return an instance of the dataclass `kind` with the values of `[args]`; every field needs a default.

    Declare limits in a field's type: `Annotated[float, Field(ge=0, lt=1)]` with pydantic's `Field`, or `Annotated[int,
    DividedBy("args.heads")]`.

    Raises:
        ToolkitError: a key is unknown, a value has another type or exceeds its limits, or is not divisible.
    """
    hashable: Any = kind
    hints, adapters = _hints(hashable), _adapters(hashable)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in names:
            close = nearest(key, names)
            fix = _ELSEWHERE.get(key) or (f"write {close[0]!r}" if close else f"use one of {', '.join(names)}")
            raise ToolkitError(f"this job has no argument {key!r}", where=f"args.{key}", fix=fix)
        try:
            values[key] = adapters[key].validate_python(value)
        except ValidationError as error:
            said = error.errors(include_url=False)[0]["msg"]
            raise ToolkitError(
                f"{value!r} is rejected: {said[:1].lower()}{said[1:]}",
                where=f"args.{key}",
                fix=f"choose {form_of(FieldInfo.from_annotation(hints[key]))}",
            ) from None
    filled = kind(**values)
    check_divided(filled, {f"args.{name}": getattr(filled, name) for name in names})
    return filled


@lru_cache(maxsize=16)  # a sweep reads thousands of tables into one dataclass
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


@lru_cache(maxsize=16)
def _adapters(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint, config=_AS_IN_TABLES) for name, hint in _hints(kind).items()}


def check_divided(filled: object, keys: Mapping[str, Any]) -> None:
    """Check the `DividedBy` fields of `filled` against `keys`, which maps the names of their divisors to values.

    Raises:
        ToolkitError: a field is not divisible; the error suggests the nearest valid values.
    """
    kind: Any = type(filled)
    for name, hint in _hints(kind).items():
        for limit in getattr(hint, "__metadata__", ()):
            if isinstance(limit, DividedBy) and limit.key in keys:
                _check_multiple(name, getattr(filled, name), limit, keys[limit.key])


def _check_multiple(name: str, value: Any, limit: DividedBy, other: Any) -> None:
    key, times = limit.key, limit.times
    if not isinstance(value, int) or not isinstance(other, int) or other < 1 or (times > 1 and other == 1):
        return
    divisor = times * other
    if value % divisor == 0:
        return
    of_args = key.startswith("args.")
    multiples = [one for one in (value // divisor * divisor, (value // divisor + 1) * divisor) if one]
    divisors = [one for one in range(1, value + 1) if value % (one if one == 1 else times * one) == 0]
    fitting = [*[one for one in divisors if one < other][-1:], *[one for one in divisors if one > other][:1]]
    fixes = [f"{key} = {_either(fitting)}", f"args.{name} = {_either(multiples)}"]
    raise ToolkitError(
        f"args.{name} = {value} is not a multiple of {f'{times} x ' if times > 1 else ''}{key} = {divisor}",
        where=f"args.{name}" if of_args else key,
        fix=", or ".join(reversed(fixes) if of_args else fixes),
    )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
