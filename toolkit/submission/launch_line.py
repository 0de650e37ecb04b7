"""Translate the line of a script that starts its ranks: srun, torchrun, mpirun or python."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from toolkit.config.resolved import looks_secret, shown_arguments

__all__ = [
    "QUOTED", "TORCHRUN", "WORD", "NoTranslationError", "expand", "is_secret", "keys_of_launch", "torchrun_options",
]  # fmt: skip

# The strings and substitutions of a shell command, and one argument of it.
QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'|`[^`]*`|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\$"""
WORD = re.compile(rf"""(?:[^ \t\n"'`$\\]|{QUOTED})+""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
TORCHRUN = re.compile(r"(?:\S*/)?(?:torchrun|python[\d.]* -m torch\.distributed\.(?:run|launch)) ")
_OTHER_LAUNCHER = re.compile(r"(?:.*/)?(accelerate|deepspeed|torchrun)")
# Options of torchrun that toolkit replaces; all others would be lost.
_REPLACED = re.compile(
    r"--(nnodes|nproc-per-node|node-rank|master-(addr|port)|rdzv-\w+|max-restarts|standalone|use-env)"
)
_SWITCHES = frozenset({"--standalone", "--use-env", "--no-python", "--module", "-m", "--run-path"})
# Options of srun that change what it prints or where it prints, but not the ranks.
_SRUN_SWITCHES = frozenset({"-l", "--label", "-u", "--unbuffered", "-v", "--verbose", "-Q", "--quiet", "--exclusive"})
_SRUN_OPTIONS = frozenset({"--mpi", "--kill-on-bad-exit", "--output", "--error", "--job-name"})
_SPLITS = re.compile(r"[\s*?\[\\]")  # an unquoted value with these is not one argument
_PASSWORD_IN_URL = re.compile(r"://[^/\s:]+:[^@\s]+@")


class NoTranslationError(Exception):
    """The reason why a script has no translation and stays a script, and what would allow one."""

    def __init__(self, reason: str, fix: str = "move this into the program that the ranks run") -> None:
        super().__init__(f"{reason}. Fix: {fix}")


def expand(raw: str, known: Mapping[str, str], *, is_argument: bool = False) -> str | None:
    """Return the value of a shell word with its known variables; None if only a shell can evaluate it.

    In an argument, unlike in an assignment, the shell splits and expands the value of an unquoted variable.
    """
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
            if match is None or name not in known or (is_argument and not quote and _SPLITS.search(known[name])):
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
    """Return the keys of [job] for a launch with those of the directives; `activation` is the line that sets the Python.

    The launch must start the tasks that the directives request: then Slurm places the ranks of the job file as those of
    the script.
    """
    words = WORD.findall(re.sub(r"^(exec|time)\s+", "", command))
    if command.split()[0] == "time":
        notes.append(f"{where}: omitted `time`; `toolkit status` shows the times of a run")
    nodes, tasks, cpus = (job.get(key, 1) for key in ("nodes", "ranks_per_node", "cpus_per_rank"))
    own = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": nodes * tasks,
        "SLURM_NPROCS": nodes * tasks,
    }
    own |= {"SLURM_NTASKS_PER_NODE": tasks, "SLURM_CPUS_PER_TASK": cpus}
    counts = {**known, **{name: str(count) for name, count in own.items()}}
    keys: dict[str, Any] = {}
    starter = words[0] if words[0] in ("srun", "mpirun", "mpiexec") else ""
    if starter:
        words = _after_starter(words, counts, job, notes, where)
    match = TORCHRUN.match(" ".join(words) + " ")
    if not (starter or match or _PYTHON.fullmatch(words[0])):
        raise NoTranslationError(f"{where} has no translation: {command[:60]}")
    if not starter and nodes * tasks > 1:
        raise NoTranslationError(
            f"{where} starts one process; the directives request {nodes * tasks} tasks", "start it with srun"
        )
    if "signal" in job and starter != "srun":
        raise NoTranslationError(f"{where}: the signal of --signal reaches only what srun starts")
    if match:
        program = match[0].split()[0]
        if "/" in program and not _PYTHON.fullmatch(program):
            raise NoTranslationError(f"{where} runs {program} in a Python that only this file names")
        if match[0].endswith("launch ") and not re.search("--use[-_]env", command):
            raise NoTranslationError(f"{where}: without --use-env, torch.distributed.launch adds an argument")
        words, each = _after_torchrun(words[len(match[0].split()) :], counts, job, notes, where)
        if tasks > 1 or cpus % each:
            raise NoTranslationError(f"{where} starts {each} ranks in each of {tasks} tasks per node, with {cpus} CPUs")
        keys = {"ranks_per_node": each, "cpus_per_rank": cpus // each}
        words = [program if _PYTHON.fullmatch(program) else "python", *_values(words, known, where)]
    else:
        words = _values(words, known, where)
    script = words[2:] if words[1:2] == ["-u"] else words[1:]
    is_of_path = _PYTHON.fullmatch(words[0]) and "/" not in words[0]
    if activation and is_of_path:
        notes.append(f"{activation}: `{words[0]}` runs in the environment that this line activates")
    elif is_of_path and script and script[0].endswith(".py"):
        notes.append(f'{where}: ranks run in the Python of toolkit; entry = ["PYTHON", ...] runs another')
        return {"entry": script[0], **keys} | ({"argv": script[1:]} if script[1:] else {})
    return {"entry": words, **keys}


def _values(words: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    """Return a program and its arguments without the shell's `"$@"`, which those after `--` replace."""
    values: list[str] = []
    for word in words[:-1] if words and words[-1] in ('"$@"', "$@", '"${@}"') else words:
        is_variable = _VARIABLE.fullmatch(word)  # the shell splits its value
        if (value := expand(f'"{word}"' if is_variable else word, known, is_argument=True)) is None or (
            is_variable and re.search(r"[*?\[\\]", value)
        ):
            raise NoTranslationError(
                f"{where} uses {word}, which only a shell can evaluate",
                "write its value, or assign it in the line before, after `source`, `module` and `conda`",
            )
        values += [value] if re.search(r"['\"\\]", word) else value.split()
    if is_secret(values):
        raise NoTranslationError(
            f"{where} has an argument that looks like a secret", "read it from a variable that you export"
        )
    if not values or values[0].startswith("-"):
        raise NoTranslationError(f"{where} names no program")
    if _OTHER_LAUNCHER.fullmatch(values[0]):
        raise NoTranslationError(f"{where}: {values[0]} has no translation")
    return values


def _after_starter(
    words: Sequence[str], counts: Mapping[str, str], job: Mapping[str, Any], notes: list[str], where: str
) -> list[str]:
    """Return the program of srun or mpirun, which start the tasks of the directives; add notes on other options."""
    program, *rest = words
    nodes, tasks, cpus = (job.get(key, 1) for key in ("nodes", "ranks_per_node", "cpus_per_rank"))
    is_srun = program == "srun"
    expected = {"-n": nodes * tasks, ("--ntasks" if is_srun else "-np"): nodes * tasks}
    if is_srun:
        expected |= {"-N": nodes, "--nodes": nodes, "--ntasks-per-node": tasks, "-c": cpus, "--cpus-per-task": cpus}
    elif "ranks_per_node" not in job:
        raise NoTranslationError(f"{where}: without --ntasks-per-node, Slurm chooses the tasks of {program}")
    while rest and rest[0].startswith("-"):
        option, equals, raw = rest.pop(0).partition("=")
        short = re.fullmatch(r"(-[nNc])(\d+)", option)
        count = expected.get(short[1] if short else option)
        if count is not None:
            raw = short[2] if short else raw if equals else rest.pop(0) if rest else ""
            if _count(raw, counts, option, where) != count:
                raise NoTranslationError(
                    f"{where}: {option} of {program} is not that of the directives, {count}",
                    "request that many by #SBATCH",
                )
        elif is_srun and (
            option in _SRUN_SWITCHES or (option in _SRUN_OPTIONS and equals and expand(raw, counts) is not None)
        ):
            notes.append(
                f"{where}: omitted {option}{equals}{raw} of {program}; `job.launcher_options` sets options of the launcher"
            )
        else:
            raise NoTranslationError(
                f"{where}: {option} of {program} has no key", "remove it, or use job.launcher_options"
            )
    if not rest or ":" in rest:
        raise NoTranslationError(f"{where} names {'several programs' if rest else 'no program'}")
    return rest


def _count(raw: str, counts: Mapping[str, str], option: str, where: str) -> int:
    value = expand(raw, counts)
    if value is None or not value.isdecimal() or not int(value):
        raise NoTranslationError(f"{where}: only a shell can evaluate {option} {raw}", "write the number")
    return int(value)


def _after_torchrun(
    words: list[str], counts: Mapping[str, str], job: Mapping[str, Any], notes: list[str], where: str
) -> tuple[list[str], int]:
    """Return the script of torchrun with its arguments, and the ranks per node."""
    nodes, each = 1, 1
    for typed, option, raw in torchrun_options(words):
        if not _REPLACED.fullmatch(option):
            raise NoTranslationError(f"{where}: {typed} has no key")
        if option == "--nnodes":
            nodes = _count(raw, counts, typed, where)
        if option == "--nproc-per-node":
            each = _ranks_of_gpus(raw, job) or _count(raw, counts, typed, where)
        if option == "--max-restarts":
            notes.append(f"{where}: omitted {typed}; `restart.crashes` limits restarts")
    if nodes != job.get("nodes", 1):
        raise NoTranslationError(f"{where}: --nnodes is {nodes}, the directives request {job.get('nodes', 1)} nodes")
    if not words:
        raise NoTranslationError(f"{where} starts no Python file")
    return words, each


def torchrun_options(words: list[str]) -> Iterator[tuple[str, str, str]]:
    """Remove the options of torchrun from the start of `words`; yield each as typed, its name and its value."""
    while words and words[0].startswith("-"):
        typed, equals, raw = words.pop(0).partition("=")
        option = typed.replace("_", "-")
        yield typed, option, words.pop(0) if words and not equals and option not in _SWITCHES else raw


def _ranks_of_gpus(raw: str, job: Mapping[str, Any]) -> int:
    """Return the GPUs per node if torchrun starts a rank on each; 0 for any other number."""
    return (
        int(job.get("gpus_per_node", 0))
        if raw.strip('"') in ("gpu", "$SLURM_GPUS_ON_NODE", "${SLURM_GPUS_ON_NODE}")
        else 0
    )
