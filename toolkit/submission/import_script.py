"""Translate a batch script into a job file; what has no translation is named, or stays a script."""

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import tomlkit
from pydantic import ValidationError

from toolkit.config.job import JobTable, check_sbatch_options
from toolkit.config.job_file_text import moved_entry
from toolkit.config.request import JobRequest, resolve
from toolkit.config.resolved import JobFile, looks_secret
from toolkit.config.script_document import SAME, WITHOUT_EFFECT, document_of_script
from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import Severity
from toolkit.slurm.batch_script import OPTIONS, other_interpreter, read_batch_script, signal_in
from toolkit.slurm.sbatch_options import last_value_of, memory_mib
from toolkit.submission.launch_line import WORD, NoTranslationError, expand, is_secret, keys_of_launch
from toolkit.submission.preflight.finding import Finding
from toolkit.submission.preflight.options import check_options
from toolkit.submission.preflight.script_lines import check_script
from toolkit.submission.script import KEPT

__all__ = ["import_script"]

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
_SIGNALS = get_args(JobTable.model_fields["signal"].annotation)
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
# The options that become keys, in [job] if the key has a value.
_AS_KEYS = {"ntasks": "ranks_per_node", "mem": "mem_gb_per_node"} | dict.fromkeys(
    ("gres", "gpus-per-node", "gpus-per-task", "gpus"), "gpus_per_node"
)
_REPLACED = ("signal", "open-mode", "job-name", "mail-user", "mail-type")


def import_script(path: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the job file for a batch script, and what it lacks, one line each; its paths are relative to `folder`."""
    if path.suffix == ".toml" and path.is_file():
        raise ToolkitError("expected a script, got a job file", where=str(path), fix=f"`toolkit submit {path}`")
    values, script = document_of_script(path).values, read_batch_script(path)
    directives = [one for component in script.components for one in component]
    places = {SAME.get(one.name, one.name): f"line {one.where.rpartition(':')[2]}" for one in directives}
    for one in directives:
        if _BYTE.search(one.value or ""):
            raise ToolkitError("a value contains a byte that is not UTF-8", where=one.where, fix="write it in UTF-8")
    odd = [one for one in directives if one.name in WITHOUT_EFFECT or one.name not in OPTIONS]
    remarks = {True: "has no effect in a job file", False: "may be unknown to sbatch"}
    body = _Body([f"{places[one.name]}: {one.option} {remarks[one.name in OPTIONS]}" for one in odd])
    for table in (values["job"], *values.get("component", ())):
        if "sbatch" in table:
            table["sbatch"] = body.without_secrets(table["sbatch"], places)
    tables = {
        **values,
        "job": values["job"] | {"entry": os.path.relpath(path, folder)},
        "env": {"secrets": {**body.env.get("secrets", {})}} if body.env else {},
    }
    warnings, refused = _warnings(path)
    body.notes += [note for one, note in warnings.items() if one.check != "torchrun"] + ([refused] if refused else [])
    notes = [*body.notes]
    try:
        if refused or any(one.severity is Severity.CRITICAL for one in warnings):
            raise NoTranslationError("it cannot be submitted")
        if "component" in values:
            raise NoTranslationError("a heterogeneous script has no translation")
        if other := other_interpreter(path):
            reason = "-l starts a login shell" if other.endswith("sh -l") else f"{other!r} is not plain bash or sh"
            raise NoTranslationError(f"line 1: {reason}")
        job = _keys(values["job"], places, body.notes)
        keys = body.read(script.commands, job)
        keys["entry"] = moved_entry(keys["entry"], Path.cwd(), folder)
        for key, value in {"ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0}.items():
            job.setdefault(key, value)
        job |= keys
        translated = {"job": job, "env": body.environment(), **_others(values, places, body.notes)}
        _check(translated)
        tables, notes = translated, body.notes
    except NoTranslationError as reason:
        notes += [note for one, note in warnings.items() if one.check == "torchrun"]  # else toolkit replaces torchrun
        notes.append(f"the script stays the entry of the job: {reason}")
    return tomlkit.dumps({name: table for name, table in tables.items() if table}), notes


def _warnings(path: Path) -> tuple[dict[Finding, str], str]:
    """Return the findings on a script, each as a note, and why toolkit refuses it as a job; "" if it does not."""
    try:
        job = resolve(JobRequest(str(path)), None, environ={})
    except ToolkitError as error:
        return {}, str(error)
    notes = {}
    for one in (*check_script(job), *check_options(job)):
        line = f"line {one.where.removeprefix(f'{job.job_file}:').partition(':')[0]}: "
        notes[one] = f"{'' if one.what.startswith('line') else line}{one.what}. Fix: {one.fix}"
    return notes, ""


def _check(tables: Mapping[str, Any]) -> None:
    """Check a translation; NoTranslationError if a value is not valid in a job file."""
    try:
        JobFile.model_validate({name: table for name, table in tables.items() if table})
    except ValidationError as error:
        first = error.errors()[0]
        raise NoTranslationError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _others(values: dict[str, Any], places: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Return [restart] and [notify]."""
    options = values["job"].get("sbatch", [])
    restart, own = {"crashes": 0, "walltimes": 0, **values.get("restart", {})}, signal_in(options)
    at = "" if own else ", and get TERM 120 s before the walltime, not at it (warn_s)"
    notes.append(f"[restart]: as in the script, ranks do not restart after a crash or the walltime{at}")
    if values["job"].get("requeue"):
        notes.append(f"{places['requeue']}: --requeue: Slurm requeues the job only after preemption or a lost node")
    if own is not None:
        restart["warn_s"] = own[1]
    mail, events = last_value_of(options, "mail-user"), last_value_of(options, "mail-type").upper()
    if events and not mail:
        notes.append(f"{places['mail-type']}: Slurm sends {events} mail to the submitting user: set notify.mail")
    notify = ({"mail": mail.split(",")} if mail else {}) | ({"mail_on": events.split(",")} if mail and events else {})
    return {"restart": restart, "notify": notify}


def _keys(table: dict[str, Any], places: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Return [job] with keys for the options that a script may state in more forms; other options stay in `sbatch`."""
    job = {name: value for name, value in table.items() if name not in ("entry", "once", "sbatch")}
    options, nodes, each = table.get("sbatch", []), job.get("nodes", 1), job.get("ranks_per_node")
    if last_value_of(options, "chdir"):
        raise NoTranslationError(f"{places['chdir']}: --chdir has no key, and paths in the script are relative to it")
    if "export" in places:
        raise NoTranslationError(f"{places['export']}: --export has no key; ranks get only the variables in [env]")
    mib, ranks = memory_mib(last_value_of(options, "mem")), last_value_of(options, "ntasks")
    if mib and not mib % 1024:
        job["mem_gb_per_node"] = int(mib // 1024)
    if not isinstance(nodes, int):
        raise NoTranslationError(f"{places['nodes']}: Slurm chooses the number of nodes")
    if ranks.isdecimal():
        if "nodes" not in job and ranks != "1":
            raise NoTranslationError(f"{places['ntasks']}: Slurm chooses the nodes of {ranks} tasks without --nodes")
        each = each or (int(ranks) if nodes == 1 else 1)
        if each * nodes != int(ranks):
            raise NoTranslationError(f"{places['ntasks']}: Slurm chooses how many of {ranks} tasks run on each node")
        job["ranks_per_node"] = each
    if (own := signal_in(options)) is not None:
        if own[0] not in _SIGNALS or signal_in(options, only_shell=True):
            reason = "reaches the shell alone" if own[0] in _SIGNALS else "has no key"
            raise NoTranslationError(f"{places['signal']}: --signal={last_value_of(options, 'signal')} {reason}")
        job["signal"] = own[0]
    counts = {
        name: last_value_of(options, name).removeprefix("gpu:")
        for name in ("gres", "gpus-per-node", "gpus-per-task", "gpus")
    }
    if counts["gpus-per-task"] and (not counts["gpus-per-task"].isdecimal() or (each or 1) > 1):
        raise NoTranslationError(f"{places['gpus-per-task']}: --gpus-per-task gives each task its own GPUs")
    for name, count in counts.items():
        if count.isdecimal() and (name != "gpus" or nodes == 1):
            job["gpus_per_node"] = int(count)
    kept = []
    for option in options:
        typed, _, value = option.removeprefix("--").partition("=")
        name = SAME.get(typed, typed)
        if name in ("cpus-per-gpu", "tres-per-task") or re.fullmatch("ntasks-per-(?!node).*", name):
            raise NoTranslationError(f"{places[name]}: {option} has no key")
        if name == "job-name":
            notes.append(f"{places[name]}: {option}: the name of the job is {job['name']}")
        if name in ("output", "error"):
            notes.append(
                f"{places[name]}: {option}: ranks write to the logs that `toolkit logs RUN` shows, not to this file"
            )
        if name == "exclusive" and "cpus-per-task" not in places:
            notes.append(f"{places[name]}: {option}: a rank uses the CPUs of job.cpus_per_rank, not all of its node")
        # A type of GPU and other GRES have no key.
        is_key = _AS_KEYS.get(name) in job and (name == "mem" or value.removeprefix("gpu:").isdecimal())
        if not is_key and _AS_KEYS.get(name) == "gpus_per_node":
            notes.append(f"{places[name]}: {option} stays in job.sbatch; gpus_per_node does not count it")
        if name not in _REPLACED and not is_key:
            try:
                kept += check_sbatch_options([option])
            except ValueError:
                raise NoTranslationError(f"{places.get(name, 'its options')}: {option} has no key") from None
    return job | ({"sbatch": kept} if kept else {})


class _Body:
    """The commands of a script, read line by line into [env] and the keys of one launch."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
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
        """Return the keys of the launch; NoTranslationError if the commands need a shell, or start no ranks."""
        pending, first = "", 0
        for number, line in commands:
            first = first if pending else number
            pending += line
            words = (word.start() for word in WORD.finditer(f"{pending} ") if word[0].startswith("#"))
            comment = next((at for at in words if not WORD.sub("", pending[:at]).strip()), None)
            is_continued = comment is None and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            if is_continued and not WORD.sub("", pending[:-1]).lstrip().startswith("'"):
                pending = pending[:-1]
                continue
            self._command(pending[:comment].strip(" \t"), job, f"line {first}")
            pending = ""
        if not self._launch:
            raise NoTranslationError("it starts no ranks with srun, mpirun, torchrun or python")
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
            raise NoTranslationError(f"{where} follows the launch: {shown}")
        elif _ASSIGNMENTS.match(command) and not needs_shell:
            self._assign(command, where)
        elif (match := _ARRAY.match(command)) and not has_secret:
            self._line(command, where)
            self._known.pop(match[1], None)
            self._unknown.add(match[1])
        elif needs_shell or has_secret:
            raise NoTranslationError(f"{where} {'contains a secret' if has_secret else 'needs a shell'}: {shown}")
        elif command.startswith("unset ") and _OF_SLURM.search(command):
            raise NoTranslationError(f"{where} unsets a variable of Slurm")
        elif _SETUP.match(command):
            self._needs_setup |= not _MODULES.fullmatch(command)
            self._line(command, where)
            if not _KEEPS_VALUES.match(command):
                self._is_sourced = True
                self._unknown |= self._known.keys()
                self._known.clear()
        else:
            self._launch = keys_of_launch(command, self._known, job, self.notes, where, self._activation)
            if "-c" in [*self._launch["entry"]]:  # another shell evaluates an argument
                self._use(" ".join(self._launch["entry"]), where)

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
            value = expand(raw, self._known) if equals else self._known.get(name)
            if _SET_BY_BASH.fullmatch(name) or _OF_SLURM.fullmatch(name):
                raise NoTranslationError(f"{where} sets {name}")
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
        self._needs_setup |= value is None if is_exported else is_inherited or self._is_sourced
        self._known.pop(name, None)
        if value is None:
            self._unknown.add(name)
        else:
            self._known[name] = value
        if is_exported:
            self._vars[name] = value or ""


def _is_inherited(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in KEPT)
