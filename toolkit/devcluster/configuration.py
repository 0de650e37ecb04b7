"""Write the files of a dev cluster: slurm.conf, gres.conf, topology.conf, slurmdbd.conf, hosts, munge key."""

import os
import secrets
import socket
import stat
from pathlib import Path
from shlex import quote

from toolkit.devcluster.layout import CONTROLLER, ClusterSpec, Layout, layout_beside
from toolkit.devcluster.releases import release_of

# All dev clusters have this name in Slurm, so that one site file fits all. Only clusters that share the database of
# another cluster need different names; they use the names given to `up`.
SLURM_NAME = "devcluster"
CPUS_PER_NODE = 8
MEMORY_PER_NODE_MB = 16000
# Slurm delays a requeued job by this time plus a second, so that the launch credential of its last run has expired.
# The default is 120 s.
CREDENTIAL_EXPIRES_S = 10
GRACE_S = 10
# The device of a simulated GPU: Slurm requires a character device.
NULL_DEVICE = os.makedev(1, 3)
ACCOUNT = "toolkit"

# Runs on each node at the end of a job, so that no process survives the job, as on sites with cgroups.
# The shell expands the list of processes before grep starts, so that only this script must be skipped.
EPILOG = """#!/bin/sh
for process in /proc/[0-9]*; do
    [ "$process" = "/proc/$$" ] && continue
    if grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$process/environ" 2>/dev/null; then
        kill -KILL "${process#/proc/}" 2>/dev/null
    fi
done
exit 0
"""

# slurmctld calls this script with `-s SUBJECT ADDRESSES`.
MAIL = """#!/bin/sh
echo "$3: $2" >> {folder}/mail.log
"""


def slurm_name(layout: Layout, spec: ClusterSpec) -> str:
    """Return the name of the cluster in Slurm (ClusterName)."""
    return layout.name if spec.accounting_of else SLURM_NAME


def slurm_conf(layout: Layout, spec: ClusterSpec) -> str:
    """Return the contents of slurm.conf."""
    port = layout.first_port
    lines = [
        f"ClusterName={slurm_name(layout, spec)}",
        f"SlurmctldHost={CONTROLLER}({spec.node_address(CONTROLLER)})",
        f"SlurmctldPort={port}",
        f"SlurmdPort={port + 1}",
        *_plugin_lines(spec),
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={layout.munge_socket},cred_expire={CREDENTIAL_EXPIRES_S}",
        f"StateSaveLocation={layout.state}",
        f"SlurmctldLogFile={layout.logs}/slurmctld.log",
        f"SlurmdLogFile={layout.logs}/slurmd-%n.log",
        f"SlurmctldPidFile={layout.sockets}/slurmctld.pid",
        f"SlurmdSpoolDir={layout.folder}/nodes/%n/spool",
        f"SlurmdPidFile={layout.folder}/nodes/%n/slurmd.pid",
        "# No cgroups needed: processes are tracked by their parents, and the epilog kills orphans.",
        "ProctrackType=proctrack/linuxproc",
        f"Epilog={layout.epilog}",
        "# No binding: the nodes have more CPUs than this machine.",
        "TaskPlugin=task/none",
        "SlurmdParameters=config_overrides",
        f"MpiDefault={release_of(spec.slurm).mpi}",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerCPU={MEMORY_PER_NODE_MB // CPUS_PER_NODE}",
        "GresTypes=gpu",
        "TopologyPlugin=topology/tree",
        "SchedulerType=sched/backfill",
        "# Start jobs at once: users and tests wait for them.",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1",
        "PriorityType=priority/basic",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        f"MailProg={layout.mail_program}",
        "MinJobAge=300",
        "MaxArraySize=10001",
        "KillWait=15",
        "OverTimeLimit=0",
        "CompleteWait=0",
        "InactiveLimit=0",
        "SlurmctldTimeout=10",
        "SlurmdTimeout=10",
        "MessageTimeout=10",
        "BatchStartTimeout=60",
        "# A disconnected node serves again as soon as it responds.",
        "ReturnToService=2",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
        "# Without cgroups, slurmstepd kills a step above its memory, so that its state is OUT_OF_MEMORY.",
        "JobAcctGatherParams=OverMemoryKill",
        *_accounting_lines(layout, spec),
        *_node_lines(spec),
        *_partition_lines(),
        *spec.options,
    ]
    return "\n".join(lines) + "\n"


def _plugin_lines(spec: ClusterSpec) -> list[str]:
    return [f"PluginDir={plugins}" for plugins in Path(spec.root).glob("usr/lib/*/slurm-wlm")] if spec.root else []


def _accounting_lines(layout: Layout, spec: ClusterSpec) -> list[str]:
    if not spec.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    host, port = slurmdbd_address(layout, spec)
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={host}",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
        "AccountingStorageEnforce=associations,limits,qos",
    ]


def slurmdbd_address(layout: Layout, spec: ClusterSpec) -> tuple[str, int]:
    """Return the address and port of the slurmdbd that this cluster uses."""
    if not spec.accounting_of:
        return spec.node_address(CONTROLLER), layout.first_port + 2
    network = spec.seat.rpartition(".")[0]
    return f"{network}.2", layout_beside(spec.accounting_of).first_port + 2


def _node_lines(spec: ClusterSpec) -> list[str]:
    sockets = 2
    shape = (
        f"CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard={sockets} CoresPerSocket={CPUS_PER_NODE // sockets} "
        f"ThreadsPerCore=1 RealMemory={MEMORY_PER_NODE_MB}" + (f" Gres=gpu:{spec.gpus}" if spec.gpus else "")
    )
    return [f"NodeName={name} NodeAddr={spec.node_address(name)} {shape}" for name in spec.node_names]


def _partition_lines() -> list[str]:
    """Return the partitions. Jobs in partitions with a higher PriorityTier can preempt jobs in `low`, and no others."""
    ordinary = "PriorityTier=10 PreemptMode=OFF"
    long = "DefaultTime=10 MaxTime=1-00:00:00"
    return [
        f"PartitionName=main Nodes=ALL Default=YES {long} {ordinary}",
        f"PartitionName=debug Nodes=ALL DefaultTime=10 MaxTime=30 {ordinary}",
        f"PartitionName=short Nodes=ALL DefaultTime=1 MaxTime=2 {ordinary}",
        f"PartitionName=low Nodes=ALL {long} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}",
        f"PartitionName=high Nodes=ALL {long} PriorityTier=20 PreemptMode=OFF",
    ]


def gres_conf(layout: Layout, spec: ClusterSpec) -> str:
    """Return the contents of gres.conf: simulated GPUs, with one device file each."""
    if not spec.gpus:
        return "AutoDetect=off\n"
    last = spec.gpus - 1
    files = f"{layout.devices}/nvidia[0-{last}]" if last else f"{layout.devices}/nvidia0"
    return f"AutoDetect=off\nName=gpu File={files}\n"


def topology_conf(spec: ClusterSpec) -> str:
    """Return the contents of topology.conf: the first half of the nodes on leaf1, the rest on leaf2, and one spine."""
    half = (spec.nodes + 1) // 2
    ranges = [(first, last) for first, last in ((1, half), (half + 1, spec.nodes)) if first <= last]
    lines = [
        f"SwitchName=leaf{number} Nodes=node" + (f"[{first}-{last}]" if first < last else f"{first}")
        for number, (first, last) in enumerate(ranges, start=1)
    ]
    lines.append("SwitchName=spine Switches=" + ",".join(f"leaf{n}" for n in range(1, len(ranges) + 1)))
    return "\n".join(lines) + "\n"


def slurmdbd_conf(layout: Layout, spec: ClusterSpec) -> str:
    """Return the contents of slurmdbd.conf. The database authenticates root by its Unix socket, without a password."""
    return "\n".join(
        [
            f"DbdHost={CONTROLLER}",
            f"DbdAddr={spec.node_address(CONTROLLER)}",
            f"DbdPort={layout.first_port + 2}",
            *_plugin_lines(spec),
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            f"PidFile={layout.sockets}/slurmdbd.pid",
            f"LogFile={layout.logs}/slurmdbd.log",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm",
            "",
        ]
    )


def hosts(spec: ClusterSpec) -> str:
    """Return the contents of /etc/hosts for the nodes."""
    lines = ["127.0.0.1 localhost", f"{spec.host_address} {socket.gethostname()}"]
    lines += [f"{spec.node_address(name)} {name}" for name in (CONTROLLER, *spec.node_names)]
    return "\n".join(lines) + "\n"


def name_services() -> str:
    """Return the contents of /etc/nsswitch.conf for the nodes: this host's, but only the hosts file resolves names.

    Nodes have no route to a DNS server, so a lookup of an unknown address would fail with "try again" instead of
    "unknown". torch's store looks up IPv6 addresses, which the hosts file does not contain, and warned on every rank.
    """
    path = Path("/etc/nsswitch.conf")
    lines = path.read_text().splitlines() if path.exists() else []
    return "\n".join([*(line for line in lines if not line.startswith("hosts:")), "hosts: files"]) + "\n"


def write_folder(layout: Layout, spec: ClusterSpec) -> None:
    """Write all files of the cluster folder, but keep the munge key of an earlier `up`."""
    layout.write_spec(spec)
    for path in layout.own_folders:
        path.mkdir(exist_ok=True)
    for name in (CONTROLLER, *spec.node_names):
        private_tmp = layout.node_folder(name) / "tmp"
        private_tmp.mkdir(parents=True, exist_ok=True)
        private_tmp.chmod(0o1777)
        (layout.node_folder(name) / "spool").mkdir(exist_ok=True)
    for number in range(spec.gpus):
        device = layout.devices / f"nvidia{number}"
        if not device.exists():
            os.mknod(device, stat.S_IFCHR | 0o666, NULL_DEVICE)
    if spec.accounting_of:
        _write_private(layout.munge_key, layout_beside(spec.accounting_of).munge_key.read_bytes())
    elif not layout.munge_key.exists():
        _write_private(layout.munge_key, secrets.token_bytes(128))
    etc = layout.slurm_conf.parent
    layout.slurm_conf.write_text(slurm_conf(layout, spec))
    # Without this file slurmd exits if it finds no cgroup mount, although it uses none (ProctrackType, TaskPlugin).
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for program, text in ((layout.epilog, EPILOG), (layout.mail_program, MAIL.format(folder=quote(str(layout.logs))))):
        program.write_text(text)
        program.chmod(0o755)
    (etc / "gres.conf").write_text(gres_conf(layout, spec))
    (etc / "topology.conf").write_text(topology_conf(spec))
    layout.hosts.write_text(hosts(spec))
    layout.name_services.write_text(name_services())
    if spec.has_database:
        _write_private(etc / "slurmdbd.conf", slurmdbd_conf(layout, spec).encode())


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)
