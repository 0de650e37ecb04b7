"""Read the commands of a batch script into [env] and the keys of one launch; name each line that has no translation."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from toolkit.config.resolved import looks_secret
from toolkit.submission.array_values import ArrayValues
from toolkit.submission.launch_line import WORD, NoTranslationError, expand, is_secret, keys_of_launch
from toolkit.submission.script import KEPT

__all__ = ["ScriptBody"]

_OMITTED = re.compile(
    r"(set [-+][euxo]+( pipefail)?$|(echo|printf(?! -v)|date|hostname|pwd|nvidia-smi)\b|module list\b|wait$)"
)
_PURGE = re.compile(r"(module|ml) purge")
_AFTER = re.compile(r"(exit( \S+)?|wait|conda deactivate|deactivate|(module|ml) (purge|unload\b.*))$")  # the launch
_SETUP = re.compile(r"(conda|mamba|micromamba|source|\.|ulimit|module|ml|mkdir -p|unset)\s|eval \"\$\(conda")
_KEEPS_VALUES = re.compile(r"(ulimit|mkdir)\b")  # all other lines of setup may set any variable
_ASSIGNMENTS = re.compile(r"export\s+[A-Za-z_]|[A-Za-z_]\w*=(?!\()", re.ASCII)
_NAMED = re.compile(r"[A-Za-z_]\w*(=|$)", re.ASCII)
_ARRAY = re.compile(r"(?:declare -a )?(\w+)=\((?:[^()|&;<>]|\$\((?:[^()]|\([^()]*\))*\))*\)$", re.ASCII)
_MODULES = re.compile(
    r"(?:module load|module add|ml(?! +(?:use|purge|unload|swap|list|avail|restore|reset|save|show|spider)\b))\s+([\w./+ ]+)"
)
# The lines that may put another Python on PATH.
_ACTIVATES = re.compile(
    r"(?i)(source|\.|conda|mamba|micromamba|eval)\s|(module|ml)\s.*(python|conda|mamba|forge|torch|tensorflow|jax)|(export )?PATH="
)
# The lines whose failure does not end a job, or ends it on purpose. toolkit ends a job after any other line that fails.
_CANNOT_FAIL = re.compile(r"(export|unset|module|ml)\s|\w+=[^`(]*$")
_OF_SHELL = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)
# The values that belong to the shell of the script; the expansions that set a variable.
_OF_SCRIPT = re.compile(r"\$\{?(?:[\d@*#?$!-]|(?:_|BASH\w*|FUNCNAME|LINENO|PPID|SECONDS|SHLVL)\b)", re.ASCII)
_SETS_WITHIN = re.compile(r"\$\{\w+:?=|\$\(\([^)]*(?:\+\+|--|=)", re.ASCII)
_BYTE = re.compile(r"[\ud800-\udfff]")
_ODD = re.compile(rf"[^\S \t\n]|{_BYTE.pattern}")  # not white space for bash; not UTF-8
_SET_BY_BASH = re.compile(r"BASH\w*|E?UID|PPID|IFS|OPT(ARG|ERR|IND)|RANDOM|SECONDS|LINENO|SHLVL|SHELLOPTS|_")
_OF_SLURM = re.compile(r"(SLURM|TOOLKIT|PMIX?)_\w*")
# The variables that shells often export; an assignment without `export` then changes the environment.
_OFTEN_EXPORTED = ("LD_LIBRARY_PATH", "PYTHONPATH")
_CAT = re.compile(r'"?\$\(cat ([\w./~-]+)\)"?')
_OPERATORS = re.compile(r"[|&;<>()]")
# The variables that toolkit sets for each rank.
_OWN = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"})
# The tokens that open and close a block of several lines, and the line that ends a here-document.
_OPENS = re.compile(r"(?:^|[;&|]\s*)(?:for|while|until|if|case|select)\b|\{$")
_CLOSES = re.compile(r"(?:^|[;&|]\s*|\s)(?:done|fi|esac)\b|^\}")
_HERE_DOCUMENT = re.compile(r"<<-?\s*[\"']?(\w+)")
_LAUNCHES = re.compile(r"(?:exec |time )?(?:srun|mpirun|mpiexec|torchrun|accelerate|deepspeed|(?:\S*/)?python[\d.]*)\b")


class ScriptBody:
    """The commands of a script, read line by line into [env] and the keys of one launch."""

    def __init__(self, notes: list[str], array: str = "") -> None:
        self.notes = notes
        self.obstacles: list[NoTranslationError] = []  # in the order of the script
        self.sweep: list[str] = []  # the options that sweep the values of the tasks of an array
        self._array = ArrayValues(array)
        self.env: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._unknown: set[str] = set()  # variables whose values only a shell can evaluate
        self._vars: dict[str, str] = {}  # the exported variables
        self._launch: dict[str, Any] = {}
        self._lines: list[str] = []  # the lines of the environment, in the order of the script
        self._needs_setup = False  # only a shell can evaluate these lines
        self._is_sourced = False  # a line may have set any variable
        self._stops = False  # `set -e`
        self._activation = ""  # the last line that may put another Python on PATH

    def refuse(self, reason: str, fix: str) -> None:
        """Add an obstacle."""
        self.obstacles.append(NoTranslationError(reason, fix))

    def without_secrets(self, options: Sequence[str], places: Mapping[str, str]) -> list[str]:
        """Return options without the values of --export that look like secrets; [env] passes these variables."""
        kept = []
        for option in options:
            name, _, value = option.partition("=")
            pairs = [pair.partition("=") for pair in value.split(",")] if name == "--export" else []
            secret = [pair for pair in pairs if looks_secret(f"env.vars.{pair[0]}", pair[2])]
            for pair in secret:
                self._pass(pair[0], places["export"])
            kept.append(
                f"--export={','.join(pair[0] if pair in secret else ''.join(pair) for pair in pairs)}"
                if secret
                else option
            )
        return kept

    def _pass(self, name: str, where: str, raw: str = "") -> None:
        self.env.setdefault("secrets", {})[name] = "env"
        file = _CAT.fullmatch(raw)
        place = "file:" if file and file[1].startswith("~") else "command:cat "  # only a shell expands ~
        other = f', or write {name} = "{place}{file[1]}"' if file else ""
        self.notes.append(
            f"{where}: {name} looks like a secret and is not written; export it before `toolkit submit`{other}"
        )

    def environment(self) -> dict[str, Any]:
        """Return [env]. If a line needs a shell, all lines after the first modules are in `setup`, in their order."""
        loaded = [match[1].split() for match in takewhile(bool, map(_MODULES.fullmatch, self._lines)) if match]
        rest = self._lines[len(loaded) :]
        needs_setup = self._needs_setup or any(map(_MODULES.fullmatch, rest))  # modules after other lines
        tables = {
            "modules": [name for names in loaded for name in names],
            **({"setup": rest} if needs_setup else {"vars": self._vars}),
            **self.env,
        }
        return {name: table for name, table in tables.items() if table}

    def read(self, commands: Sequence[tuple[int, str]], job: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of the launch; `obstacles` gets each command without a translation, a block as one."""
        pending, first, depth, ending = "", 0, 0, ""
        for number, line in commands:
            first = first if pending else number
            pending += line
            words = (word.start() for word in WORD.finditer(f"{pending} ") if word[0].startswith("#"))
            comment = next((at for at in words if not WORD.sub("", pending[:at]).strip()), None)
            is_continued = comment is None and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            if is_continued and not WORD.sub("", pending[:-1]).lstrip().startswith("'"):
                pending = pending[:-1]
                continue
            command, pending = pending[:comment].strip(" \t"), ""
            is_inside = depth > 0 or bool(ending)
            depth += 0 if ending else len(_OPENS.findall(command)) - len(_CLOSES.findall(command))
            if is_inside:
                ending = "" if command == ending else ending
                continue
            try:
                self._command(command, job, f"line {first}")
            except NoTranslationError as obstacle:
                obstacle.args = (self._array.original(str(obstacle)),)
                self.obstacles.append(obstacle)
                if WORD.sub("", command).strip():
                    break  # a quote ends on a later line, so that the next ones are not commands
                here = _HERE_DOCUMENT.search(command)
                ending = here[1] if here else ""
                self._unknown |= {word.partition("=")[0] for word in WORD.findall(command) if _NAMED.match(word)}
                if not self._launch and _LAUNCHES.match(command):
                    self._launch = {"entry": command}  # for the lines after it
        if not self._launch and not self.obstacles:
            self.refuse("it starts no ranks with srun, mpirun, torchrun or python", "add such a line")
        self.notes[:] = map(self._array.original, self.notes)
        return self._launch

    def _command(self, command: str, job: dict[str, Any], where: str) -> None:
        if not command:
            return
        if _ODD.search(command):
            raise NoTranslationError(f"{where} has white space other than space and tab, or a byte that is not UTF-8")
        if not self._launch and re.fullmatch(r'cd "?\$\{?SLURM_SUBMIT_DIR\}?"?', command):
            self.notes.append(f"{where}: omitted `{command}`; ranks start in that folder")
            return
        needs_shell = _OPERATORS.search(re.sub(r"'[^']*'|\"[^\"]*\"|\$\((?:[^()]|\([^()]*\))*\)", "", command))
        has_secret = is_secret(WORD.findall(command))
        shown = f"{command.split()[0]} ..." if has_secret else command[:60]
        if WORD.sub("", command).strip() or _SETS_WITHIN.search(command):  # a quote may end on another line
            raise NoTranslationError(f"{where} needs a shell: {shown}")
        is_omitted = _OMITTED.match(command) or (_PURGE.fullmatch(command) and not self._lines)
        if not needs_shell and (is_omitted or (self._launch and _AFTER.match(command))):
            self.notes.append(f"{where}: omitted `{shown}`")
            if stops := re.match(r"set ([-+])\w*e", command):
                self._stops = stops[1] == "-"
        elif self._launch:
            raise NoTranslationError(
                f"{where} follows the launch: {shown}", "move this into a job of its own, with --after"
            )
        elif _ASSIGNMENTS.match(command) and not needs_shell:
            self._assign(command, where)
        elif (match := _ARRAY.match(command)) and not has_secret:
            self._line(command, where)
            self._known.pop(match[1], None)
            self._unknown.add(match[1])
            words = WORD.findall(command[command.index("(") + 1 : -1])
            self._array.define(match[1], [expand(word, self._known, is_argument=True) for word in words])
        elif needs_shell or has_secret:
            if has_secret:
                raise NoTranslationError(f"{where} contains a secret: {shown}", "export it before `toolkit submit`")
            fix = (
                ("write the launch as a line of its own; `toolkit logs` has the output",)
                if _LAUNCHES.match(command)
                else ()
            )
            raise NoTranslationError(f"{where} needs a shell: {shown}", *fix)
        elif command.startswith("unset ") and _OF_SLURM.search(command):
            raise NoTranslationError(f"{where} unsets a variable of Slurm", "remove the line")
        elif _SETUP.match(command):
            self._needs_setup |= not _MODULES.fullmatch(command)
            self._line(command, where)
            if not _KEEPS_VALUES.match(command):
                self._is_sourced = True
                self._unknown |= self._known.keys()
                self._known.clear()
                self._array.forget()
        else:
            command = self._array.replaced(command)
            known = self._known | self._array.known
            keys = keys_of_launch(command, known, job, self.notes, where, self._activation)
            if "-c" in [*keys["entry"]]:  # another shell evaluates an argument
                self._use(" ".join(keys["entry"]), where)
            self._launch, self.sweep = self._array.swept(keys, self.notes, where)

    def _line(self, line: str, where: str) -> None:
        """Add a line of the environment."""
        self._lines.append(line if self._stops or _CANNOT_FAIL.match(line) else f"{line} || true")
        evaluated = re.sub(r"""("(?:\\.|[^"\\])*")|'[^']*'|\\.""", r"\1", line)
        if match := _OF_SCRIPT.search(evaluated):
            raise NoTranslationError(f"{where} uses {match[0]}, which only the script can evaluate")
        self._use(evaluated, where)
        if own := _OWN.intersection(_OF_SHELL.findall(evaluated)):
            raise NoTranslationError(f"{where} uses {min(own)}, which toolkit sets only for each rank")
        if _ACTIVATES.match(line):
            self._activation = where

    def _use(self, line: str, where: str) -> None:
        """Pass the variables in a line that the submitting shell may define."""
        passed, secrets = self.env.setdefault("pass", []), self.env.get("secrets", ())
        defined = {*self._known, *self._unknown, *passed, *secrets} | _OWN
        for name in sorted({*_OF_SHELL.findall(line)} - defined):
            if not _SET_BY_BASH.fullmatch(name) and not _is_inherited(name):
                passed.append(name)
                self.notes.append(
                    f"{where}: toolkit passes {name} from the submitting shell, if it is set there ([env] pass)"
                )

    def _assign(self, command: str, where: str) -> None:
        words = WORD.findall(command)
        is_export = words[0] == "export"
        if (not is_export and len(words) > 1) or not all(map(_NAMED.match, words)):
            raise NoTranslationError(f"{where} needs a shell: {words[0].partition('=')[0]} ...")
        kept = []
        for word in words[int(is_export) :]:
            name, equals, raw = word.partition("=")
            raw = self._array.replaced(raw)
            value = expand(raw, self._known | self._array.known) if equals else self._known.get(name)
            if _SET_BY_BASH.fullmatch(name) or _OF_SLURM.fullmatch(name):
                raise NoTranslationError(f"{where} sets {name}", "remove the line")
            if name in _OWN:
                self.notes.append(f"{where}: omitted {name}, which toolkit sets for each rank")
            elif name in self.env.get("secrets", ()):
                continue
            elif is_secret([f"{name}={value if value is not None else raw or name}"]):
                if self._is_sourced and not equals:
                    raise NoTranslationError(f"{where}: an earlier line may set {name}, which looks like a secret")
                self._pass(name, where, raw)
            else:
                kept.append((word, name, equals, value))
        if kept:
            self._line(" ".join(["export"] * is_export + [word for word, *_ in kept]), where)
        for _, name, equals, value in kept:  # after `_line`, since the shell expands all words first
            self._set(name, value, where, is_assigned=bool(equals), is_exported=is_export or name in self._vars)

    def _set(self, name: str, value: str | None, where: str, *, is_assigned: bool, is_exported: bool) -> None:
        is_inherited = _is_inherited(name) or name in (*_OFTEN_EXPORTED, *self.env.get("pass", ()))
        if not is_exported and is_inherited:
            self._use(f"${name}", where)
        elif not is_assigned and name not in {*self._known, *self._unknown}:
            self._use(f"${name}", where)
            self._needs_setup |= self._is_sourced
            return
        self._needs_setup |= (
            value is None or self._array.is_swept(value) if is_exported else is_inherited or self._is_sourced
        )
        self._known.pop(name, None)
        if value is None:
            self._unknown.add(name)
        else:
            self._known[name] = value
        if is_exported:
            self._vars[name] = value or ""


def _is_inherited(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in KEPT)
