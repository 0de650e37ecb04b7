"""Translate the line of a script that starts its ranks: srun, torchrun, accelerate, mpirun or python."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.resolved import shown_arguments

__all__ = ["WORD", "NoTranslationError", "expand", "keys_of_launch"]

# A word of a shell command, with its quotes and substitutions.
WORD = re.compile(r"""(?:[^\s"'`$\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$)+""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_TORCHRUN = re.compile(r"(?:\S*/)?(?:torchrun|accelerate launch|python[\d.]* -m torch\.distributed\.(?:run|launch)) ")
# Options of torchrun and accelerate that toolkit replaces; all others would be lost.
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


def expand(raw: str, known: Mapping[str, str]) -> str | None:
    """Return the value of a shell word with its known variables; None if only a shell can evaluate it."""
    parts = re.split(r"('[^']*')", raw)
    literal = "".join(part for part in parts if not part.startswith("'"))
    names = {match[1] or match[2] for match in _VARIABLE.finditer(literal)}
    if "$" in _VARIABLE.sub("", literal) or re.search(r"[`*?]|^~", literal) or not names <= known.keys():
        return None
    filled = [one if one[:1] == "'" else _VARIABLE.sub(lambda match: known[match[1] or match[2]], one) for one in parts]
    return " ".join(shlex.split("".join(filled)))


def keys_of_launch(
    command: str, known: Mapping[str, str], job: Mapping[str, Any], notes: list[str], where: str
) -> dict[str, Any]:
    """Return the keys of [job] for a launch: what runs, and on how many ranks. `job` has the keys of the directives."""
    words = WORD.findall(re.sub(r"^(exec|time)\s+", "", command))
    nodes, cpus = job.get("nodes", 1), job.get("cpus_per_rank", 1) * job.get("ranks_per_node", 1)
    keys: dict[str, Any] = {}
    is_parallel = words[0] in ("srun", "mpirun", "mpiexec")
    if is_parallel:
        words = _after_srun(words, known, nodes, keys, notes, where)
    if match := _TORCHRUN.match(" ".join(words) + " "):
        words, each = _after_torchrun(words[len(match[0].split()) :], known, nodes, where)
        each = each or job.get("gpus_per_node", 1)
        keys |= {"ranks_per_node": each} | ({"cpus_per_rank": max(1, cpus // each)} if "cpus_per_rank" in job else {})
        words = ["python", *_values(words, known, where)]
    else:
        words = _values(words, known, where)
    if not is_parallel and match is None:
        if nodes != 1 or not _PYTHON.fullmatch(words[0]):
            raise NoTranslationError(f"{where} starts no ranks with srun, mpirun, torchrun or accelerate")
        keys = {"ranks_per_node": 1} | ({"cpus_per_rank": cpus} if cpus > 1 else {})
    script = words[2:] if words[1:2] == ["-u"] else words[1:]
    if _PYTHON.fullmatch(words[0]) and script and script[0].endswith(".py"):
        return {"entry": script[0], **keys} | ({"argv": script[1:]} if script[1:] else {})
    return {"entry": words, **keys}


def _values(words: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    """Return arguments without the shell's `"$@"`, which those after `--` replace."""
    values: list[str] = []
    for word in words[:-1] if words and words[-1] in ('"$@"', "$@", '"${@}"') else words:
        if (value := expand(word, known)) is None:
            raise NoTranslationError(f"{where} uses {word}, which only a shell can evaluate")
        values += [value] if re.search(r"['\"]", word) else value.split()  # the shell splits unquoted variables
    if shown_arguments(values) != values:
        raise NoTranslationError(f"{where} has an argument that looks like a secret")
    return values


def _after_srun(
    words: Sequence[str], known: Mapping[str, str], nodes: int | str, keys: dict[str, Any], notes: list[str], where: str
) -> list[str]:
    """Return the program of srun or mpirun; add the keys that its options set, and notes on options without a key."""
    program, *rest = words
    while rest and rest[0].startswith("-"):
        option, equals, raw = rest.pop(0).partition("=")
        short = re.fullmatch(r"(-[nNc])(\d+)", option)
        key = _COUNTS.get(short[1] if short else option)
        if not equals and not short and (key or not option.startswith("--")) and rest and rest[0][0] != "-":
            equals, raw = " ", rest.pop(0)
        value = expand(short[2] if short else raw, known) or ""
        if key and value.isdecimal():
            keys[key] = int(value)
        elif key is None:
            notes.append(
                f"{where}: omitted {option}{equals}{raw} of {program}; `[launcher] options` of the site sets srun's"
            )
    ranks, nodes = keys.pop("ranks", 0), keys.get("nodes", nodes)
    if ranks and (not isinstance(nodes, int) or ranks % nodes):
        raise NoTranslationError(f"{where}: {ranks} ranks are not divisible by the nodes")
    if ranks:
        keys.setdefault("ranks_per_node", ranks // int(nodes))
    if not rest:
        raise NoTranslationError(f"{where} names no program")
    return rest


def _after_torchrun(words: list[str], known: Mapping[str, str], nodes: int | str, where: str) -> tuple[list[str], int]:
    """Return the script of torchrun or accelerate with its arguments, and the ranks per node; 0 if they are not set."""
    each = 0
    while words and words[0].startswith("-"):
        option, equals, raw = words.pop(0).replace("_", "-").partition("=")
        if not _REPLACED.fullmatch(option) and option not in _SWITCHES:
            raise NoTranslationError(f"{where}: {option} has no key")
        value = "" if option in _SWITCHES else expand(raw if equals or not words else words.pop(0), known) or ""
        if value.isdecimal() and option in ("--nproc-per-node", "--num-processes"):
            each = int(value) // (1 if "nproc" in option or not isinstance(nodes, int) else nodes)
    if not words:
        raise NoTranslationError(f"{where} starts no Python file")
    return words, each
