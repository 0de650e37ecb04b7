"""Read a batch script as a job file: its `#SBATCH` options become keys, its commands run once on the first node."""

import re
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.component import ComponentTable
from toolkit.config.document import Document, KeyPath
from toolkit.config.job import JobTable, is_job_name
from toolkit.errors import ToolkitError
from toolkit.slurm.array import parse_array
from toolkit.slurm.batch_script import BatchScript, Directive, read_batch_script, shell_signal
from toolkit.slurm.sbatch_table import SBATCH_OPTIONS
from toolkit.slurm.times import parse_slurm_time

__all__ = ["document_of_script", "job_name_of", "without_effect"]

# The options that set a key of [job] if the key accepts the value; sbatch accepts more forms of GPUs and memory.
_KEYS = {
    option.long: option.key.removeprefix("job.")
    for option in SBATCH_OPTIONS
    if option.key.startswith("job.") and option.long not in ("gpus-per-node", "mem", "requeue", "no-requeue")
}
# Of these, the last one applies.
_SAME = {"cluster": "clusters", "no-requeue": "requeue", "tasks-per-node": "ntasks-per-node"}
_WITHOUT_EFFECT = ("wait", "parsable", "quiet", "verbose", "ignore-pbs", "usage", "help", "version")
_REFUSED = {
    "wrap": "write the command into the script",
    "test-only": "remove it, and run `toolkit preflight` with the script",
    "input": "write `exec <FILE` at the start of the script",
    "export-file": "export the variables in the script, or use --export",
    "container": "start the container in the script",
    "container-id": "start the container in the script",
}
_NODES = re.compile(r"[1-9][0-9]{0,6}(-[1-9][0-9]{0,6})?", re.ASCII)
_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


def document_of_script(path: Path) -> Document:
    """Return the job that a batch script describes, with the line of each key.

    Raises:
        ToolkitError: sbatch would reject the script, or toolkit cannot run it.
    """
    script = read_batch_script(path)
    first = _keys_of(script.components[0], path, JobTable.model_fields)
    others = [_keys_of(one, path, ComponentTable.model_fields) for one in script.components[1:]]
    values: dict[str, Any] = {"job": {"entry": path.name, "once": True, "name": job_name_of(path.name)}}
    lines: dict[KeyPath, int] = {}
    shared = first if not others else {key: one for key, one in first.items() if key not in ComponentTable.model_fields}
    for key, (value, line) in shared.items():
        values["job"][key] = value
        lines["job", key] = line
    if others:
        values["component"] = []
        for number, found in enumerate([first, *others]):
            own = {key: one for key, one in found.items() if key in ComponentTable.model_fields}
            values["component"].append({key: value for key, (value, _) in own.items()})
            lines |= {("component", str(number), key): line for key, (_, line) in own.items()}
    warning = shell_signal(values["job"].get("sbatch", ()))
    if warning is not None:
        values["restart"] = {"warn_s": max(1, warning.seconds)}
        lines["restart", "warn_s"] = lines["job", "sbatch"]
    return Document(path, values, lines)


def without_effect(script: BatchScript) -> list[Directive]:
    """Return the directives that toolkit does not pass to sbatch, because they only change what sbatch prints."""
    return [one for found in script.components for one in found if one.name in _WITHOUT_EFFECT]


def job_name_of(name: str) -> str:
    """Return a job name that is similar to `name`, and valid as the name of a folder."""
    return name if is_job_name(name) else re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:64] or "job"


def _keys_of(directives: list[Directive], path: Path, names: Container[str]) -> dict[str, tuple[Any, int]]:
    """Return the keys in `names` that the directives set, with their lines; `sbatch` has the other options."""
    last: dict[str, Directive] = {}
    for one in directives:
        if one.name in _REFUSED:
            raise ToolkitError(
                f"toolkit cannot run a script with --{one.name}", where=f"{path}:{one.line}", fix=_REFUSED[one.name]
            )
        name = _SAME.get(one.name, one.name)
        before = last.pop(name, None)
        if name == "mail-type" and before is not None:  # sbatch adds these up
            one = replace(one, value=f"{before.value},{one.value}")
        last[name] = one
    keys: dict[str, tuple[Any, int]] = {}
    rest: list[Directive] = []
    for name, one in last.items():
        if name == "requeue" and name in names:
            keys[name] = (one.name == name, one.line)
        elif name in _WITHOUT_EFFECT:
            continue
        elif _KEYS.get(name) in names and (value := _value_of(name, one, path)) is not None:
            keys[_KEYS[name]] = (value, one.line)
            rest += [one] if value != one.value and name == "job-name" else []
        else:
            rest.append(one)
    if rest:
        keys["sbatch"] = ([one.option for one in rest], rest[0].line)
    return keys


def _value_of(name: str, one: Directive, path: Path) -> Any:
    """Return the value that a directive sets; None if the key does not accept all forms that sbatch accepts."""
    value = one.value or ""
    if name == "job-name":
        return job_name_of(value)
    try:
        if name == "array":
            parse_array(value)
        if name == "time":
            parse_slurm_time(value)
    except ValueError as error:
        if name == "array":
            raise ToolkitError(str(error), where=f"{path}:{one.line}", fix="use a list such as 0-9%2") from error
        return None
    if name in ("nodes", "ntasks-per-node", "cpus-per-task"):
        if _NUMBER.fullmatch(value):
            return int(value)
        return value if name == "nodes" and _NODES.fullmatch(value) else None
    return value
