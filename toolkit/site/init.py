"""Generate a site file from the live cluster: values from Slurm are facts, others are guesses with a command to verify."""

import os
import pwd
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.rundir.files import typed_path, write_text
from toolkit.site.mpi import ANY, Mpi, find_mpi
from toolkit.slurm.cluster import ClusterFacts, Node, closed_by, cluster_facts
from toolkit.slurm.commands import Slurm, prints_commands
from toolkit.slurm.limits import PartitionLimits
from toolkit.slurm.times import format_slurm_time

__all__ = ["init_site", "path_of", "write_site"]

NETWORKS = Path("/sys/class/net")
# Prefixes of interface names by network type, the fastest first.
_FABRICS = (("hsn", "slingshot"), ("ib", "infiniband"))
_SHARED = ("SCRATCH", "PSCRATCH", "WORK")
_NOT_A_NETWORK = ("lo", "docker", "veth", "br-", "virbr", "tkdc")


@dataclass(frozen=True)
class Host:
    """This host: its fastest network, the MPI of the mpirun on PATH, and a variable with the path of a shared folder."""

    fabric: str
    interface: str
    mpi: Mpi | None
    shared_variable: str
    modules: tuple[str, ...]


def look_at_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Inspect this machine; properties that are not found are "", None or ()."""
    fabric, interface = _fabric_and_interface()
    return Host(
        fabric=fabric,
        interface=interface,
        mpi=find_mpi(environ),
        shared_variable=next((name for name in _SHARED if Path(environ.get(name) or "/nowhere").is_dir()), ""),
        modules=tuple(name for name in environ.get("LOADEDMODULES", "").split(":") if name),
    )


def _fabric_and_interface() -> tuple[str, str]:
    names = sorted(path.name for path in NETWORKS.iterdir()) if NETWORKS.is_dir() else []
    for prefix, fabric in _FABRICS:
        for name in names:
            if name.startswith(prefix) and name[len(prefix) :].isdigit():
                return fabric, name
    others = [name for name in names if not name.startswith(_NOT_A_NETWORK)]
    return ("ethernet", others[0]) if others else ("", "")


OWN_SITES = "~/.config/toolkit/sites"
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MIB_PER_GIB = 1024
_LISTED = 8  # maximum number of node features in a comment


def init_site(name: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Query Slurm and inspect this host; return the site name (by default ClusterName) and the content of the site file.

    Raises:
        NotFoundError, SchedulerRefusedError: Slurm does not respond.
        ToolkitError: the site name is not valid.
    """
    cluster = cluster_facts(Slurm(echo=prints_commands()), _user(environ))
    chosen = name or _NAME.sub("_", cluster.name)[:64]
    if not chosen or _NAME.search(chosen) or len(chosen) > 64:
        raise ToolkitError(
            f"{chosen!r} is not a valid site name", fix="pass --name with the characters A-Z a-z 0-9 . _ - only"
        )
    return chosen, site_text(chosen, cluster, look_at_host(environ), environ)


def _user(environ: Mapping[str, str]) -> str:
    """Return the name of the user; "" in a container without an entry for the user."""
    try:
        return environ.get("USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def site_text(name: str, cluster: ClusterFacts, host: Host, environ: Mapping[str, str]) -> str:
    """Return the content of a site file, from the facts about the cluster and about this host."""
    document = tomlkit.document()
    for line in (
        f"{name}, from the live cluster: Slurm {cluster.version}. Slurm reported the values with `from`.",
        "Check each `guess`; `toolkit site check` verifies the file with a short job in each partition.",
    ):
        document.add(tomlkit.comment(line))
    document.add("name", tomlkit.item(name))
    document.add("checked", tomlkit.item("from the live cluster, not verified"))
    tables = {
        "detect": _detect(cluster),
        "scheduler": _scheduler(environ),
        "launcher": _launcher(cluster, host),
        "gpu": _gpu(cluster),
        "env": _environment(host),
        "network": _network(host),
        "paths": _paths(cluster, host),
    }
    for key, table in tables.items():
        if table is not None:
            document.add(tomlkit.nl())
            document.add(key, table)
    _add_partitions(document, cluster)
    text = tomlkit.dumps(document).rstrip() + "\n"
    Site.model_validate(tomllib.loads(text))  # raises if the text would not load as a site file
    return text


def write_site(text: str, path: Path, *, force: bool) -> None:
    """Write a site file, and create its folder if needed.

    Raises:
        ToolkitError: the file exists and `force` is not set, or it cannot be written.
    """
    if path.exists() and not force:
        raise ToolkitError(
            "the file already exists", where=str(path), fix="choose another file with -o, or overwrite it with --force"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, mode=0o644)
    except OSError as error:
        raise ToolkitError(
            f"cannot write the file: {error.strerror}", where=str(path), fix="choose another file with -o"
        ) from error


def path_of(name: str) -> Path:
    """Return the path of the user's own site file for site `name`."""
    return typed_path(OWN_SITES) / f"{name}.toml"


def _set(table: Table, key: str, value: Any, note: str) -> None:
    item = tomlkit.item(value)
    item.comment(note)
    table.add(key, item)


def _fact(table: Table, key: str, value: Any, command: str, detail: str = "") -> None:
    _set(table, key, value, f"from {command}" + (f": {detail}" if detail else ""))


def _guess(table: Table, key: str, value: Any, why: str, proof: str) -> None:
    _set(table, key, value, f"guess: {why}; verify it: {proof}")


def _detect(cluster: ClusterFacts) -> Table:
    table = tomlkit.table()
    _fact(table, "cluster_name", cluster.name, "scontrol show config")
    return table


def _scheduler(environ: Mapping[str, str]) -> Table:
    table = tomlkit.table()
    _fact(table, "kind", "slurm", "scontrol show config")
    if exported := environ.get("SLURM_CONF"):
        _fact(table, "conf", str(Path(exported).absolute()), "SLURM_CONF in your environment")
    return table


def _launcher(cluster: ClusterFacts, host: Host) -> Table:
    table = tomlkit.table()
    if not cluster.mpi_plugins:
        _guess(table, "kind", "auto", "srun did not respond here", "toolkit site check")
        return table
    _guess(table, "kind", "srun", "it is installed; some sites require mpirun", "toolkit site check")
    listed = f"`srun --mpi=list` lists {', '.join(cluster.mpi_plugins)}"
    default = cluster.settings.get("MpiDefault", "")
    spoken = host.mpi.plugins if host.mpi else ANY
    fitting = next((one for one in spoken if one in cluster.mpi_plugins), "")
    if default not in ("", "none", "(null)") and (default in spoken or not fitting):
        _fact(table, "mpi", default, "scontrol show config", f"MpiDefault; {listed}")
    elif fitting:
        why = f"{listed}, and the MPI here supports it: {host.mpi.called}" if host.mpi else listed
        _guess(table, "mpi", fitting, why, "toolkit site check")
    if host.mpi and host.mpi.library:
        _guess(
            table, "libmpi", host.mpi.library, f"next to the mpirun on PATH here: {host.mpi.called}",
            "toolkit site check",
        )  # fmt: skip
    return table


def _gpu_option(cluster: ClusterFacts) -> str:
    select = cluster.settings.get("SelectType", "")
    return "--gpus-per-node={count}" if "cons_tres" in select or "cray" in select else "--gres=gpu:{count}"


def _gpu(cluster: ClusterFacts) -> Table | None:
    """Return the table [gpu]; --gpus-per-node requires select/cons_tres, also under the Cray plugin."""
    if not any(node.gpus for node in cluster.nodes):
        return None
    table = tomlkit.table()
    detail = f"SelectType={cluster.settings.get('SelectType', '')}"
    _fact(table, "request", _gpu_option(cluster), "scontrol show config", detail)
    if types := cluster.gpu_types:
        table.add(tomlkit.comment(f"Types, from scontrol show node: {', '.join(types)}. To request one of them:"))
        table.add(tomlkit.comment(f'request = "--gres=gpu:{types[0]}:{{count}}"'))
    return table


def _environment(host: Host) -> Table | None:
    if not host.modules:
        return None
    table = tomlkit.table()
    table.add(
        tomlkit.comment("guess: loaded in your shell now; keep those that jobs need; verify it: toolkit site check")
    )
    table.add(tomlkit.comment(f"modules = [{', '.join(f'{name!r}' for name in host.modules)}]"))
    return table


def _network(host: Host) -> Table | None:
    if not host.fabric:
        return None
    table = tomlkit.table()
    why = f"this host has {host.interface}"
    _guess(table, "fabric", host.fabric, why, "srun -N1 ls /sys/class/infiniband /sys/class/net")
    _guess(table, "interface", host.interface, why, "toolkit site check")
    return table


def _paths(cluster: ClusterFacts, host: Host) -> Table | None:
    local = cluster.settings.get("TmpFS", "")
    table = tomlkit.table()
    if name := host.shared_variable:
        _guess(table, "scratch", f"${name}", f"{name} is set on this host", "toolkit site check")
    if local.startswith("/"):
        _guess(table, "local_scratch", local, "TmpFS in scontrol show config", f"srun -N1 df -h {local}")
    return table if table.value.body else None


def _add_partitions(document: tomlkit.TOMLDocument, cluster: ClusterFacts) -> None:
    partitions = tomlkit.table(is_super_table=True)
    omitted = []
    for one in cluster.partitions.values():
        if reason := closed_by(one) or ("" if one.state == "UP" else f"State={one.state}"):
            omitted.append(f"{one.name} ({reason})")
        else:
            partitions.add(one.name, _partition(one, cluster))
    document.add(tomlkit.nl())
    if cluster.accounts:
        default = f", {cluster.default_account} if a job does not set one" if cluster.default_account else ""
        document.add(
            tomlkit.comment(f"Your accounts, from sacctmgr show associations: {', '.join(cluster.accounts)}{default}.")
        )
    if omitted:
        document.add(tomlkit.comment(f"Omitted, from scontrol show partition: {', '.join(omitted)}."))
    if partitions:
        document.add("partitions", partitions)


def _partition(one: PartitionLimits, cluster: ClusterFacts) -> Table:
    table, command, nodes = tomlkit.table(), "scontrol show partition", cluster.nodes_of(one.name)
    if one.is_default:
        _fact(table, "default", True, command)
    if one.max_nodes:
        _fact(table, "max_nodes", one.max_nodes, command)
    elif one.total_nodes:
        _fact(table, "max_nodes", one.total_nodes, command, f"no limit, TotalNodes={one.total_nodes}")
    if one.max_time_s is not None:
        _fact(table, "max_time", format_slurm_time(one.max_time_s).removeprefix("0-"), command)
    for key, counts in (
        ("cpus_per_node", [node.cpus for node in nodes]),
        ("gpus_per_node", [node.gpu_count for node in nodes]),
        ("mem_gb_per_node", [node.memory_mb // _MIB_PER_GIB for node in nodes]),
    ):
        if any(counts):
            _fact(table, key, max(counts), "scontrol show node", _spread(counts))
            if key == "gpus_per_node":
                table.add(
                    tomlkit.comment(
                        "Jobs here request all of them by default; a job without GPUs sets gpus_per_node = 0 in [job]."
                    )
                )
    types = sorted({kind for node in nodes for kind in node.gpus})
    if len(cluster.gpu_types) > 1 and types and all(types):
        if len(types) == 1:
            request = _gpu_option(cluster).replace("{count}", f"{types[0]}:{{count}}")
            _fact(table, "gpu_request", request, "scontrol show node", "the only type here")
        else:
            table.add(tomlkit.comment(f"Types, from scontrol show node: {', '.join(types)}; gpu_request selects one."))
    if features := _features(nodes):
        table.add(tomlkit.comment(f"Features, from scontrol show node: {features}; `constraint` requests one."))
    table.add(tomlkit.nl())
    return table


def _spread(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return "" if least == most else f"the maximum; nodes have {least} to {most}"


def _features(nodes: Iterable[Node]) -> str:
    names = list(dict.fromkeys(feature for node in nodes for feature in node.features))
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
