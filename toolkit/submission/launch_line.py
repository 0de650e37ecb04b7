"""Translate the line of a script that starts its ranks: srun, torchrun, accelerate, mpirun or python."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.resolved import shown_arguments
from toolkit.rundir.files import typed_path

__all__ = ["WORD", "Launch", "NoTranslationError", "expand", "launch_of"]

# A word of a shell command, with its quotes and substitutions.
WORD = re.compile(r"""(?:[^\s"'`$\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$)+""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_TORCHRUN = re.compile(r"(?:\S*/)?(?:torchrun|accelerate launch|python[\d.]* -m torch\.distributed\.(?:run|launch)) ")
# Options of launchers that toolkit replaces, with and without a value; all others would be lost.
_REPLACED = re.compile(
    r"--(nnodes|nproc-per-node|node-rank|master-(addr|port)|rdzv-\w+|max-restarts|num-(processes|machines)|machine-rank"
    r"|main-process-(ip|port))"
)
_SWITCHES = frozenset({"--standalone", "--multi-gpu", "--same-network", "--use-env"})
# The options of srun and mpirun that set keys.
_COUNTS = {
    "-n": "ranks", "-np": "ranks", "--ntasks": "ranks", "-N": "nodes", "--nodes": "nodes",
    "--ntasks-per-node": "ranks_per_node", "-c": "cpus_per_rank", "--cpus-per-task": "cpus_per_rank",
}  # fmt: skip


class NoTranslationError(Exception):
    """The reason why a script has no translation and stays a script."""


@dataclass
class Launch:
    """What each rank runs, with keys of [job] for the number of ranks."""

    entry: str | list[str]
    argv: list[str]
    keys: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def expand(raw: str, known: Mapping[str, str]) -> str | None:
    """Return the value of a shell word with its known variables; None if only a shell can evaluate it."""
    parts = re.split(r"('[^']*')", raw)
    literal = "".join(part for part in parts if not part.startswith("'"))
    names = {match[1] or match[2] for match in _VARIABLE.finditer(literal)}
    if "$" in _VARIABLE.sub("", literal) or re.search(r"[`*?]", literal) or not names <= known.keys():
        return None
    filled = [one if one[:1] == "'" else _VARIABLE.sub(lambda match: known[match[1] or match[2]], one) for one in parts]
    value = " ".join(shlex.split("".join(filled)))
    return str(typed_path(value)) if raw.startswith("~") else value


def launch_of(command: str, known: Mapping[str, str], job: Mapping[str, Any], where: str) -> Launch:
    """Return the translation of a launch; `job` has the keys of the directives.

    Raises:
        NoTranslationError: the line has none.
    """
    words = [match[0] for match in WORD.finditer(re.sub(r"^(exec|time)\s+", "", command))]
    keys: dict[str, Any] = {}
    notes: list[str] = []
    is_parallel = words[0] in ("srun", "mpirun", "mpiexec")
    if is_parallel:
        words = _after_srun(words, known, job, keys, notes, where)
    if match := _TORCHRUN.match(" ".join(words) + " "):
        words = _after_torchrun(words[len(match[0].split()) :], known, job, keys, where)
        return Launch(words[0], _arguments(words[1:], known, where), keys, notes)
    words = _arguments(words, known, where)
    cpus = job.get("cpus_per_rank", 1) * job.get("ranks_per_node", 1)
    if not is_parallel:
        if job.get("nodes", 1) != 1 or not _PYTHON.fullmatch(words[0]):
            raise NoTranslationError(f"{where} starts no ranks with srun, mpirun, torchrun or accelerate")
        keys = {"ranks_per_node": 1} | ({"cpus_per_rank": cpus} if cpus > 1 else {})
    script = words[2:] if words[1:2] == ["-u"] else words[1:]
    if _PYTHON.fullmatch(words[0]) and script and script[0].endswith(".py"):
        return Launch(script[0], script[1:], keys, notes)
    return Launch(words, [], keys, notes)


def _arguments(words: list[str], known: Mapping[str, str], where: str) -> list[str]:
    """Return arguments without the shell's `"$@"`, which those after `--` replace."""
    if words and words[-1] in ('"$@"', "$@", '"${@}"'):
        words = words[:-1]
    values = []
    for word in words:
        if (value := expand(word, known)) is None:
            raise NoTranslationError(f"{where} uses {word}, which only a shell can evaluate")
        values += [value] if re.search(r"['\"]", word) else value.split()  # the shell splits unquoted variables
    if shown_arguments(values) != values:
        raise NoTranslationError(f"{where} has an argument that looks like a secret")
    return values


def _after_srun(
    words: list[str],
    known: Mapping[str, str],
    job: Mapping[str, Any],
    keys: dict[str, Any],
    notes: list[str],
    where: str,
) -> list[str]:
    """Return the program of srun or mpirun; add the keys that its options set, and notes on options without a key."""
    program, *rest = words
    found: dict[str, int] = {}
    while rest and rest[0].startswith("-"):
        option, equals, raw = rest.pop(0).partition("=")
        short = re.fullmatch(r"(-[nNc])(\d+)", option)
        key = _COUNTS.get(short[1] if short else option)
        takes_next = (
            not equals and not short and (key or not option.startswith("--")) and rest[:1] and rest[0][0] != "-"
        )
        raw = rest.pop(0) if takes_next else short[2] if short else raw
        value = expand(raw, known) or ""
        if key and value.isdecimal():
            found[key] = int(value)
        elif key is None:
            shown = option + (f" {raw}" if takes_next else equals + raw)
            notes.append(
                f"{where}: omitted {shown} of {program}; `[launcher] options` of the site file sets srun's options"
            )
    ranks, nodes = found.pop("ranks", 0), found.get("nodes", job.get("nodes", 1))
    keys |= found
    if ranks and "ranks_per_node" not in found:
        if not isinstance(nodes, int) or ranks % nodes:
            raise NoTranslationError(f"{where}: {ranks} ranks are not divisible by the nodes")
        keys["ranks_per_node"] = ranks // nodes
    if not rest:
        raise NoTranslationError(f"{where} names no program")
    return rest


def _after_torchrun(
    words: list[str], known: Mapping[str, str], job: Mapping[str, Any], keys: dict[str, Any], where: str
) -> list[str]:
    """Return the script of torchrun or accelerate with its arguments; add the keys for its ranks."""
    each = 0
    while words and words[0].startswith("-"):
        option, equals, raw = words.pop(0).replace("_", "-").partition("=")
        if option in _SWITCHES:
            continue
        if not _REPLACED.fullmatch(option):
            raise NoTranslationError(f"{where}: {option} has no key")
        value = expand(raw if equals else words.pop(0) if words else "", known) or ""
        if value.isdecimal() and option in ("--nproc-per-node", "--num-processes"):
            each = int(value) // (1 if "nproc" in option else int(job.get("nodes", 1)))
    if not words or not words[0].endswith(".py"):
        raise NoTranslationError(f"{where} starts no Python file")
    each = each or int(job.get("gpus_per_node", 0))
    cpus = job.get("cpus_per_rank", 1) * job.get("ranks_per_node", 1)
    keys |= {"ranks_per_node": each} if each else {}
    keys |= {"cpus_per_rank": max(1, cpus // each)} if each and "cpus_per_rank" in job else {}
    return words
