"""Small programs that answer for Slurm's commands as a cluster of two kinds of nodes does."""

from pathlib import Path

from fake_slurm import FakeSlurm

CONFIG = """Configuration data as of 2026-11-22T15:00:00
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = ours
GresTypes               = gpu
MpiDefault              = none
SelectType              = select/cons_tres
SLURM_VERSION           = 24.05.4
TmpFS                   = /tmp

Slurmctld(primary) at c1 is UP
"""
_NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUEfctv={cpus} CPUTot=128 CPULoad=0.1 "
    "AvailableFeatures={features} ActiveFeatures={features} Gres={gres} NodeAddr={name} NodeHostName={name} "
    "OS=Linux 6.1 #1 SMP RealMemory={memory} AllocMem=0 Sockets=2 Boards=1 MemSpecLimit=2048 State=IDLE "
    "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions={partitions} CfgTRES=cpu=8 AllocTRES=\n"
)
_PARTITION = (
    "PartitionName={name} AllowGroups={groups} AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default} QoS=N/A "
    "DefaultTime=01:00:00 MaxNodes={max_nodes} MaxTime={max_time} MinNodes=1 Nodes=n[1-4] State={state} TotalCPUs=512 "
    "TotalNodes={nodes} SelectTypeParameters=NONE RootOnly=NO\n"
)
NODES = "".join(
    _NODE.format(name=name, cpus=cpus, features=features, gres=gres, memory=memory, partitions=partitions)
    for name, cpus, features, gres, memory, partitions in (
        ("n1", 126, "milan", "(null)", 258048, "cpu,debug"),
        ("n2", 62, "rome", "(null)", 131072, "cpu,debug"),
        ("g1", 62, "a100,ib", "gpu:a100:4(S:0-1),nvme:3800", 514048, "gpu,gone,staff"),
        ("g2", 62, "a100,ib", "gpu:a100:4(S:0-1),nvme:3800", 514048, "gpu,gone,staff"),
    )
)
PARTITIONS = "".join(
    _PARTITION.format(
        name=name, groups=groups, default=default, max_nodes=most, max_time=time, state=state, nodes=nodes
    )
    for name, groups, default, most, time, state, nodes in (
        ("cpu", "ALL", "YES", "UNLIMITED", "2-00:00:00", "UP", 2),
        ("debug", "ALL", "NO", "1", "00:30:00", "UP", 2),
        ("gpu", "ALL", "NO", "2", "UNLIMITED", "UP", 2),
        ("gone", "ALL", "NO", "2", "UNLIMITED", "DOWN", 2),
        ("staff", "admins", "NO", "2", "UNLIMITED", "UP", 2),
    )
)
SINFO = (
    ("cpu", "up", "2-00:00:00", "2", "0/2/0/2"),
    ("debug", "up", "30:00", "2", "0/2/0/2"),
    ("gpu", "up", "infinite", "2", "1/1/0/2"),
)


def install(folder: Path) -> FakeSlurm:
    """Put scontrol, srun, sinfo, sbatch and sacctmgr into `folder`, which goes on PATH."""
    slurm = FakeSlurm(folder)
    answers = {"config": CONFIG, "node": NODES, "partition": PARTITIONS}
    for thing, text in answers.items():
        (folder / f"{thing}.txt").write_text(text)
    scripts = {
        "scontrol": f'shift $(($# - 2)); [ "$1" = show ] && cat "{folder}/$2.txt"',  # what stands before is options
        "srun": "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmix\\n\\tpmi2\\nspecific pmix plugin versions available: pmix_v4\\n' >&2",
        "sacctmgr": 'case "$*" in *associations*) printf "ours|%s||||||||||||\\n" astro chem astro;; *) echo "ada|chem";; esac',
        "sbatch": "exit 1",
    }
    for name, script in scripts.items():
        slurm.script(name, script)
    rows = " ".join(f'"{" ".join(row)}"' for row in SINFO)
    slurm.script(
        "sinfo",
        "for word; do case $word in --format=*) form=${word#--format=};; esac; done\n"
        "mark=${form#%R}; mark=${mark%%\\%*}\n"
        f"for row in {rows}; do\n  set -- $row\n"
        '  for cell in "$1" "$2" "$3" "$4" "$5" 1-infinite "$1"; do printf "%s%s" "$cell" "$mark"; done; echo\ndone',
        "/bin/bash",
    )
    return slurm
