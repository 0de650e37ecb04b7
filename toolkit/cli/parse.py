"""`parse`: read the output of another command as the toolkit does. docs/parse.md lists every kind and its keys."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.talk import say


class Kind(NamedTuple):
    """Where a kind's reader is: `function(text)` returns the values of the module's `keys`, and warnings."""

    module: str
    function: str
    keys: str
    command: str


KINDS = {
    "squeue": Kind("toolkit.slurm.parse_squeue", "parse_squeue", "KEYS", "squeue"),
    "sacct": Kind("toolkit.slurm.parse_sacct", "parse_sacct", "KEYS", "sacct"),
    "sinfo": Kind("toolkit.slurm.parse_sinfo", "parse_sinfo", "KEYS", "sinfo"),
    "scontrol-show-job": Kind("toolkit.slurm.parse_show", "parse_show_job", "JOB_KEYS", "scontrol show job"),
    "scontrol-show-node": Kind("toolkit.slurm.parse_show", "parse_show_node", "NODE_KEYS", "scontrol show node"),
    "scontrol-show-partition": Kind(
        "toolkit.slurm.parse_show", "parse_show_partition", "PARTITION_KEYS", "scontrol show partition"
    ),
    "nvidia-smi-topo-m": Kind("toolkit.topology.links", "answer_nvidia_smi_topo", "KEYS", "nvidia-smi topo -m"),
    "nvidia-smi-nvlink": Kind(
        "toolkit.topology.parsers.nvidia_smi_nvlink", "answer_nvidia_smi_nvlink", "KEYS", "nvidia-smi nvlink --status"
    ),
    "nvidia-smi-q": Kind("toolkit.topology.parsers.nvidia_smi_q", "answer_nvidia_smi_q", "KEYS", "nvidia-smi -q"),
    "nvidia-smi-query-gpu": Kind(
        "toolkit.topology.parsers.nvidia_smi_query", "answer_nvidia_smi_query", "KEYS",
        "nvidia-smi --query-gpu=... --format=csv",
    ),
    "rocm-smi-showtopo": Kind(
        "toolkit.topology.parsers.rocm_smi_topo", "answer_rocm_smi_topo", "KEYS", "rocm-smi --showtopo"
    ),
    "scontrol-show-topology": Kind(
        "toolkit.topology.parsers.slurm_topology", "parse_slurm_topology", "KEYS", "scontrol show topology"
    ),
    "slurm-topology-conf": Kind(
        "toolkit.topology.parsers.slurm_topology", "parse_slurm_topology", "KEYS", "cat /etc/slurm/topology.conf"
    ),
    "slurm-topology-addr": Kind(
        "toolkit.topology.parsers.topology_address", "parse_topology_address", "KEYS", "env | grep SLURM_TOPOLOGY"
    ),
    "hostlist": Kind("toolkit.slurm.parse_hostlist", "parse_hostlist", "KEYS", "a list of hosts"),
    "lscpu": Kind("toolkit.topology.parsers.lscpu", "answer_lscpu", "KEYS", "lscpu"),
    "numactl-H": Kind("toolkit.topology.parsers.numactl", "answer_numactl", "KEYS", "numactl -H"),
    "lstopo": Kind("toolkit.topology.parsers.lstopo", "answer_lstopo", "KEYS", "lstopo -v"),
    "sysfs": Kind("toolkit.topology.parsers.sysfs", "answer_sysfs", "KEYS", "grep -r . /sys/devices/system/node"),
    "nccl-topo-xml": Kind(
        "toolkit.topology.parsers.nccl_topo_xml", "answer_nccl_topo_xml", "KEYS", "NCCL with NCCL_TOPO_DUMP_FILE=FILE"
    ),
    "nccl-log": Kind("toolkit.topology.parsers.nccl_log", "answer_nccl_log", "KEYS", "NCCL with NCCL_DEBUG=INFO"),
    "nccl-tests": Kind("toolkit.topology.parsers.nccl_tests", "answer_nccl_tests", "KEYS", "all_reduce_perf"),
    "ibstat": Kind("toolkit.topology.parsers.ibstat", "answer_ibstat", "KEYS", "ibstat"),
    "ibstatus": Kind("toolkit.topology.parsers.ibstatus", "answer_ibstatus", "KEYS", "ibstatus"),
    "ibv_devinfo": Kind("toolkit.topology.parsers.ibv_devinfo", "answer_ibv_devinfo", "KEYS", "ibv_devinfo"),
    "ibdev2netdev": Kind("toolkit.topology.parsers.ibdev2netdev", "answer_ibdev2netdev", "KEYS", "ibdev2netdev"),
    "ibnetdiscover": Kind("toolkit.topology.parsers.ibnetdiscover", "answer_ibnetdiscover", "KEYS", "ibnetdiscover"),
    "opainfo": Kind("toolkit.topology.parsers.opainfo", "answer_opainfo", "KEYS", "opainfo"),
    "fi_info": Kind("toolkit.topology.parsers.fi_info", "answer_fi_info", "KEYS", "fi_info"),
}  # fmt: skip
Reader = Callable[[str], tuple[dict[str, Any], tuple[str, ...]]]


def reader_of(kind: str) -> tuple[Reader, dict[str, str]]:
    """The reader of a kind and the meaning of its keys.

    Raises:
        ToolkitError: there is no such kind; the nearest is named.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind.lower().replace(" ", "-"), KINDS, n=1, cutoff=0.4)
        raise ToolkitError(
            f"there is no kind {kind!r}",
            where="toolkit parse",
            fix=f"did you mean {near[0]}" if near else f"give one of {', '.join(KINDS)}",
        )
    module = importlib.import_module(KINDS[kind].module)
    return getattr(module, KINDS[kind].function), getattr(module, KINDS[kind].keys)


@click.command()
@click.argument("kind")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable; docs/parse.md has the keys.")
def parse(kind: str, file: str, as_json: bool) -> None:
    """Read FILE, which holds the output of a command of KIND; `-` is stdin.

    What is damaged is named on stderr with its line, and its facts are null.

    \b
    squeue -l | toolkit parse squeue - --json
    """
    reader, keys = reader_of(kind)
    text = _text_of(file)
    if kind != "hostlist" and text.lstrip().startswith("{"):
        command = KINDS[kind].command
        raise CheckFailedError(
            "this is JSON, which is not read", where=file, fix=f"give what `{command}` prints without --json"
        )
    try:
        facts, warnings = reader(text)
    except ToolkitError as error:
        error.where = f"{file}:{error.where.removeprefix('line ')}" if error.where else file
        error.fix = error.fix or f"give the output of `{KINDS[kind].command}`"
        raise
    refused = facts.get("valid") is False  # a list of hosts that is none has an answer, and is none all the same
    for warning in () if refused else warnings:
        say(f"{file}: {warning}")
    _print({key: facts[key] for key in keys}, as_json=as_json)
    if refused:
        raise _refused_list(file, warnings)


def _refused_list(file: str, reasons: tuple[str, ...]) -> CheckFailedError:
    where, _, reason = ": ".join(reasons).partition(": ")
    return CheckFailedError(
        reason, where=f"{file}:{where.removeprefix('line ')}", fix="write it as Slurm does, such as node[1-4,8]"
    )


def _print(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=1))
        return
    for key, value in answer.items():
        many = isinstance(value, list) and value and isinstance(value[0], dict)
        click.echo(f"{key}: {'' if many else json.dumps(value)}")
        for entry in value if many else ():
            click.echo(f"  {json.dumps(entry)}")


def _text_of(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ToolkitError(
            f"cannot be read: {error.strerror}", where=file, fix="give a file that you can read, or - for stdin"
        ) from error
    return data.decode("utf-8-sig", errors="replace")  # Windows' editors put a mark before the text
