"""Replace one argument of a program in its list of arguments, for the tasks of a sweep."""

from collections.abc import Sequence

from toolkit.errors import ToolkitError
from toolkit.rundir.arguments import find_option, is_value, set_value

__all__ = ["SWEPT_ARGUMENT", "replace_argument"]

SWEPT_ARGUMENT = "argv."  # the prefix of the keys of a sweep that replace an argument


def replace_argument(arguments: Sequence[str], name: str, value: str, *, where: str) -> list[str]:
    """Return the arguments with the value of option `name` replaced, or of the argument at position `name` (from 1).

    Replaces the value of `--name V`, `--name=V` or `name=V`, where `-` and `_` are the same, and appends `--name=V` if
    there is none.

    Raises:
        ToolkitError: there is no such position, the option occurs twice, or it has no value.
    """
    replaced = list(arguments)
    if name.isdecimal():
        if not 1 <= int(name) <= len(replaced):
            raise ToolkitError(
                f"expected a position from 1 to {len(replaced)}, the number of arguments, got {name}",
                where=where, fix="sweep an option by its name, or add the argument to job.argv",
            )  # fmt: skip
        replaced[int(name) - 1] = value
        return replaced
    at = find_option(replaced, name, where=where, fix="sweep one of them by the position of its value: {values}")
    if at is None:
        return [*replaced, f"--{name}={value}"]
    if "=" not in (option := replaced[at]) and not is_value(replaced, at + 1):
        raise ToolkitError(
            f"expected a value after {option}, got {' '.join(replaced[at + 1 : at + 2]) or 'none'}",
            where=where, fix=f"write {option}=VALUE in the arguments",
        )  # fmt: skip
    set_value(replaced, at, value)
    return replaced
