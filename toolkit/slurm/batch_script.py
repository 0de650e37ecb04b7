"""Read the options in the `#SBATCH` lines of a script, as sbatch reads them (checked against 22.05)."""

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.slurm.sbatch_options import last_value_of

__all__ = ["BatchScript", "Directive", "is_batch_script", "read_batch_script", "shell_signal"]

# The long options of sbatch by the value that they accept, with their short options.
_REQUIRED = """
array/a account/A acctg-freq batch bb bbf begin/b chdir/D cluster-constraint clusters/M cluster comment constraint/C
container container-id core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot
dependency/d distribution/m error/e exclude/x export export-file extra extra-node-info/B gid gpu-bind gpu-freq gpus/G
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input/i job-name/J kill-on-invalid-dep licenses/L
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile/F nodelist/w nodes/N ntasks/n
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output/o partition/p power prefer priority
profile qos/q reservation segment signal sockets-per-node switches thread-spec threads-per-core time/t time-min tmp
tasks-per-node ntasks-per-tres wait-all-nodes tres-bind tres-per-job tres-per-node tres-per-socket tres-per-task uid wckey workdir wrap
"""
_OPTIONAL = "exclusive get-user-env nice no-kill/k propagate x11 resv-ports oom-kill-step"
_SWITCHES = """
contiguous help/h hold/H ignore-pbs no-requeue overcommit/O oversubscribe/s parsable quiet/Q reboot requeue share
spread-job stepmgr test-only usage/u use-min-nodes verbose/v version/V wait/W
"""
_TYPED = [
    (name, letter, kind)
    for kind, names in (("required", _REQUIRED), ("optional", _OPTIONAL), ("none", _SWITCHES))
    for name, _, letter in (one.partition("/") for one in names.split())
]
_KINDS = {name: kind for name, _, kind in _TYPED}
_LONG_OF = {letter: name for name, letter, _ in _TYPED if letter}
_MAGIC = re.compile(r"#(?:SBATCH|SLURM)")
_SIGNAL = re.compile(r"(?i)(R?B?):?([A-Z0-9]+)(?:@([0-9]+))?", re.ASCII)
_COMMAND = re.compile(r"\s*[^\s#]")
_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line by its long name; `value` is None without one. `line` counts from 1."""

    name: str
    value: str | None
    line: int

    @property
    def option(self) -> str:
        """The option as one argument, such as `--nodes=2`."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


@dataclass
class BatchScript:
    """A script that sbatch accepts: its interpreter, and the directives of each component (most scripts have one)."""

    path: Path
    text: str
    components: list[list[Directive]] = field(default_factory=lambda: [[]])
    first_command: int = 0  # its line, from 1; 0 without commands

    @property
    def directives(self) -> list[Directive]:
        """The directives of the whole job, or of its first component."""
        return self.components[0]


@dataclass(frozen=True)
class ShellSignal:
    """The signal of --signal=B:..., which Slurm sends to the batch shell `seconds` before the walltime."""

    number: int
    seconds: int


def shell_signal(options: Iterable[str]) -> ShellSignal | None:
    """Return the signal for the batch shell; None if the last --signal is for the job steps, or there is none."""
    match = _SIGNAL.fullmatch(last_value_of(options, "signal"))
    if match is None or "B" not in match[1].upper():
        return None
    name = match[2].upper().removeprefix("SIG")
    known = {one.name.removeprefix("SIG"): one.value for one in signal.Signals}
    number = int(name) if name.isdecimal() else known.get(name, 0)
    return ShellSignal(number, int(match[3] or 60)) if number else None


def is_batch_script(path: Path) -> bool:
    """Return whether a file starts with `#!`, as sbatch requires."""
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"#!"
    except OSError:
        return False


def read_batch_script(path: Path) -> BatchScript:
    """Return the directives of the script `path`.

    Raises:
        ToolkitError: the file cannot be read, or sbatch would reject its form or an option.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ToolkitError(
            f"cannot read the script: {error.strerror}", where=str(path), fix="make it readable"
        ) from error
    if not data.startswith(b"#!"):
        raise ToolkitError(
            "expected a script that starts with `#!`", where=f"{path}:1", fix='add a first line such as "#!/bin/bash"'
        )
    if b"\r\n" in data:
        raise ToolkitError("the script has Windows line endings", where=str(path), fix=f"sed -i 's/\\r$//' {path}")
    script = BatchScript(path, data.decode("utf-8", "surrogateescape"))
    components: list[list[tuple[str, int]]] = [[]]
    for number, line in enumerate(script.text.split("\n"), start=1):
        match = _MAGIC.match(line)
        if match is None:
            if _COMMAND.match(line):
                script.first_command = number
                break
            continue
        for argument in _arguments(line[match.end() :], f"{path}:{number}"):
            if argument in ("hetjob", "packjob"):
                components.append([])
            else:
                components[-1].append((argument, number))
    script.components = [[*_options(one, path)] for one in components]
    return script


def _arguments(text: str, where: str) -> Iterator[str]:
    """Yield the arguments of a directive. Unlike in a shell, a backslash also escapes inside of single quotes."""
    position = 0
    while True:
        while position < len(text) and text[position] in _SPACE:
            position += 1
        if text[position : position + 1] == ":":
            raise ToolkitError("sbatch rejects an argument that starts with `:`", where=where, fix="remove it")
        argument, position = _argument(text, position, where)
        if not argument:  # sbatch ignores the rest of the line after an empty argument
            return
        yield argument


def _argument(text: str, position: int, where: str) -> tuple[str, int]:
    argument, quote, is_escaped = "", "", False
    while position < len(text) and (quote or text[position] not in _SPACE):
        character = text[position]
        position += 1
        if is_escaped:
            argument, is_escaped = argument + character, False
        elif character == "\\":
            is_escaped = True
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        elif not quote and character == "#":
            position = len(text)
        else:
            argument += character
    if quote:
        raise ToolkitError(f"the quote {quote} is not closed", where=where, fix="close it on the same line")
    return argument, position


def _options(arguments: Sequence[tuple[str, int]], path: Path) -> Iterator[Directive]:
    """Yield the options in `arguments`, parsed as getopt_long does; a value may be on the next line."""
    rest = [*arguments]
    while rest:
        argument, line = rest.pop(0)
        where = f"{path}:{line}"
        if argument == "--":
            _refuse_rest(rest, path)
            return
        if argument.startswith("--"):
            name, equals, given = argument[2:].partition("=")
            name = _full_name(name, where)
            value: str | None = given if equals else None
            if value is None and _KINDS.get(name) == "required":
                value = _next_value(rest, argument, where)
            yield Directive(name, value, line)
        elif argument.startswith("-") and len(argument) > 1:
            yield from _short_options(argument, rest, line, where)
        else:
            _refuse_rest([(argument, line)], path)


def _short_options(argument: str, rest: list[tuple[str, int]], line: int, where: str) -> Iterator[Directive]:
    position = 1
    while position < len(argument):
        name = _LONG_OF.get(argument[position])
        position += 1
        if name is None:
            raise ToolkitError(f"sbatch has no option -{argument[position - 1]}", where=where, fix="correct it")
        if _KINDS[name] == "none":
            yield Directive(name, None, line)
            continue
        value: str | None = argument[position:] or None
        if value is None and _KINDS[name] == "required":
            value = _next_value(rest, argument, where)
        yield Directive(name, value, line)
        return


def _next_value(rest: list[tuple[str, int]], option: str, where: str) -> str:
    if not rest:
        raise ToolkitError(f"{option} requires a value", where=where, fix=f"write {option}=VALUE")
    return rest.pop(0)[0]


def _full_name(name: str, where: str) -> str:
    """Return the option that `name` may abbreviate; a name that sbatch does not have may be that of a plugin."""
    if name in _KINDS:
        return name
    found = [one for one in _KINDS if one.startswith(name)]
    if len(found) > 1:
        names = ", ".join(f"--{one}" for one in found)
        raise ToolkitError(f"--{name} is ambiguous: {names}", where=where, fix="write the whole name")
    return found[0] if found else name


def _refuse_rest(rest: Sequence[tuple[str, int]], path: Path) -> None:
    for argument, line in rest:
        raise ToolkitError(
            f"expected an option of sbatch, got {argument!r}", where=f"{path}:{line}", fix="quote values with spaces"
        )
