"""Turn the values that the tasks of an array look up by their number into a sweep: `${LRS[$SLURM_ARRAY_TASK_ID]}`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.argv import SWEPT_ARGUMENT, replace_argument
from toolkit.errors import ToolkitError
from toolkit.slurm.array import parse_array
from toolkit.submission.launch_line import NoTranslationError, is_secret

__all__ = ["ArrayValues"]

_ID = r"\$(?:SLURM_ARRAY_TASK_ID\b|\{SLURM_ARRAY_TASK_ID\})"
_LOOKUP = re.compile(
    rf"(?P<kept>\\.)|\$\{{(?P<array>\w+)\[(?:{_ID}|SLURM_ARRAY_TASK_ID)\]\}}"
    r"|\$\(sed -n (?P<quote>\"?)\$\{SLURM_ARRAY_TASK_ID\}p(?P=quote) (?P<file>[\w./-]+)\)"
    rf"|(?P<number>{_ID})"
)
# The parts of a command; the shell leaves the first kind as it is.
_PARTS = re.compile(r"""'[^']*'|"(?:\$\([^)]*\)|\\.|[^"\\])*"|(?:\$\([^)]*\)|\\.|[^'"\\])+""", re.DOTALL)
_PLAIN = re.compile(r"""[^,"'\[\]{}\n]+""")  # as an unquoted value of --sweep
_MOST = 20  # the most values in a command
_SPLIT_BY_SHELL = re.compile(r"[\s*?\[\\]")


class ArrayValues:
    """The values of each task by the variable that replaces their lookup in a command.

    A replaced lookup is a variable whose value in `known` is a mark, which `swept` finds in the arguments.
    """

    def __init__(self, array: str) -> None:
        self._array = array
        self._tasks = sorted(parse_array(array)) if array else []
        self._arrays: dict[str, list[str]] = {}
        self._values: dict[str, dict[int, str]] = {}  # by mark
        self._originals: dict[str, str] = {}  # by the text that replaces it
        self.known: dict[str, str] = {}

    def define(self, name: str, values: Sequence[str | None]) -> None:
        """Note an array of the shell, unless only the shell can evaluate it."""
        self._arrays.pop(name, None)
        if known := [one for one in values if one is not None]:
            self._arrays |= {name: known} if len(known) == len(values) else {}

    def forget(self) -> None:
        """Forget the arrays: a line may have changed any variable."""
        self._arrays.clear()

    def is_swept(self, value: str) -> bool:
        """Return whether a value differs between tasks."""
        return any(mark in value for mark in self._values)

    def replaced(self, command: str) -> str:
        """Return the command with each lookup that has a value for every task as a variable in `known`."""
        if not self._tasks:
            return command
        result = _PARTS.sub(
            lambda part: part[0] if part[0][0] == "'" else _LOOKUP.sub(self._variable, part[0]), command
        )
        self._originals[result[:60]] = command[:60]  # as obstacles show a command
        return result

    def original(self, text: str) -> str:
        """Return what is written of a replaced command, as it is in the script."""
        for replaced in reversed(self._originals):  # a command before its variables
            text = text.replace(replaced, self._originals[replaced])
        return text

    def _variable(self, match: re.Match[str]) -> str:
        if match["kept"]:
            return match[0]
        if match["number"]:
            values = {number: str(number) for number in self._tasks}
        elif match["array"]:
            values = dict(enumerate(self._arrays.get(match["array"], ())))
        else:
            file = Path(match["file"])
            values = dict(enumerate(file.read_text("utf-8").splitlines(), start=1)) if file.is_file() else {}
        if not all(values.get(number) for number in self._tasks) or is_secret(list(values.values())):
            return match[0]
        splits = "\\" if any(_SPLIT_BY_SHELL.search(values[number]) for number in self._tasks) else ""
        name = f"TOOLKIT_VALUE_{len(self.known)}"
        self.known[name] = f"\ue000{splits}{len(self.known)}\ue001"  # a backslash, as the value is not one argument
        self._values[self.known[name]] = values
        self._originals |= dict.fromkeys((f"${{{name}}}", self.known[name]), match[0])
        return f"${{{name}}}"

    def swept(self, keys: Mapping[str, Any], notes: list[str], where: str) -> tuple[dict[str, Any], list[str]]:
        """Return the keys of a launch with the value of the first task, and the options of the sweep.

        Raises:
            NoTranslationError: the program itself depends on the task, or no `--sweep` sets the values.
        """
        program = [keys["entry"]] if isinstance(keys["entry"], str) else [*keys["entry"]]
        own, arguments = len(program), [*program, *keys.get("argv", [])]
        marked = [at for at, one in enumerate(arguments) if self.is_swept(one)]
        if not marked:
            return dict(keys), []
        if marked[0] == 0:
            raise NoTranslationError(f"{where}: the program depends on the task", "submit a run for each program")
        begin = min(own, marked[0] - arguments[marked[0] - 1].startswith("-"))
        at, arguments = marked[0] - begin, arguments[begin:]
        lines = [[self._filled(one, number) for one in arguments] for number in self._tasks]
        name, option = _name_of(arguments, at), f"{arguments[at].partition('=')[0]}="
        values = [line[at] if name.isdecimal() else line[at].removeprefix(option) for line in lines]
        if (
            len(values) > min(_MOST, len({*values}))
            or any(not _PLAIN.fullmatch(one) or one.strip() != one for one in values)
            or any(_swept(lines[0], name, one) != line for one, line in zip(values, lines, strict=True))
        ):
            raise NoTranslationError(
                f"{where}: no --sweep sets the arguments of all tasks", "write a job file and a --grid file"
            )
        numbers, percent, limit = f"0-{len(values) - 1}", *self._array.partition("%")[1:]
        if self._tasks != [*range(len(values))]:
            notes.append(f"{where}: the tasks {self._array} have the numbers {numbers} in the sweep")
        options = ["--sweep", f"{SWEPT_ARGUMENT}{name}={','.join(values)}"]
        options += ["-a", f"{numbers}{percent}{limit}"] if limit else []
        entry = keys["entry"] if isinstance(keys["entry"], str) else program[:begin]
        return {**keys, "entry": entry, "argv": lines[0]}, options

    def _filled(self, argument: str, number: int) -> str:
        for mark, values in self._values.items():
            argument = argument.replace(mark, values.get(number, ""))
        return argument


def _name_of(arguments: Sequence[str], at: int) -> str:
    """Return the option whose value is the argument `at`, as a sweep names it, else the position of the argument."""
    option, equals, _ = arguments[at].partition("=")
    before = arguments[at - 1] if at else ""
    option = option if equals else before if before.startswith("-") and "=" not in before else ""
    name = option.lstrip("-")
    alike = [one for one in arguments if one.partition("=")[0].lstrip("-").replace("-", "_") == name.replace("-", "_")]
    return name if re.fullmatch(r"[A-Za-z][\w-]*", name) and len(alike) == 1 else str(at + 1)


def _swept(arguments: Sequence[str], name: str, value: str) -> list[str]:
    """Return the arguments as a task of the sweep gets them; [] if the sweep would be refused."""
    try:
        return replace_argument(arguments, name, value, where="")
    except ToolkitError:
        return []
