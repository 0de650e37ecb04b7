"""Translate a batch script into a job file; what has no translation is named, or stays a script."""

import os
import re
from pathlib import Path
from typing import Any

import tomlkit

from toolkit.config.job import check_sbatch_options
from toolkit.config.resolved import looks_secret, shown_arguments
from toolkit.config.script_document import document_of_script, without_effect
from toolkit.slurm.batch_script import BatchScript, read_batch_script
from toolkit.slurm.sbatch_options import last_value_of, memory_mib
from toolkit.submission.launch_line import WORD, Launch, NoTranslationError, expand, launch_of

__all__ = ["import_script"]

_OMITTED = re.compile(
    r"(set [-+]|(echo|printf|date|hostname|pwd|nvidia-smi)\b|module (list|purge)\b|(exit( 0)?|wait)$)"
)
_SETUP = re.compile(r"(conda|mamba|micromamba|source|\.|ulimit|module|ml|mkdir|unset)\s|eval \"\$\(conda")
_ASSIGNMENTS = re.compile(r"(export\s+)?[A-Za-z_]\w*(=(?!\()|\s*$)")
_ARRAY = re.compile(r"(?:declare -a )?(\w+)=\(.*\)$")
_MODULES = re.compile(r"(?:module load|module add|ml)\s+([\w./+ -]+)")
_OPERATORS = re.compile(r"[|&;<>()]")
# The variables that toolkit sets for each rank.
_OWN = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "OMP_NUM_THREADS"})
_AS_KEYS = {"ntasks": "ranks_per_node", "mem": "mem_gb_per_node"} | dict.fromkeys(
    ("gres", "gpus-per-node", "gpus-per-task", "gpus"), "gpus_per_node"
)
_REPLACED = ("signal", "open-mode", "job-name", "mail-user", "mail-type")


def import_script(path: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the job file for a batch script, and what it lacks, one line each; its paths are relative to `folder`.

    Raises:
        ToolkitError: sbatch would reject the script.
    """
    values, script = document_of_script(path).values, read_batch_script(path)
    notes = [f"line {one.line}: {one.option} has no effect in a job file" for one in without_effect(script)]
    env: dict[str, Any] = {}
    for table in (values["job"], *values.get("component", ())):
        table |= {"sbatch": _without_secrets(table["sbatch"], env, notes)} if "sbatch" in table else {}
    tables = {**values, "job": values["job"] | {"entry": os.path.relpath(path, folder)}, "env": env}
    try:
        if "component" in values:
            raise NoTranslationError("a heterogeneous script has no translation")
        body = _Body(script, _keys(values), {name: [*names] for name, names in env.items()}, [*notes])
        job = body.job | _keys_of(body.read(), folder)
        tables, notes = {"job": job, "env": body.env, **_restart_and_notify(values, body.notes)}, body.notes
    except NoTranslationError as reason:
        notes.append(f"the script stays the entry of the job: {reason}")
    return tomlkit.dumps({name: table for name, table in tables.items() if table}), notes


def _without_secrets(options: list[str], env: dict[str, Any], notes: list[str]) -> list[str]:
    """Return options without the values of --export that look like secrets; [env] passes these variables."""
    kept = []
    for option in options:
        name, _, value = option.partition("=")
        pairs = [pair.partition("=") for pair in value.split(",")] if name == "--export" else []
        secret = [one for one, _, text in pairs if looks_secret(f"env.vars.{one}", text)]
        for one in secret:
            _pass(one, env, notes, name)
        others = [one + equals + text for one, equals, text in pairs if one not in secret]
        kept += [f"--export={','.join(others)}" if secret else option] if others or not pairs else []
    return kept


def _pass(name: str, env: dict[str, Any], notes: list[str], where: str) -> None:
    env.setdefault("pass", []).append(name)
    notes.append(f"{where}: {name} looks like a secret and is not written; export it before `toolkit submit`")


def _restart_and_notify(values: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    options = values["job"].get("sbatch", [])
    found = {key: last_value_of(options, name) for key, name in (("mail", "mail-user"), ("mail_on", "mail-type"))}
    if "restart" in values:
        notes.append("--signal: ranks get the signals of toolkit, and a program TERM, at that time before the walltime")
    return {
        "restart": values.get("restart"),
        "notify": {
            key: value.upper().split(",") if key == "mail_on" else [value] for key, value in found.items() if value
        },
    }


def _keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return [job] with keys for the options that a script may state in more forms; other options stay in `sbatch`."""
    job = {name: value for name, value in values["job"].items() if name not in ("entry", "once", "sbatch", "name")}
    if "name" in values["job"] and values["job"]["name"] != values["job"]["entry"]:
        job["name"] = values["job"]["name"]
    options = values["job"].get("sbatch", [])
    mib, ranks, nodes = memory_mib(last_value_of(options, "mem")), last_value_of(options, "ntasks"), job.get("nodes", 1)
    if mib and not mib % 1024:
        job["mem_gb_per_node"] = int(mib // 1024)
    if ranks.isdecimal() and isinstance(nodes, int) and not int(ranks) % nodes:
        job.setdefault("ranks_per_node", int(ranks) // nodes)
    for name, times, over in (
        ("gres", 1, 1), ("gpus-per-node", 1, 1), ("gpus-per-task", job.get("ranks_per_node", 1), 1), ("gpus", 1, nodes),
    ):  # fmt: skip
        count = last_value_of(options, name).removeprefix("gpu:")
        if count.isdecimal() and isinstance(over, int) and not int(count) % over:
            job["gpus_per_node"] = int(count) * times // over
    kept = []
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if name in _REPLACED or _AS_KEYS.get(name) in job:
            continue
        try:
            kept += check_sbatch_options([option])
        except ValueError:
            raise NoTranslationError(f"{option} has no key") from None
    return job | ({"sbatch": kept} if kept else {})


class _Body:
    """The commands of a script, read line by line into [env] and one launch."""

    def __init__(self, script: BatchScript, job: dict[str, Any], env: dict[str, Any], notes: list[str]) -> None:
        self.job, self.env, self.notes = job, env, notes
        self._script = script
        self._known: dict[str, str] = {}
        self._unknown: set[str] = set()  # variables whose values only a shell can evaluate
        self._launch: Launch | None = None

    def read(self) -> Launch:
        """Return the launch.

        Raises:
            NoTranslationError: the commands need a shell, or start no ranks.
        """
        first, pending = self._script.first_command, ""
        for number, line in enumerate(self._script.text.split("\n")[max(0, first - 1) :], start=first):
            pending += line
            if line.endswith("\\"):
                pending = pending[:-1] + " "
                continue
            self._command(re.sub(r"(^|\s)#[^'\"]*$", "", pending).strip(), f"line {number}")
            pending = ""
        if self._launch is None:
            raise NoTranslationError("it starts no ranks with srun, mpirun, torchrun, accelerate or python")
        return self._launch

    def _command(self, command: str, where: str) -> None:
        shown = shown_arguments([command])[0][:60]
        needs_shell = _OPERATORS.search(re.sub(r"'[^']*'|\"[^\"]*\"|\$\([^()]*\)", "", command))
        if not command or re.fullmatch(r'cd "?\$\{?SLURM_SUBMIT_DIR\}?"?', command):
            return
        if _OMITTED.match(command) and not needs_shell:
            self.notes.append(f"{where}: omitted `{shown}`")
        elif _ASSIGNMENTS.match(command):
            self._assign(command, where)
        elif match := _ARRAY.match(command):
            self._unknown.add(match[1])
        elif match := _MODULES.fullmatch(command):
            self.env.setdefault("modules", []).extend(match[1].split())
        elif _SETUP.match(command) and shown == command[:60]:
            self.env.setdefault("setup", []).append(command)
        elif self._launch is not None or needs_shell:
            raise NoTranslationError(f"{where} needs a shell: {shown}")
        else:
            self._launch = launch_of(command, self._known, self.job, where)
            self.notes += self._launch.notes

    def _assign(self, command: str, where: str) -> None:
        words = [match[0] for match in WORD.finditer(command)]
        is_exported = words[0] == "export"
        for word in words[int(is_exported) :]:
            name, equals, raw = word.partition("=")
            value = expand(raw, self._known)
            if name in _OWN:
                self.notes.append(f"{where}: omitted {name}, which toolkit sets for each rank")
            elif not equals:
                self.env.setdefault("pass", []).append(name)
            elif looks_secret(f"env.vars.{name}", raw if value is None else value):
                _pass(name, self.env, self.notes, where)
            elif value is None and is_exported and not self._uses_variable_of_script(raw):
                self.env.setdefault("setup", []).append(f"export {word}")
            elif value is None:  # a problem only if a translated line uses it
                self._unknown.add(name)
            else:
                self._known[name] = value
                if is_exported:
                    self.env.setdefault("vars", {})[name] = value

    def _uses_variable_of_script(self, raw: str) -> bool:
        own = {*self._known, *self._unknown} - self.env.get("vars", {}).keys()
        return any(re.search(rf"\$\{{?{name}\b", raw) for name in own)


def _keys_of(launch: Launch, folder: Path) -> dict[str, Any]:
    entry = launch.entry
    first = entry if isinstance(entry, str) else entry[0]
    if not first.startswith("/") and (isinstance(entry, str) or "/" in first):
        first = os.path.relpath(first, folder)
    changed = (
        first
        if isinstance(entry, str)
        else [first if "/" in first else f"./{first}" if "/" in entry[0] else first, *entry[1:]]
    )
    return {"entry": changed, **launch.keys} | ({"argv": launch.argv} if launch.argv else {})
