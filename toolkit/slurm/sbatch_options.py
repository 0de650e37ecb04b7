"""sbatch's options as users write them into lists: `--exclude=n9`, `--exclude n9`, `-x n9`, `-xn9`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from toolkit.errors import ToolkitError

_OPTION = re.compile(r"--?[A-Za-z]")
_SWITCHES = "bhHIkOQsuvVW"  # letters without a value
_JOINED = re.compile(rf"-[{_SWITCHES}]+(?![{_SWITCHES}])[A-Za-z]")  # `-HN9` is `-H -N 9`

ONE_OPTION_FIX = (
    "write each option as its own string; write a value that contains such a term after `=`: --comment=a -b"
)
# Where the components of a heterogeneous job are said, for those who look among sbatch's options.
COMPONENTS_ELSEWHERE = "the components of a heterogeneous job are tables of the job file"
COMPONENTS_FIX = "write a [[component]] for each (docs/heterogeneous.md)"


def value_of(option: str, name: str, letter: str = "") -> str | None:
    """The value of an option that is called `--name` or `-letter`; None where it is another one.

    Behind `=` the value stands as it is, behind a blank as a #SBATCH line holds it, maybe in quotes.
    """
    if option.startswith(f"--{name}="):
        return option.removeprefix(f"--{name}=").strip()
    if option.startswith(f"--{name} "):
        return _unquoted(option.removeprefix(f"--{name} "))
    if letter and option.startswith(f"-{letter}"):
        return _unquoted(option.removeprefix(f"-{letter}"))
    return None


def is_one_option(text: str) -> bool:
    """Whether a string is one option, possibly with its value. toolkit would not see what sbatch treats as a second one.

    Everything after `=` is the value, which is quoted as a whole. After a space, a value with a term like an option is
    in quotes: `--comment "a -b"`.
    """
    if "=" in text.partition(" ")[0]:
        return True
    return not _JOINED.match(text) and not any(map(_OPTION.match, _words(text)[1:]))


def begins_component(option: str) -> bool:
    """Whether an option would make a heterogeneous job: a `hetjob` line, or a colon between two components."""
    return bool({"hetjob", "packjob", ":"} & {*option.split()})


def last_value_of(options: Iterable[str], name: str, letter: str = "") -> str:
    """The value that sbatch uses of an option that may occur several times; "" if it does not occur."""
    values = (value_of(option, name, letter) for option in options)
    return next((value for value in reversed([*values]) if value is not None), "")


def excluded_nodes(own: str, options: Sequence[str], bad: Sequence[str]) -> str:
    """One host list of the nodes that a job does not want, in `own` and among its sbatch options, and of bad ones.

    Raises:
        ToolkitError: the option names a file, which no list can be joined with.
    """
    given = last_value_of(options, "exclude", "x")
    if "/" in given and (own or bad):
        raise ToolkitError(
            f"the sbatch option --exclude={given} names a file, and {','.join(filter(None, [own, *bad]))} must be excluded as well",
            fix="write the nodes themselves into job.exclude",
        )
    return ",".join(dict.fromkeys(filter(None, [own, given, *bad])))


def _unquoted(text: str) -> str:
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote is an ordinary character
        return text.split()
