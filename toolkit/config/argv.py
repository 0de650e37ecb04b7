"""Replace one argument of a program in its list of arguments, for the tasks of a sweep."""

import re
from collections.abc import Sequence

from toolkit.errors import ToolkitError

__all__ = ["SWEPT_ARGUMENT", "replace_argument"]

SWEPT_ARGUMENT = "argv."  # the prefix of the keys of a sweep that replace an argument
_NUMBER = re.compile(r"-\.?\d.*")  # a negative number is the value of an option, not an option


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
    found = [at for at, argument in enumerate(replaced) if _is_option(argument, name)]
    if len(found) > 1:
        values = [at + 1 if "=" in replaced[at] else at + 2 for at in found]
        raise ToolkitError(
            f"{name} occurs {len(found)} times in the arguments: {' '.join(replaced[at] for at in found)}",
            where=where, fix=f"sweep one of them by the position of its value: {' or '.join(f'argv.{at}' for at in values)}",
        )  # fmt: skip
    if not found:
        return [*replaced, f"--{name}={value}"]
    (at,) = found
    option, equals, _ = replaced[at].partition("=")
    if equals:
        replaced[at] = f"{option}={value}"
    elif at + 1 == len(replaced) or (replaced[at + 1].startswith("-") and not _NUMBER.fullmatch(replaced[at + 1])):
        raise ToolkitError(
            f"expected a value after {option}, got {' '.join(replaced[at + 1 : at + 2]) or 'none'}",
            where=where, fix=f"write {option}=VALUE in the arguments",
        )  # fmt: skip
    else:
        replaced[at + 1] = value
    return replaced


def _is_option(argument: str, name: str) -> bool:
    option, equals, _ = argument.partition("=")
    dashes = len(option) - len(option.lstrip("-"))
    return bool(dashes or equals) and option[dashes:].replace("-", "_") == name.replace("-", "_")
