"""`parse`: read the output of another command as toolkit does. docs/parse.md lists every kind and its keys."""

import difflib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from toolkit.errors import CheckFailedError, ToolkitError
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.records import NOTHING
from toolkit.terminal.talk import say


class Kind(NamedTuple):
    """The reader of a kind: `function(text)` of `module` returns (values of the module's `KEYS`, warnings)."""

    module: str
    function: str
    command: str


KINDS = {
    "nvidia-smi-topo-m": Kind("toolkit.topology.links.matrix", "answer_nvidia_smi_topo", "nvidia-smi topo -m"),
    "slurm-topology-addr": Kind(
        "toolkit.topology.readers.topology_address", "parse_topology_address", "env | grep SLURM_TOPOLOGY"
    ),
    "hostlist": Kind("toolkit.cli.parse", "parse_hostlist", "a list of hosts"),
    "lscpu": Kind("toolkit.topology.readers.lscpu", "answer_lscpu", "lscpu"),
    "numactl-H": Kind("toolkit.topology.readers.numactl", "answer_numactl", "numactl -H"),
    "sysfs": Kind("toolkit.topology.readers.sysfs", "answer_sysfs", "grep -r . /sys/devices/system/node"),
    "nccl-log": Kind("toolkit.topology.readers.nccl_log", "answer_nccl_log", "NCCL with NCCL_DEBUG=INFO"),
    "ibstat": Kind("toolkit.topology.readers.ibstat", "answer_ibstat", "ibstat"),
}
# Kinds of earlier versions, each with a command or library that provides the same data in a standard format.
REMOVED = {
    "squeue": "`squeue --json`",
    "sacct": "`sacct --json`",
    "sinfo": "`sinfo --json`",
    "scontrol-show-job": "`scontrol show job --json`",
    "scontrol-show-node": "`scontrol show node --json`",
    "scontrol-show-partition": "`scontrol show partition --json`",
    "scontrol-show-topology": "a YAML parser for topology.yaml (Slurm 25.05), or `toolkit parse slurm-topology-addr FILE`",
    "slurm-topology-conf": "a YAML parser for topology.yaml (Slurm 25.05), or `toolkit parse slurm-topology-addr FILE`",
    "nvidia-smi-nvlink": "NVML's nvmlDeviceGetNvLinkState (nvidia-ml-py)",
    "nvidia-smi-q": "`nvidia-smi -q -x` (XML)",
    "nvidia-smi-query-gpu": "`nvidia-smi --query-gpu=... --format=csv` with a CSV parser, or NVML (nvidia-ml-py)",
    "rocm-smi-showtopo": "`rocm-smi --showtopo --json`",
    "lstopo": "`lstopo --of xml`",
    "nccl-topo-xml": "an XML parser, because the file is XML",
    "nccl-tests": "`toolkit bench collectives --json`, or nccl-tests with `-J FILE.json`",
    "ibstatus": "`rdma -j link`, or `toolkit parse ibstat FILE`",
    "ibv_devinfo": "`rdma -j dev` and `rdma -j link`",
    "ibdev2netdev": "`rdma -j link`",
    "ibnetdiscover": "`ibnetdiscover -p`, a port per line",
    "opainfo": "the files below /sys/class/infiniband/hfi1_0/ports",
    "fi_info": "fi_getinfo() of libfabric",
}
Reader = Callable[[str], tuple[dict[str, Any], tuple[str, ...]]]


def reader_of(kind: str) -> tuple[Reader, dict[str, str]]:
    """Return the reader of a kind and the meaning of its keys."""
    if kind in REMOVED:
        raise ToolkitError(f"kind {kind!r} was removed", where="toolkit parse", fix=f"use {REMOVED[kind]}")
    if kind not in KINDS:
        similar = difflib.get_close_matches(kind.lower().replace(" ", "-"), [*KINDS, *REMOVED], n=1, cutoff=0.4)
        raise ToolkitError(
            f"{kind!r} is not a valid kind",
            where="toolkit parse",
            fix=f"did you mean {similar[0]}" if similar else f"choose one of {', '.join(KINDS)}",
        )
    module = importlib.import_module(KINDS[kind].module)
    return getattr(module, KINDS[kind].function), module.KEYS


@click.command()
@click.argument("kind")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/parse.md lists the keys.")
def parse(kind: str, file: str, as_json: bool) -> None:
    """Read FILE, the output of a command of KIND; `-` is stdin.

    The first damaged line is named on stderr; facts that the damage may affect are null.

    \b
    numactl -H | toolkit parse numactl-H - --json
    """
    reader, keys = reader_of(kind)
    text = _text_of(file)
    if kind != "hostlist" and text.lstrip().startswith("{"):
        raise CheckFailedError(
            f"expected text output of `{KINDS[kind].command}`, got JSON", where=file, fix="use a JSON parser instead"
        )
    try:
        facts, warnings = reader(text)
    except ToolkitError as error:
        error.where = f"{file}:{error.where.removeprefix('line ')}" if error.where else file
        error.fix = error.fix or f"pass the output of `{KINDS[kind].command}`"
        raise
    is_refused = facts.get("valid") is False  # facts about an invalid host list are printed before the error
    for warning in () if is_refused else warnings:
        say(f"{file}: {warning}")
    _print({key: facts[key] for key in keys}, as_json=as_json)
    if is_refused:
        raise _invalid_hostlist(file, warnings)


def _invalid_hostlist(file: str, reasons: tuple[str, ...]) -> CheckFailedError:
    where, _, reason = ": ".join(reasons).partition(": ")
    return CheckFailedError(
        reason, where=f"{file}:{where.removeprefix('line ')}", fix="use Slurm's form, such as node[1-4,8]"
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
            f"cannot be read: {error.strerror}", where=file, fix="pass a file that you can read, or - for stdin"
        ) from error
    return data.decode("utf-8-sig", errors="replace")  # Windows editors may add a byte order mark


KEYS = {
    "valid": "whether the host list is valid; the other keys are null if not",
    "count": "number of hosts in the list",
    "expansion": "the hosts, each once, in the order of the list",
    "first": "the first host",
    "last": "the last host",
}


def parse_hostlist(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (values of `KEYS`, why the host list is invalid)."""
    if not text.strip():
        raise CheckFailedError("expected a list of hosts, got an empty string", where="line 1")
    invalid = dict.fromkeys(KEYS) | {"valid": False}
    try:
        hosts = [] if text.strip() in NOTHING else expand_hostlist(text.strip())
    except ToolkitError as error:
        return invalid, (f"line 1: {error.message}",)
    if not hosts:
        return invalid, ("line 1: expected at least one host, got none",)
    return {"valid": True, "count": len(hosts), "expansion": hosts, "first": hosts[0], "last": hosts[-1]}, ()
