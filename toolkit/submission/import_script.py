"""Translate a batch script into a job file; what has no translation is named, or stays a script."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tomlkit
from pydantic import ValidationError

from toolkit.config.job import JobTable, check_sbatch_options
from toolkit.config.job_file_text import moved_entry
from toolkit.config.request import JobRequest, resolve
from toolkit.config.resolved import JobFile
from toolkit.config.script_document import SAME, WITHOUT_EFFECT, document_of_script
from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import Severity
from toolkit.slurm.batch_script import OPTIONS, other_interpreter, read_batch_script, signal_in
from toolkit.slurm.sbatch_options import last_value_of, memory_mib
from toolkit.submission.launch_line import NoTranslationError
from toolkit.submission.preflight.finding import Finding
from toolkit.submission.preflight.options import check_options
from toolkit.submission.preflight.script_lines import check_script
from toolkit.submission.script_body import ScriptBody

__all__ = ["Imported", "import_script"]

_SIGNALS = get_args(JobTable.model_fields["signal"].annotation)
# The options that become keys, in [job] if the key has a value.
_AS_KEYS = {"ntasks": "ranks_per_node", "mem": "mem_gb_per_node"} | dict.fromkeys(
    ("gres", "gpus-per-node", "gpus-per-task", "gpus"), "gpus_per_node"
)
_REPLACED = ("signal", "open-mode", "job-name", "mail-user", "mail-type")
_BYTE = re.compile(r"[\ud800-\udfff]")


class Imported(NamedTuple):
    """A translated script: the job file, what it lacks (one line each), and the options that submit its array as a sweep."""

    text: str
    notes: list[str]
    sweep: list[str]


def import_script(path: Path, folder: Path) -> Imported:
    """Return the job file for a batch script; its paths are relative to `folder`."""
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
    odd_notes = [f"{places[one.name]}: {one.option} {remarks[one.name in OPTIONS]}" for one in odd]
    body = ScriptBody(odd_notes, values["job"].get("array", ""))
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
    is_refused = bool(refused) or any(one.severity is Severity.CRITICAL for one in warnings)
    body.obstacles += _whole_obstacles(path, values, is_refused=is_refused)
    if not body.obstacles:
        job = _keys(values["job"], places, body.notes, body.refuse)
        keys = body.read(script.commands, job)
        if not body.obstacles:
            translated = _translated(values, job, keys, folder, places, body)
            body.obstacles += _invalid(translated)
            tables = tables if body.obstacles else translated
    if body.obstacles:
        notes += [note for one, note in warnings.items() if one.check == "torchrun"]  # else toolkit replaces torchrun
        begin = "the script stays the entry of the job"
        notes += [f"{'also' if number else begin}: {one}" for number, one in enumerate(body.obstacles)]
        body.sweep = []
    text = tomlkit.dumps({name: table for name, table in tables.items() if table})
    return Imported(text, notes if body.obstacles else body.notes, body.sweep)


def _whole_obstacles(path: Path, values: Mapping[str, Any], *, is_refused: bool) -> list[NoTranslationError]:
    """Return the reason for which no line of a script is translated, if there is one."""
    if is_refused:
        return [NoTranslationError("it cannot be submitted", "fix what is reported above")]
    if "component" in values:
        return [NoTranslationError("a heterogeneous script has no translation", "write [[component]] into a job file")]
    other = other_interpreter(path)
    reason = "-l starts a login shell" if other.endswith("sh -l") else f"{other!r} is not plain bash or sh"
    return [NoTranslationError(f"line 1: {reason}", "write #!/bin/bash")] if other else []


def _translated(
    values: dict[str, Any], job: dict[str, Any], keys: dict[str, Any], folder: Path, places: Mapping[str, str], body: ScriptBody
) -> dict[str, Any]:  # fmt: skip
    """Return the tables of the job file."""
    defaults = {"ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0}
    job = job | {key: value for key, value in defaults.items() if key not in job} | keys
    job["entry"] = moved_entry(keys["entry"], Path.cwd(), folder)
    if body.sweep:
        job.pop("array")
    return {"job": job, "env": body.environment(), **_others(values, places, body.notes)}


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


def _invalid(tables: Mapping[str, Any]) -> list[NoTranslationError]:
    """Return the values of a translation that are not valid in a job file."""
    try:
        JobFile.model_validate({name: table for name, table in tables.items() if table})
    except ValidationError as error:
        return [NoTranslationError(f"{'.'.join(map(str, one['loc']))}: {one['msg']}") for one in error.errors()]
    return []


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


def _keys(
    table: dict[str, Any], places: Mapping[str, str], notes: list[str], refuse: Callable[[str, str], object]
) -> dict[str, Any]:
    """Return [job] with keys for the options that a script may state in more forms; other options stay in `sbatch`."""
    job = {name: value for name, value in table.items() if name not in ("entry", "once", "sbatch")}
    options, nodes, each = table.get("sbatch", []), job.get("nodes", 1), job.get("ranks_per_node")
    if last_value_of(options, "chdir"):
        refuse(
            f"{places['chdir']}: --chdir has no key, and paths in the script are relative to it",
            "submit in that folder, without --chdir",
        )
    if "export" in places:
        refuse(
            f"{places['export']}: --export has no key; ranks get only the variables in [env]",
            "write `export` lines instead",
        )
    mib, ranks = memory_mib(last_value_of(options, "mem")), last_value_of(options, "ntasks")
    if mib and not mib % 1024:
        job["mem_gb_per_node"] = int(mib // 1024)
    if not isinstance(nodes, int):
        refuse(f"{places['nodes']}: Slurm chooses the number of nodes", "write one number")
        nodes = job["nodes"] = 1
    if ranks.isdecimal():
        if "nodes" not in job and ranks != "1":
            refuse(f"{places['ntasks']}: Slurm chooses the nodes of {ranks} tasks without --nodes", "add --nodes")
            nodes = job["nodes"] = 1
        each = each or (int(ranks) if nodes == 1 else 1)
        if each * nodes != int(ranks):
            refuse(
                f"{places['ntasks']}: Slurm chooses how many of {ranks} tasks run on each node",
                "write --ntasks-per-node instead",
            )
        job["ranks_per_node"] = each
    if (own := signal_in(options)) is not None:
        if own[0] not in _SIGNALS or signal_in(options, only_shell=True):
            reason = "reaches the shell alone" if own[0] in _SIGNALS else "has no key"
            value = last_value_of(options, "signal")
            refuse(f"{places['signal']}: --signal={value} {reason}", "write --signal=USR1@300")
        else:
            job["signal"] = own[0]
    counts = {
        name: last_value_of(options, name).removeprefix("gpu:")
        for name in ("gres", "gpus-per-node", "gpus-per-task", "gpus")
    }
    if counts["gpus-per-task"] and (not counts["gpus-per-task"].isdecimal() or (each or 1) > 1):
        refuse(
            f"{places['gpus-per-task']}: --gpus-per-task gives each task its own GPUs", "write --gpus-per-node instead"
        )
    for name, count in counts.items():
        if count.isdecimal() and (name != "gpus" or nodes == 1):
            job["gpus_per_node"] = int(count)
    kept = []
    for option in options:
        typed, _, value = option.removeprefix("--").partition("=")
        name = SAME.get(typed, typed)
        if name in ("cpus-per-gpu", "tres-per-task") or re.fullmatch("ntasks-per-(?!node).*", name):
            refuse(f"{places[name]}: {option} has no key", "remove it")
            continue
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
                refuse(f"{places.get(name, 'its options')}: {option} has no key", "remove it")
    return job | ({"sbatch": kept} if kept else {})
