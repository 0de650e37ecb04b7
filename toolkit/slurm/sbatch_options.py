"""sbatch's options as users write them into lists: `--exclude=n9`, `--exclude n9`, `-x n9`, `-xn9`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from toolkit.errors import ToolkitError

_OPTION = re.compile(r"--?[A-Za-z]")
_SWITCHES = "bhHIkOQsuvVW"  # short options without a value
_JOINED = re.compile(rf"-[{_SWITCHES}]+(?![{_SWITCHES}])[A-Za-z]")  # `-HN9` is `-H -N 9`

ONE_OPTION_FIX = "write each option as its own string; put a value that contains an option after `=`: --comment=a -b"
# The fix for users who search sbatch's options for the components of a heterogeneous job.
COMPONENTS_ELSEWHERE = "the components of a heterogeneous job are tables of the job file"
COMPONENTS_FIX = "write a [[component]] for each (docs/heterogeneous.md)"


def value_of(option: str, name: str, letter: str = "") -> str | None:
    """The value of an option `--name` or `-letter`; None if it is another option.

    After `=` the value is unchanged; after a space it is read as in a #SBATCH line, possibly in quotes.
    """
    if option.startswith(f"--{name}="):
        return option.removeprefix(f"--{name}=").strip()
    if option.startswith(f"--{name} "):
        return _unquoted(option.removeprefix(f"--{name} "))
    if letter and option.startswith(f"-{letter}"):
        return _unquoted(option.removeprefix(f"-{letter}"))
    return None


def is_one_option(text: str) -> bool:
    """True if a string is one option, possibly with its value. Only sbatch would notice a second one.

    Everything after `=` is the value, which is quoted as a whole. After a space, a value that contains an option is in
    quotes: `--comment "a -b"`.
    """
    if "=" in text.partition(" ")[0]:
        return True
    return not _JOINED.match(text) and not any(map(_OPTION.match, _words(text)[1:]))


def begins_component(option: str) -> bool:
    """True if an option would start a component of a heterogeneous job: a `hetjob` line, or a colon."""
    return bool({"hetjob", "packjob", ":"} & {*option.split()})


def last_value_of(options: Iterable[str], name: str, letter: str = "") -> str:
    """The value that sbatch uses of an option that may be repeated; "" if it is missing."""
    values = (value_of(option, name, letter) for option in options)
    return next((value for value in reversed([*values]) if value is not None), "")


def excluded_nodes(own: str, options: Sequence[str], bad: Sequence[str]) -> str:
    """One host list of the nodes that a job excludes, in `own` and among its sbatch options, and of bad nodes.

    Raises:
        ToolkitError: the option names a file, which cannot be joined with a list.
    """
    given = last_value_of(options, "exclude", "x")
    if "/" in given and (own or bad):
        raise ToolkitError(
            f"the sbatch option --exclude={given} names a file, so {','.join(filter(None, [own, *bad]))} cannot be excluded as well",
            fix="list the nodes themselves in job.exclude",
        )
    return ",".join(dict.fromkeys(filter(None, [own, given, *bad])))


def _unquoted(text: str) -> str:
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote is an ordinary character
        return text.split()
