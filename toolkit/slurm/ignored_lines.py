"""Find the lines of a batch script that look like directives, but that sbatch does not read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.slurm.array import write_array
from toolkit.slurm.batch_script import BatchScript

__all__ = ["commands_of", "ignored_lines"]

_DIRECTIVE = re.compile(r"#SBATCH\s*-")
_SPACE = "[\\s\u200b\ufeff]"  # also the characters without width that editors insert
_INDENTED = re.compile(rf"{_SPACE}+#SBATCH{_SPACE}+-")
_ALMOST = re.compile(rf"#{_SPACE}+SBATCH{_SPACE}+-|(?!#SBATCH)(?i:#SBATCH){_SPACE}+-")
_OF_OTHERS = re.compile(r"#(?:PBS|BSUB)[ \t]+-")
# `<<EOF`, `<<-'EOF'`; not `<<<`, and no shift of a number in $(( )), $[ ], a[ ]= and let.
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([A-Za-z_][\w.-]*))")
_ARITHMETIC = re.compile(
    r"\(\((?:[^()]|\([^()]*\))*\)\)|\$\[[^]\n]*\]|(?<![^\s;&|({])(?:\w+\[[^]\n]*\]\+?=|let[ \t][^;&|\n]*)"
)
# A string or an escaped character, a comment, or one other character.
_TOKEN = re.compile(
    r"\\.|\$'(?:\\.|[^'\\])*'|'[^']*(?P<single>'|$)|\"(?:\\.|[^\"\\])*(?P<double>\"|$)|(?<![^ \t\n;&|()])(?P<comment>#[^\n]*)|.",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Shell:
    """The commands of a script by the number of their first line, without comments and the text of here-documents."""

    commands: Sequence[tuple[int, str]]
    comments: Sequence[tuple[int, str]]


def commands_of(lines: Sequence[tuple[int, str]]) -> _Shell:
    """Split the lines of a script into commands and comments; strings and continued commands may have several lines."""
    commands: list[tuple[int, str]] = []
    comments: list[tuple[int, str]] = []
    pending, first = "", 0
    ends: list[tuple[str, bool]] = []  # of here-documents
    for number, line in lines:
        if ends and not pending:
            delimiter, has_tabs = ends[0]
            if (line.lstrip("\t") if has_tabs else line) == delimiter:
                ends.pop(0)
            continue
        first = first if pending else number
        pending += line
        kept = bare = ""
        is_open = len(pending) - len(pending.rstrip("\\")) & 1
        for token in _TOKEN.finditer(pending):
            if token["comment"] is not None:
                comments += [] if token.start() else [(number, line)]
                is_open = False
                continue
            is_open |= "" in (token["single"], token["double"])
            is_string = token[0][0] in "\"'" and not re.search(r"<<-?[ \t]*$", bare)
            kept, bare = kept + token[0], bare + ("''" if is_string else token[0])
        if is_open:
            pending = f"{pending[:-1]} " if pending.endswith("\\") else f"{pending}\n"
            continue
        commands += [(first, kept.strip(" \t\v\f\r"))] if kept.strip(" \t\v\f\r") else []
        found = _HERE_DOCUMENT.finditer(_ARITHMETIC.sub("", bare))
        ends = [(one[2] or one[3] or one[4], one[1] == "-") for one in found]
        pending = ""
    return _Shell(commands, comments)


def ignored_lines(path: Path, script: BatchScript) -> Iterator[ToolkitError]:
    """Yield a warning for each group of lines that look like directives, but that sbatch ignores."""
    shell = commands_of(script.commands)
    late = [number for number, line in shell.comments if _DIRECTIVE.match(line)]
    if late:
        first, command = shell.commands[0]
        shown = command[:60] if command.isprintable() else ascii(command[:60])
        yield ToolkitError(
            f"{'lines' if late[1:] else 'line'} {write_array(late)} {'are' if late[1:] else 'is'} ignored by sbatch, because "
            f"line {first} is a command: {shown}",
            where=f"{path}:{late[0]}",
            fix=f"move line {first} and all other commands below line {late[-1]}",
        )
    for number, line in [*script.head, *shell.commands]:  # for bash, other white space starts a command
        if _INDENTED.match(line):
            message = "sbatch ignores `#SBATCH` after white space"
            yield ToolkitError(message, where=f"{path}:{number}", fix="write `#SBATCH` at the start of the line")
        elif _ALMOST.match(line):
            message = f"sbatch reads only lines with `#SBATCH`, got {line.split('-')[0].strip()!r}"
            yield ToolkitError(
                message, where=f"{path}:{number}", fix="write `#SBATCH`, or `##SBATCH` to disable the line"
            )
        elif match := _OF_OTHERS.match(line):
            message = f"toolkit ignores {match[0].split()[0]} lines"
            yield ToolkitError(message, where=f"{path}:{number}", fix="write the options after `#SBATCH`")
