"""Read the options in the `#SBATCH` lines of a script, as sbatch reads them (checked against 22.05)."""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.slurm.characters import described, instead_of, odd_character
from toolkit.slurm.sbatch_options import last_value_of, unquoted

__all__ = [
    "OPTIONS", "BatchScript", "Directive", "is_batch_script", "long_option", "other_interpreter", "read_batch_script", "shell_signal",
    "signal_in", "signal_number",
]  # fmt: skip

# The options of sbatch with a value, with an optional value and without one, each with its short option.
_REQUIRED = """
array/a account/A acctg-freq batch bb bbf begin/b chdir/D cluster-constraint clusters/M cluster comment constraint/C
container container-id core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot
dependency/d distribution/m error/e exclude/x export export-file extra extra-node-info/B gid gpu-bind gpu-freq gpus/G
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input/i job-name/J kill-on-invalid-dep licenses/L
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile/F nodelist/w nodes/N ntasks/n
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output/o partition/p power
prefer priority profile qos/q reservation segment signal sockets-per-node switches tasks-per-node thread-spec
threads-per-core time/t time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap
"""
_OPTIONAL = "exclusive get-user-env nice no-kill/k propagate x11 resv-ports oom-kill-step"
_SWITCHES = """
contiguous help/h hold/H ignore-pbs no-requeue overcommit/O oversubscribe/s parsable quiet/Q reboot requeue spread-job
stepmgr test-only usage/u use-min-nodes verbose/v version/V wait/W
"""
_LONG_OF = {one[-1]: one[:-2] for one in f"{_REQUIRED} {_OPTIONAL} {_SWITCHES}".split() if one[-2] == "/"}
OPTIONS = [
    one.removesuffix(one[-2:]) if one[-2] == "/" else one for one in f"{_REQUIRED} {_OPTIONAL} {_SWITCHES}".split()
]
_WITH_VALUE = frozenset(OPTIONS[: len(_REQUIRED.split())])
_WITHOUT_VALUE = frozenset(OPTIONS[-len(_SWITCHES.split()) :])
_OF_SWITCHES = "".join(re.findall(r"/(\w)", _SWITCHES))
_SHORT = re.compile(rf"-([{_OF_SWITCHES}]*)(?:([^{_OF_SWITCHES}])(.*))?", re.DOTALL)
_MAGIC = re.compile(r"#(?:SBATCH|SLURM)")
_SIGNAL = re.compile(r"(?i)(R?B?):?(?:SIG)?([A-Z0-9]+)(?:@([0-9]+))?", re.ASCII)
_SPACE = " \t\n\v\f\r"
_COMMAND = re.compile(rf"[{_SPACE}]*[^{_SPACE}#]")  # other white space, such as a no-break space, is a command


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line by its long name; `value` is None without one. `where` is its file and line."""

    name: str
    value: str | None
    where: str

    @property
    def option(self) -> str:
        """The option as one argument, such as `--nodes=2`."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


@dataclass(frozen=True)
class BatchScript:
    """The directives of each component of a script (most have one), and its lines before and from the first command."""

    components: Sequence[Sequence[Directive]]
    head: Sequence[tuple[int, str]]
    commands: Sequence[tuple[int, str]]


def signal_in(options: Iterable[str], *, only_shell: bool = False) -> tuple[str, int] | None:
    """Return the signal of --signal, a name without SIG or a number, and the seconds before the walltime.

    With `only_shell`, return only that of --signal=B:..., which Slurm sends to the batch shell.
    """
    match = _SIGNAL.fullmatch(last_value_of(options, "signal"))
    if match is None or (only_shell and "B" not in match[1].upper()):
        return None
    return match[2].upper(), int(match[3] or 60)


def shell_signal(options: Iterable[str]) -> tuple[int, int] | None:
    """Return the number of the signal that Slurm sends to the batch shell, and the seconds before the walltime."""
    found = signal_in(options, only_shell=True)
    number = signal_number(found)
    return (number, found[1]) if found and number else None


def signal_number(found: tuple[str, int] | None) -> int:
    """Return the number of a signal that `signal_in` returned; 0 for None, and for an unknown name."""
    known = {one.name.removeprefix("SIG"): one.value for one in signal.Signals}
    return (int(found[0]) if found[0].isdecimal() else known.get(found[0], 0)) if found else 0


def is_batch_script(path: Path) -> bool:
    """Return whether a file starts with `#!`, as sbatch requires."""
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"#!"
    except OSError:
        return False


def other_interpreter(path: Path) -> str:
    """Return the `#!` line of a script unless it names a plain bash or sh; "" if it does."""
    with path.open("rb") as stream:
        line = stream.readline().decode(errors="replace").strip()
    return "" if re.fullmatch(r"#! *(/usr)?/bin/((env )?(ba)?sh)", line) else line


def read_batch_script(path: Path) -> BatchScript:
    """Return the directives of the script `path`; ToolkitError if sbatch would reject its form or an option."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        fix = "make it readable" if isinstance(error, PermissionError) else "specify the path of a script"
        raise _refusal(f"cannot read the script: {error.strerror}", str(path), fix) from error
    if "\0" in text:
        raise _refusal("expected a script, got a binary file", str(path), "specify the path of a script")
    if text.startswith("\ufeff"):
        fix = f"sed -i '1s/^\\xEF\\xBB\\xBF//' {path}"
        raise _refusal("the script starts with a byte order mark", f"{path}:1", fix)
    if not re.match(r"#![ \t]*[!-~]", text):
        raise _refusal(
            "expected a script that starts with `#!` and a program",
            f"{path}:1",
            'add a first line such as "#!/bin/bash"',
        )
    if "\r\n" in text:
        raise _refusal("the script has Windows line endings", str(path), f"sed -i 's/\\r$//' {path}")
    lines = [*enumerate(text.split("\n"), start=1)]
    first = next((number for number, line in lines if _COMMAND.match(line)), len(lines) + 1)
    components: list[list[tuple[str, str]]] = [[]]
    for number, line in lines[: first - 1]:
        if match := _MAGIC.match(line):
            for argument in _arguments(line[match.end() :], f"{path}:{number}"):
                if argument in ("hetjob", "packjob"):
                    components.append([])
                else:
                    components[-1].append((argument, f"{path}:{number}"))
    places = {f"{path}:{number}": line for number, line in lines[: first - 1]}
    return BatchScript([[*_options(one, places)] for one in components], lines[: first - 1], lines[first - 1 :])


def _refusal(message: str, where: str, fix: str) -> ToolkitError:
    return ToolkitError(message, where=where, fix=fix)


def _arguments(text: str, where: str) -> Iterator[str]:
    """Yield the arguments of a directive. Unlike in a shell, a backslash also escapes inside of single quotes."""
    while text := text.lstrip(_SPACE):
        if text.startswith(":"):
            raise _refusal("sbatch rejects an argument that starts with `:`", where, "remove it")
        argument, quote, position = "", "", 0
        while position < len(text) and (quote or text[position] not in _SPACE):
            character = text[position]
            if character == "\\":
                position += 1
                argument += text[position : position + 1].strip(_SPACE if not quote else "")
                position -= not quote and text[position : position + 1] in _SPACE  # the space ends the argument
            elif character == (quote or character) and character in "\"'":
                quote = "" if quote else character
            elif character == "#" and not quote:
                text = text[:position]  # a comment
            else:
                argument += character
            position += 1
        if quote:
            raise _refusal(f"the quote {quote} is not closed", where, "close it on the same line")
        if not argument:  # sbatch ignores the rest of the line after an empty argument
            return
        yield argument
        text = text[position:]


def _options(arguments: Sequence[tuple[str, str]], lines: Mapping[str, str]) -> Iterator[Directive]:
    """Yield the options in `arguments`, parsed as getopt_long does; a value may be on the next line.

    `lines` has the line of each place, in which an error names the column of a character outside ASCII.
    """
    rest = [*arguments]
    while rest:
        argument, where = rest.pop(0)
        at = where
        name_part = argument.partition("=")[0] if argument.startswith("--") else argument
        odd = odd_character(name_part[:2] if re.match("-[^-]", argument) else name_part)
        if odd:
            message = f"expected an option of sbatch, got {argument!r} with {described(odd)}"
            fix = instead_of(odd, begins_option=argument.startswith(odd))
            raise _refusal(message, _column(lines[where], argument, odd, where), fix)
        if argument.startswith("--"):
            name, equals, given = argument[2:].partition("=")
            name, value = _full_name(name, where), given if equals else None
        elif (match := _SHORT.fullmatch(argument)) and len(argument) > 1:
            yield from (Directive(_LONG_OF[letter], None, where) for letter in match[1])
            if match[2] is None:
                continue
            name, value = _LONG_OF.get(match[2], ""), match[3] or None
        else:
            raise _refusal(f"expected an option of sbatch, got {argument!r}", where, "quote values with spaces")
        if not name:
            raise _refusal(f"sbatch has no option {argument}", where, "correct it")
        if value is not None and name in _WITHOUT_VALUE:
            raise _refusal(f"expected --{name} without a value, got {argument}", where, f"write --{name}")
        if value is None and name in _WITH_VALUE:
            if not rest:
                raise _refusal(f"{argument} requires a value", where, f"write --{name}=VALUE")
            value, at = rest.pop(0)
        if odd := odd_character(value or "", name):
            message = f"expected only ASCII in --{name}, got {described(odd)}"
            raise _refusal(message, _column(lines[at], value or "", odd, at), instead_of(odd))
        yield Directive(name, value, where)


def _column(line: str, part: str, character: str, where: str) -> str:
    """Return the place of a character of `part` of a line: file, line and column."""
    return f"{where}:{line.find(character, max(line.find(part), 0)) + 1}"


def long_option(word: str) -> tuple[str, str]:
    """Return the long name and the value of one option of a list, such as `--mem=2G`, `-n 4`, `-n4` or `-n "4"`."""
    if match := re.fullmatch(r"--([^=\s]*)(=?)(.*)", word.strip(), re.DOTALL):
        return match[1], match[3] if match[2] else unquoted(match[3])
    match = _SHORT.fullmatch(word.strip())
    letter = (match[2] or match[1][-1:]) if match else word
    return _LONG_OF.get(letter, letter), unquoted(match[3] or "") if match else ""


def _full_name(name: str, where: str) -> str:
    """Return the option that `name` may abbreviate; a name that is similar to no option may be that of a plugin."""
    found = [name] if name in OPTIONS else [one for one in OPTIONS if one.startswith(name)]
    if len(found) > 1:
        raise _refusal(f"--{name} is ambiguous: --{', --'.join(found)}", where, "write the whole name")
    if not found and (close := get_close_matches(name, OPTIONS, n=1, cutoff=0.83)):
        raise _refusal(f"sbatch has no option --{name}", where, f"did you mean --{close[0]}?")
    return found[0] if found else name
