"""Translate the line of a script that starts its ranks: srun, torchrun, accelerate, mpirun or python."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from toolkit.config.resolved import looks_secret, shown_arguments

__all__ = ["WORD", "NoTranslationError", "expand", "is_secret", "keys_of_launch"]

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
# Options of srun that change what it prints or where ranks run, but not the ranks.
_SRUN_SWITCHES = frozenset({"-l", "--label", "-u", "--unbuffered", "-v", "--verbose", "-Q", "--quiet", "--exclusive"})
_SRUN_OPTIONS = frozenset({
    "--mpi", "--distribution", "--kill-on-bad-exit", "--output",
    "--error", "--job-name", "--hint",
})  # fmt: skip
# The job's own counts, which the directives set.
_OWN_COUNT = re.compile(r'"?\$\{?SLURM_(?:NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE|CPUS_PER_TASK)\}?"?')
_PASSWORD_IN_URL = re.compile(r"://[^/\s:]+:[^@\s]+@")
# The options of srun and mpirun that set keys.
_COUNTS = {
    "-n": "ranks", "-np": "ranks", "--ntasks": "ranks", "-N": "nodes", "--nodes": "nodes",
    "--ntasks-per-node": "ranks_per_node", "-c": "cpus_per_rank", "--cpus-per-task": "cpus_per_rank",
}  # fmt: skip


class NoTranslationError(Exception):
    """The reason why a script has no translation and stays a script."""


def expand(raw: str, known: Mapping[str, str]) -> str | None:
    """Return the value of a shell argument with its known variables; None if only a shell can evaluate it."""
    value, quote, at = "", "", 0
    while at < len(raw):
        character = raw[at]
        if character == (quote or character) and character in "\"'":
            quote = "" if quote else character
        elif quote == "'":
            value += character
        elif character == "\\":
            at += 1
            value += raw[at : at + 1] if not quote or raw[at : at + 1] in '"\\$`' else raw[at - 1 : at + 1]
        elif character == "$":
            match = _VARIABLE.match(raw, at)
            name = (match[1] or match[2]) if match else ""
            if match is None or name not in known:
                return None
            value += known[name]
            at = match.end() - 1
        elif character == "`" or (not quote and character in "*?[{~"):
            return None
        else:
            value += character
        at += 1
    return None if quote else value


def is_secret(words: Sequence[str]) -> bool:
    """Return whether an argument looks like a secret by its value, or by its name: NAME=V, --name=V or --name V."""
    if shown_arguments(list(words)) != list(words) or any(_PASSWORD_IN_URL.search(word) for word in words):
        return True
    pairs = [re.fullmatch(r"-*([A-Za-z_][\w-]*)=(.*)", word, re.DOTALL) for word in words]
    named = [(pair[1], pair[2]) for pair in pairs if pair]
    named += [(one.lstrip("-"), other) for one, other in pairwise(words) if one.startswith("--")]
    return any(looks_secret(f"env.vars.{name.replace('-', '_')}", value.strip("\"'")) for name, value in named)


def keys_of_launch(
    command: str, known: Mapping[str, str], job: Mapping[str, Any], notes: list[str], where: str, activation: str = ""
) -> dict[str, Any]:
    """Return the keys of [job] for a launch with those of the directives; `activation` is the line that sets the Python."""
    words = WORD.findall(re.sub(r"^(exec|time)\s+", "", command))
    if command.split()[0] == "time":
        notes.append(f"{where}: omitted `time`; `toolkit status` shows the times of a run")
    nodes, cpus = job.get("nodes", 1), job.get("cpus_per_rank", 1) * job.get("ranks_per_node", 1)
    keys: dict[str, Any] = {}
    is_parallel = words[0] in ("srun", "mpirun", "mpiexec")
    if is_parallel:
        words = _after_srun(words, known, nodes, keys, notes, where)
    if match := _TORCHRUN.match(" ".join(words) + " "):
        program = match[0].split()[0]
        if "/" in program and not _PYTHON.fullmatch(program):
            raise NoTranslationError(f"{where} runs {program} in a Python that only this file names")
        words, each = _after_torchrun(words[len(match[0].split()) :], known, job, notes, where)
        if "accelerate" in program and not re.search(r"--num[-_]processes", command):
            raise NoTranslationError(f"{where}: without --num_processes, accelerate reads its own configuration")
        keys |= {"ranks_per_node": each} | ({"cpus_per_rank": max(1, cpus // each)} if "cpus_per_rank" in job else {})
        if keys.get("cpus_per_rank", cpus) * each != cpus:
            notes.append(f"{where}: {each} ranks of {keys['cpus_per_rank']} CPUs; the script requests {cpus} per node")
        words = [program if _PYTHON.fullmatch(program) else "python", *_values(words, known, where)]
    else:
        words = _values(words, known, where)
    if not is_parallel and match is None:
        if not _PYTHON.fullmatch(words[0]):
            raise NoTranslationError(f"{where} has no translation: {command[:60]}")
        if nodes != 1:
            raise NoTranslationError(f"{where} starts no ranks with srun, mpirun, torchrun or accelerate")
        keys = {"ranks_per_node": 1} | ({"cpus_per_rank": cpus} if cpus > 1 else {})
    script = words[2:] if words[1:2] == ["-u"] else words[1:]
    is_of_path = _PYTHON.fullmatch(words[0]) and "/" not in words[0]
    if activation and is_of_path:
        notes.append(f"{activation}: `{words[0]}` runs in the environment that this line activates")
    elif is_of_path and script and script[0].endswith(".py"):
        notes.append(f'{where}: ranks run in the Python of toolkit; entry = ["PYTHON", ...] runs another')
        return {"entry": script[0], **keys} | ({"argv": script[1:]} if script[1:] else {})
    return {"entry": words, **keys}


def _values(words: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    """Return arguments without the shell's `"$@"`, which those after `--` replace."""
    values: list[str] = []
    for word in words[:-1] if words and words[-1] in ('"$@"', "$@", '"${@}"') else words:
        if (value := expand(word, known)) is None:
            raise NoTranslationError(f"{where} uses {word}, which only a shell can evaluate")
        values += [value] if re.search(r"['\"\\]", word) else value.split()  # the shell splits unquoted variables
    if is_secret(values):
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
        if key and not equals and not short:
            raw = rest.pop(0) if rest else ""
        if key and not _OWN_COUNT.fullmatch(raw):
            keys[key] = _count(short[2] if short else raw, known, option, where)
        elif (
            key is None
            and option not in _SRUN_SWITCHES
            and (option not in _SRUN_OPTIONS or not equals or expand(raw, known) is None)
        ):
            raise NoTranslationError(f"{where}: {option} of {program} has no key")
        elif key is None:
            notes.append(
                f"{where}: omitted {option}{equals}{raw} of {program}; `job.launcher_options` sets options of the launcher"
            )
    ranks, nodes = keys.pop("ranks", 0), keys.get("nodes", nodes)
    if ranks and (not isinstance(nodes, int) or ranks % nodes):
        raise NoTranslationError(f"{where}: {ranks} ranks are not divisible by the nodes")
    if ranks:
        keys.setdefault("ranks_per_node", ranks // int(nodes))
    if not rest or ":" in rest:
        raise NoTranslationError(f"{where} names {'several programs' if rest else 'no program'}")
    return rest


def _count(raw: str, known: Mapping[str, str], option: str, where: str) -> int:
    value = expand(raw, known)
    if value is None or not value.isdecimal():
        raise NoTranslationError(f"{where}: only a shell can evaluate {option} {raw}")
    return int(value)


def _after_torchrun(
    words: list[str], known: Mapping[str, str], job: Mapping[str, Any], notes: list[str], where: str
) -> tuple[list[str], int]:
    """Return the script of torchrun or accelerate with its arguments, and the ranks per node."""
    nodes, each = job.get("nodes", 1), 1
    while words and words[0].startswith("-"):
        typed, equals, raw = words.pop(0).partition("=")
        option = typed.replace("_", "-")
        if not _REPLACED.fullmatch(option) and option not in _SWITCHES:
            raise NoTranslationError(f"{where}: {typed} has no key")
        if option not in _SWITCHES and not equals:
            raw = words.pop(0) if words else ""
        if option in ("--nproc-per-node", "--num-processes"):
            each = _ranks_of_gpus(raw, job) or _count(raw, known, option, where)
        if option == "--num-processes":
            if not isinstance(nodes, int) or each % nodes:
                raise NoTranslationError(f"{where}: {each} processes are not divisible by the nodes")
            each //= nodes
        if option == "--max-restarts":
            notes.append(f"{where}: omitted {typed}; `restart.crashes` limits restarts")
    if not words:
        raise NoTranslationError(f"{where} starts no Python file")
    return words, each


def _ranks_of_gpus(raw: str, job: Mapping[str, Any]) -> int:
    """Return the GPUs per node if torchrun starts a rank on each; 0 for any other number."""
    return (
        int(job.get("gpus_per_node", 0))
        if raw.strip('"') in ("gpu", "$SLURM_GPUS_ON_NODE", "${SLURM_GPUS_ON_NODE}")
        else 0
    )
