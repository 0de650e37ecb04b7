"""Read a batch script as a job file: its `#SBATCH` options become keys, its commands run once on the first node."""

import re
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.component import ComponentTable
from toolkit.config.document import Document, KeyPath
from toolkit.config.job import JobTable, valid_job_name
from toolkit.errors import ToolkitError
from toolkit.slurm.array import parse_array
from toolkit.slurm.batch_script import Directive, read_batch_script, shell_signal
from toolkit.slurm.sbatch_table import SBATCH_OPTIONS
from toolkit.slurm.times import parse_slurm_time

__all__ = ["SAME", "WITHOUT_EFFECT", "document_of_script"]

# The options that set a key of [job] if the key accepts the value; sbatch accepts more forms of GPUs and memory.
_KEYS = {
    option.long: option.key.removeprefix("job.")
    for option in SBATCH_OPTIONS
    if option.key.startswith("job.") and option.long not in ("gpus-per-node", "mem", "no-requeue")
}
# Of these, the last one applies.
SAME = {"cluster": "clusters", "no-requeue": "requeue", "tasks-per-node": "ntasks-per-node"}
# The options that only change what sbatch prints, or when it returns.
WITHOUT_EFFECT = ("wait", "parsable", "quiet", "verbose", "ignore-pbs", "usage", "help", "version")
_REFUSED = {
    "wrap": "write the command into the script",
    "test-only": "remove it, and run `toolkit preflight` with the script",
    "input": "write `exec <FILE` at the start of the script",
    "export-file": "export the variables in the script, or use --export",
    "container": "start the container in the script",
    "container-id": "start the container in the script",
}
_NODES = re.compile(r"[1-9][0-9]{0,6}-[1-9][0-9]{0,6}", re.ASCII)
_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


def document_of_script(path: Path) -> Document:
    """Return the job that a batch script describes, with the line of each key; ToolkitError if toolkit cannot run it."""
    components = read_batch_script(path).components
    first = _keys_of(components[0], JobTable.model_fields)
    others = [_keys_of(one, ComponentTable.model_fields) for one in components[1:]]
    job: dict[str, Any] = {"entry": path.name, "once": True, "name": valid_job_name(path.name)}
    values: dict[str, Any] = {"job": job} | ({"component": [{} for _ in components]} if others else {})
    lines: dict[KeyPath, int] = {}
    for number, found in enumerate([first, *others]):
        for key, (value, where) in found.items():
            of_component = bool(others) and key in ComponentTable.model_fields
            (values["component"][number] if of_component else job)[key] = value
            lines[("component", str(number), key) if of_component else ("job", key)] = int(where.rpartition(":")[2])
    warning = shell_signal(job.get("sbatch", ()))
    if warning is not None:
        values["restart"] = {"warn_s": max(1, warning[1])}
        lines["restart", "warn_s"] = lines["job", "sbatch"]
    return Document(path, values, lines)


def _keys_of(directives: Iterable[Directive], names: Container[str]) -> dict[str, tuple[Any, str]]:
    """Return the keys in `names` that the directives set, with their places; `sbatch` has the other options."""
    last: dict[str, Directive] = {}
    for one in directives:
        name = SAME.get(one.name, one.name)
        if name in _REFUSED:
            raise ToolkitError(f"toolkit cannot run a script with --{name}", where=one.where, fix=_REFUSED[name])
        before = last.pop(name, None)
        adds_up = name == "mail-type" and before is not None
        last[name] = replace(one, value=f"{before.value},{one.value}") if adds_up and before else one
    keys: dict[str, tuple[Any, str]] = {}
    rest: list[Directive] = []
    for name, one in last.items():
        value = _value_of(name, one) if _KEYS.get(name) in names else None
        if value is not None:
            keys[_KEYS[name]] = (value, one.where)
        if value is None or (name == "job-name" and value != one.value):
            rest += [] if name in WITHOUT_EFFECT else [one]
    return keys | ({"sbatch": ([one.option for one in rest], rest[0].where)} if rest else {})


def _value_of(name: str, one: Directive) -> Any:
    """Return the value that a directive sets; None if the key does not accept all forms that sbatch accepts."""
    value = one.value or ""
    if name == "requeue":
        return one.name == name
    try:
        if name == "array":
            parse_array(value)
        if name == "time":
            parse_slurm_time(value)
    except ValueError as error:
        if name == "array":
            raise ToolkitError(str(error), where=one.where, fix="use a list such as 0-9%2") from error
        return None
    if name in ("nodes", "ntasks-per-node", "cpus-per-task"):
        is_range = name == "nodes" and _NODES.fullmatch(value)
        return int(value) if _NUMBER.fullmatch(value) else value if is_range else None
    return valid_job_name(value) if name == "job-name" else value
