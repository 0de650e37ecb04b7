"""Options in the arguments of a program: find one, set its value, add the arguments with which a program continues."""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from toolkit.errors import ToolkitError

__all__ = ["NEWEST", "continued", "expanded", "find_option", "is_value", "set_value"]

NEWEST = "{newest}"  # in `restart.argv`: the newest path that `restart.progress` matches
_NUMBER = re.compile(r"-\.?\d.*")  # a negative number is the value of an option, not an option


def find_option(arguments: Sequence[str], name: str, *, where: str, fix: str) -> int | None:
    """Return the position of `--name V`, `--name=V` or `name=V`, where `-` and `_` are the same; None if there is none.

    Raises:
        ToolkitError: the option occurs twice. `fix` may contain `{values}`, the positions of its values, from 1.
    """
    found = [at for at, argument in enumerate(arguments) if _is_option(argument, name)]
    if len(found) > 1:
        values = [at + 1 if "=" in arguments[at] else at + 2 for at in found]
        raise ToolkitError(
            f"{name} occurs {len(found)} times in the arguments: {' '.join(arguments[at] for at in found)}",
            where=where, fix=fix.format(values=" or ".join(f"argv.{at}" for at in values)),
        )  # fmt: skip
    return found[0] if found else None


def is_value(arguments: Sequence[str], at: int) -> bool:
    """Return whether there is an argument at position `at` (from 0) that is not an option."""
    return at < len(arguments) and (not arguments[at].startswith("-") or bool(_NUMBER.fullmatch(arguments[at])))


def set_value(arguments: list[str], at: int, value: str) -> None:
    """Set the value of the option at position `at`, which keeps its form; an option without a value gets one."""
    option, equals, _ = arguments[at].partition("=")
    if equals:
        arguments[at] = f"{option}={value}"
    else:
        arguments[at + 1 : at + 1 + is_value(arguments, at + 1)] = [value]


def expanded(more: Sequence[str], newest: str | None) -> list[str]:
    """Return `more` with `newest` for `{newest}`; without one, an argument with it is omitted, with its option."""
    kept = (words for words in _options(more) if newest is not None or not any(NEWEST in word for word in words))
    return [word.replace(NEWEST, newest or "") for words in kept for word in words]


def continued(arguments: Sequence[str], more: Sequence[str], *, where: str) -> list[str]:
    """Return the arguments of a program that continues: options of `more` replace the same options, others are appended.

    Raises:
        ToolkitError: it is unknown what an option of `more` replaces: it occurs twice, or several words may be its value.
    """
    result, appended = list(arguments), list[str]()
    for words in _options(more):
        option, *values = words
        name, equals, value = option.partition("=")
        is_option, name = option.startswith("-") or bool(equals), name.lstrip("-")
        at = find_option(result, name, where=where, fix="write it once in the arguments") if is_option else None
        if at is None:
            appended += words
        elif values or equals:
            find_option(more, name, where=where, fix="write it once in restart.argv")
            _require_one_value(result, at, most=len(values), where=where)
            set_value(result, at, values[0] if values else value)
    return result + appended


def _require_one_value(arguments: Sequence[str], at: int, *, most: int, where: str) -> None:
    """Check that at most `most` words follow the option at `at`: of `--resume=true` none, as `--resume` may be a flag."""
    after = list(takewhile(lambda word: is_value([word], 0), arguments[at + 1 :]))
    if "=" not in arguments[at] and len(after) > most:
        option = arguments[at]
        raise ToolkitError(
            f"{' '.join([option, *after])} in the arguments: {after[most]} may be a value of {option} or not",
            where=where, fix=f"write {option}={after[0]}, or write what is not its value before {option}",
        )  # fmt: skip


def _options(more: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield each argument, and each option together with its value."""
    at = 0
    while at < len(more):
        is_open = more[at].startswith("-") and "=" not in more[at]
        count = 1 + (is_open and is_value(more, at + 1))
        yield more[at : at + count]
        at += count


def _is_option(argument: str, name: str) -> bool:
    option, equals, _ = argument.partition("=")
    dashes = len(option) - len(option.lstrip("-"))
    return bool(dashes or equals) and option[dashes:].replace("-", "_") == name.replace("-", "_")
