"""Translate a batch script into a job file; what has no translation is named, or stays a script."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import tomlkit
from pydantic import ValidationError

from toolkit.config.job import JobTable, check_sbatch_options
from toolkit.config.resolved import JobFile, looks_secret
from toolkit.config.script_document import WITHOUT_EFFECT, document_of_script
from toolkit.slurm.batch_script import other_interpreter, read_batch_script, signal_in
from toolkit.slurm.sbatch_options import last_value_of, memory_mib
from toolkit.submission.launch_line import WORD, NoTranslationError, expand, is_secret, keys_of_launch

__all__ = ["import_script"]

_OMITTED = re.compile(
    r"(set [-+][euxo]+( pipefail)?$|(echo|printf|date|hostname|pwd|nvidia-smi)\b|module (list|purge)\b|wait$)"
)
_AFTER = re.compile(r"(exit( \S+)?|wait|conda deactivate|deactivate|(module|ml) (purge|unload\b.*))$")  # the launch
_SETUP = re.compile(r"(conda|mamba|micromamba|source|\.|ulimit|module|ml|mkdir -p|unset)\s|eval \"\$\(conda")
_ASSIGNMENTS = re.compile(r"export\s+[A-Za-z_]|[A-Za-z_]\w*=(?!\()")
_ARRAY = re.compile(r"(?:declare -a )?(\w+)=\(.*\)$")
_MODULES = re.compile(
    r"(?:module load|module add|ml(?! +(?:use|purge|unload|swap|list|avail|restore|reset|save|show|spider)\b))\s+([\w./+ ]+)"
)
_SIGNALS = get_args(JobTable.model_fields["signal"].annotation)
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
    values, script = document_of_script(path).values, read_batch_script(path)
    directives = [one for component in script.components for one in component if one.name in WITHOUT_EFFECT]
    body = _Body([f"{one.where}: {one.option} has no effect in a job file" for one in directives])
    for table in (values["job"], *values.get("component", ())):
        if "sbatch" in table:
            table["sbatch"] = body.without_secrets(table["sbatch"])
    tables = {
        **values,
        "job": values["job"] | {"entry": os.path.relpath(path, folder)},
        "env": {name: [*listed] for name, listed in body.env.items()},
    }
    notes = [*body.notes]
    try:
        if "component" in values:
            raise NoTranslationError("a heterogeneous script has no translation")
        if other := other_interpreter(path):
            raise NoTranslationError(f"its first line is {other!r}, and only lines of bash or sh have a translation")
        job = _keys(values["job"])
        if job.get("ranks_per_node", 1) > 1 and "nodes" not in job:
            body.notes.append(
                "without --nodes Slurm chose the number of nodes; the job file requests one: set job.nodes"
            )
        job |= _relative(body.read(script.commands, job), folder)
        translated = {"job": job, "env": body.environment(), **_others(values, body.notes)}
        _check(translated)
        tables, notes = translated, body.notes
    except NoTranslationError as reason:
        notes.append(f"the script stays the entry of the job: {reason}")
    return tomlkit.dumps({name: table for name, table in tables.items() if table}), notes


def _check(tables: Mapping[str, Any]) -> None:
    """Check a translation; NoTranslationError if a value is not valid in a job file."""
    try:
        JobFile.model_validate({name: table for name, table in tables.items() if table})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise NoTranslationError(f"{key} cannot have the value {str(first['input'])[:60]!r}") from None


def _others(values: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return [restart] and [notify]."""
    options = values["job"].get("sbatch", [])
    restart, own = dict(values.get("restart", {})), signal_in(options)
    if own is not None:
        restart["warn_s"] = own[1]
        if own[0] not in _SIGNALS:
            notes.append(f"--signal: no key sends {own[0]}; a program gets TERM at that time before the walltime")
    mail, events = last_value_of(options, "mail-user"), last_value_of(options, "mail-type").upper()
    if events and not mail:
        notes.append(f"--mail-type={events}: set notify.mail to your address; Slurm's default is the submitting user")
    notify = ({"mail": mail.split(",")} if mail else {}) | ({"mail_on": events.split(",")} if mail and events else {})
    return {"restart": restart, "notify": notify}


def _keys(table: dict[str, Any]) -> dict[str, Any]:
    """Return [job] with keys for the options that a script may state in more forms; other options stay in `sbatch`."""
    job = {name: value for name, value in table.items() if name not in ("entry", "once", "sbatch")}
    if job["name"] == table["entry"]:  # sbatch's default
        del job["name"]
    options, nodes = table.get("sbatch", []), job.get("nodes", 1)
    if last_value_of(options, "chdir"):
        raise NoTranslationError("--chdir has no key, and paths in the script are relative to it")
    mib, ranks = memory_mib(last_value_of(options, "mem")), last_value_of(options, "ntasks")
    if mib and not mib % 1024:
        job["mem_gb_per_node"] = int(mib // 1024)
    if ranks.isdecimal() and isinstance(nodes, int) and not int(ranks) % nodes:
        job.setdefault("ranks_per_node", int(ranks) // nodes)
    if ranks.isdecimal() and isinstance(nodes, int) and job.get("ranks_per_node", 0) * nodes != int(ranks):
        raise NoTranslationError(f"{ranks} tasks do not fill {nodes} nodes")
    if (own := signal_in(options)) is not None and own[0] in _SIGNALS:
        job["signal"] = own[0]
    each = job.get("ranks_per_node", 1)
    for name, times, over in (("gres", 1, 1), ("gpus-per-node", 1, 1), ("gpus-per-task", each, 1), ("gpus", 1, nodes)):
        count = last_value_of(options, name).removeprefix("gpu:")
        if count.isdecimal() and isinstance(over, int) and not int(count) % over:
            job["gpus_per_node"] = int(count) * times // over
    kept = []
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if name not in _REPLACED and _AS_KEYS.get(name) not in job:
            try:
                kept += check_sbatch_options([option])
            except ValueError:
                raise NoTranslationError(f"{option} has no key") from None
    return job | ({"sbatch": kept} if kept else {})


def _relative(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    entry = keys["entry"]
    if isinstance(entry, str):
        return keys | {"entry": entry if entry.startswith("/") else os.path.relpath(entry, folder)}
    if "/" not in entry[0] or entry[0].startswith("/"):
        return keys
    return keys | {"entry": [f"./{os.path.relpath(entry[0], folder)}", *entry[1:]]}


class _Body:
    """The commands of a script, read line by line into [env] and the keys of one launch."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.env: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._unknown: set[str] = set()  # variables whose values only a shell can evaluate
        self._launch: dict[str, Any] = {}
        self._lines: list[str] = []  # the lines of the environment, in the order of the script

    def without_secrets(self, options: Sequence[str]) -> list[str]:
        """Return options without the values of --export that look like secrets; [env] passes these variables."""
        kept = []
        for option in options:
            name, _, value = option.partition("=")
            pairs = [pair.partition("=") for pair in value.split(",")] if name == "--export" else []
            secret = [pair for pair in pairs if looks_secret(f"env.vars.{pair[0]}", pair[2])]
            for pair in secret:
                self._pass(pair[0], name)
            kept.append(
                f"--export={','.join(pair[0] if pair in secret else ''.join(pair) for pair in pairs)}"
                if secret
                else option
            )
        return kept

    def _pass(self, name: str, where: str) -> None:
        passed = self.env.setdefault("pass", [])
        if name not in passed:
            passed.append(name)
        self.notes.append(f"{where}: {name} looks like a secret and is not written; export it before `toolkit submit`")

    def environment(self) -> dict[str, Any]:
        """Return [env]. If a line needs a shell, all lines after the first modules are in `setup`, in their order."""
        if "setup" not in self.env:
            return self.env
        loaded = [match[1].split() for match in takewhile(bool, map(_MODULES.fullmatch, self._lines)) if match]
        tables = {"pass": self.env.get("pass", []), "modules": [name for names in loaded for name in names]}
        return {name: value for name, value in tables.items() if value} | {"setup": self._lines[len(loaded) :]}

    def read(self, commands: Sequence[tuple[int, str]], job: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of the launch; NoTranslationError if the commands need a shell, or start no ranks."""
        pending = ""
        for number, line in commands:
            if not pending and line.lstrip().startswith("#"):
                continue
            pending += line
            if line.endswith("\\"):
                pending = pending[:-1] + " "
                continue
            comment = next((word.start() for word in WORD.finditer(pending) if word[0].startswith("#")), None)
            self._command(pending[:comment].strip(), job, f"line {number}")
            pending = ""
        if not self._launch:
            raise NoTranslationError("it starts no ranks with srun, mpirun, torchrun, accelerate or python")
        return self._launch

    def _command(self, command: str, job: dict[str, Any], where: str) -> None:
        if not command or re.fullmatch(r'cd "?\$\{?SLURM_SUBMIT_DIR\}?"?', command):
            return
        needs_shell = _OPERATORS.search(re.sub(r"'[^']*'|\"[^\"]*\"|\$\((?:[^()]|\([^()]*\))*\)", "", command))
        has_secret = is_secret(WORD.findall(command))
        shown = f"{command.split()[0]} ..." if has_secret else command[:60]
        if WORD.sub("", command).strip():  # a quote that ends on another line
            raise NoTranslationError(f"{where} needs a shell: {shown}")
        if not needs_shell and (_OMITTED.match(command) or (self._launch and _AFTER.match(command))):
            self.notes.append(f"{where}: omitted `{shown}`")
        elif self._launch:
            raise NoTranslationError(f"{where} follows the launch: {shown}")
        elif _ASSIGNMENTS.match(command) and not needs_shell:
            self._assign(command, where)
        elif (match := _ARRAY.match(command)) and not has_secret:
            self._unknown.add(match[1])
            self._lines.append(command)
        elif match := _MODULES.fullmatch(command):
            self.env.setdefault("modules", []).extend(match[1].split())
            self._lines.append(command)
        elif _SETUP.match(command) and not has_secret:
            self.env.setdefault("setup", []).append(command)
            self._lines.append(command)
        elif needs_shell or has_secret:
            raise NoTranslationError(f"{where} {'contains a secret' if has_secret else 'needs a shell'}: {shown}")
        else:
            self._launch = keys_of_launch(command, self._known, job, self.notes, where)

    def _assign(self, command: str, where: str) -> None:
        words = WORD.findall(command)
        is_exported = words[0] == "export"
        if (not is_exported and len(words) > 1) or not all(re.match(r"[A-Za-z_]\w*(=|$)", word) for word in words):
            raise NoTranslationError(f"{where} needs a shell: {words[0].partition('=')[0]} ...")
        for word in words[int(is_exported) :]:
            name, equals, raw = word.partition("=")
            value = expand(raw, self._known) if equals else self._known.get(name)
            if name in _OWN:
                self.notes.append(f"{where}: omitted {name}, which toolkit sets for each rank")
                continue
            if name in self.env.get("pass", ()):
                continue
            if is_secret([f"{name}={raw if value is None else value}"]):
                self._pass(name, where)
                continue
            if not equals and name not in {*self._known, *self._unknown}:
                self.env.setdefault("pass", []).append(name)
                continue
            self._lines.append(f"export {word}" if is_exported else word)
            if value is None:
                self._unknown.add(name)
                if is_exported:  # otherwise a problem only if a translated line uses it
                    self.env.setdefault("setup", []).append(command)
            else:
                self._known[name] = value
                if is_exported:
                    self.env.setdefault("vars", {})[name] = value
