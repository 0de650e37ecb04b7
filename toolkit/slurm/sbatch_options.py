"""Parse sbatch options as users write them in lists: `--exclude=n9`, `--exclude n9`, `-x n9`, `-xn9`."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from toolkit.errors import ToolkitError

__all__ = [
    "COMPONENTS_ELSEWHERE", "COMPONENTS_FIX", "ONE_OPTION_FIX", "begins_component", "excluded_nodes", "gpus_of",
    "is_one_option", "last_value_of", "memory_mib", "value_of",
]  # fmt: skip

_OPTION = re.compile(r"--?[A-Za-z]")
_SWITCHES = "bhHIkOQsuvVW"  # short options without a value
_JOINED = re.compile(rf"-[{_SWITCHES}]+(?![{_SWITCHES}])[A-Za-z]")  # `-HN9` is `-H -N 9`

ONE_OPTION_FIX = "write each option as its own string; put a value that contains an option after `=`: --comment=a -b"
# The fix for sbatch options and keys that users try for heterogeneous jobs.
COMPONENTS_ELSEWHERE = "the components of a heterogeneous job are tables of the job file"
COMPONENTS_FIX = "write a [[component]] for each (docs/heterogeneous.md)"


def value_of(option: str, name: str, letter: str = "") -> str | None:
    """Return the value of `option` if it is `--name` or `-letter`; None if it is another option.

    After `=`, the value is unchanged; after a space it may be quoted, as in a #SBATCH line.
    """
    if option.startswith(f"--{name}="):
        return option.removeprefix(f"--{name}=").strip()
    if option.startswith(f"--{name} "):
        return unquoted(option.removeprefix(f"--{name} "))
    if letter and option.startswith(f"-{letter}"):
        return unquoted(option.removeprefix(f"-{letter}"))
    return None


def is_one_option(text: str) -> bool:
    """Return whether a string is a single option, with or without a value.

    sbatch treats everything after `=` as the value. A value after a space needs quotes if a part of
    it looks like an option: `--comment "a -b"`.
    """
    if "=" in text.partition(" ")[0]:
        return True
    return not _JOINED.match(text) and not any(map(_OPTION.match, _words(text)[1:]))


def begins_component(option: str) -> bool:
    """Return whether an option would start a component of a heterogeneous job: `hetjob`, `packjob` or a colon."""
    return bool({"hetjob", "packjob", ":"} & {*option.split()})


def last_value_of(options: Iterable[str], name: str, letter: str = "") -> str:
    """Return the last value of an option that may be repeated, which sbatch uses; "" if the option is missing."""
    values = (value_of(option, name, letter) for option in options)
    return next((value for value in reversed([*values]) if value is not None), "")


def excluded_nodes(own: str, options: Sequence[str], bad: Sequence[str]) -> str:
    """Return the nodes to exclude from `own`, sbatch `options` and `bad`; ToolkitError if an option names a file."""
    given = last_value_of(options, "exclude", "x")
    if "/" in given and (own or bad):
        raise ToolkitError(
            f"the sbatch option --exclude={given} names a file, to which toolkit cannot add {','.join(filter(None, [own, *bad]))}",
            fix="list the nodes themselves in job.exclude",
        )
    return ",".join(dict.fromkeys(filter(None, [own, given, *bad])))


def unquoted(text: str) -> str:
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote is an ordinary character
        return text.split()


_NUMBER = re.compile(r"([0-9]*\.?[0-9]+)([KMGTP]?)", re.ASCII)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_GPU = re.compile(r"gpu(?::([A-Za-z][\w.-]*))?(?::([0-9]+))?(?:\(.*)?", re.ASCII)


def memory_mib(text: str) -> float | None:
    """Return the MiB in `4000`, `4000M` or `1.5T`; None for anything else, such as `UNLIMITED`."""
    match = _NUMBER.fullmatch(text)
    return float(match[1]) * _MIB[match[2]] if match else None


def parse_tres(text: str) -> dict[str, float]:
    """Return the counts in a list such as `cpu=4,mem=8G`, `mem` in MiB; resources without a number are omitted."""
    return {name: number * (_MIB[unit] if name == "mem" else 1.0) for name, number, unit in _numbers(text)}


def parse_weights(text: str) -> dict[str, float]:
    """Return the billing weights in `CPU=1.0,Mem=0.25G,GRES/gpu=16` by lower-case name; `mem` is per MiB."""
    weights = ((name.lower(), number, unit) for name, number, unit in _numbers(text))
    return {name: number / (_MIB[unit] if name == "mem" else 1.0) for name, number, unit in weights}


def _numbers(text: str) -> Iterator[tuple[str, float, str]]:
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if match := _NUMBER.fullmatch(value):
            yield name, float(match[1]), match[2]


def gpus_of(gres: str) -> dict[str, int]:
    """Return the GPUs by type ("" if unnamed) in a GRES list such as `gpu:a100:4(S:0-1),gpu:v100:2,nvme:1` or `gpu:4`."""
    counts: dict[str, int] = {}
    for entry in re.split(r",(?![^(]*\))", gres):
        match = _GPU.fullmatch(entry.strip())
        if match:
            counts[match[1] or ""] = counts.get(match[1] or "", 0) + int(match[2] or 1)
    return counts
