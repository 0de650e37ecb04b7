"""Parse the output of Slurm commands safely, whatever names and comments contain.

Cells are separated by a mark that is random for each query, so that no name can contain it. A record starts and ends
with the same key. Any other output, except a banner of the site before the first record, makes the whole output invalid,
since toolkit must not mistake a job with a damaged record for one that Slurm no longer knows.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import CheckFailedError, SchedulerRefusedError

__all__ = [
    "NOTHING", "cluster_of_allocation", "for_cluster", "has_no_address", "named", "show_fields",
    "whole_number", "with_cluster_option",
]  # fmt: skip

# What Slurm's commands print for a missing value.
NOTHING = frozenset({"", "(null)", "None", "NONE", "none", "N/A", "Unknown", "None assigned"})


def whole_number(text: str | None) -> int | None:
    """Return the number in `text`; None for anything else, such as UNLIMITED."""
    return int(text) if text and text.isascii() and text.isdigit() else None  # "²" is a digit too, but not a number


class UnreadableError(SchedulerRefusedError):
    """A Slurm command printed something other than the requested records."""

    def __init__(self, command: str, line: str) -> None:
        super().__init__(f"cannot parse the output of {command}: {line.strip()[:60]!r}")


def new_mark() -> str:
    """Return a new random mark to separate the cells in the output of one query."""
    return f"~{secrets.token_hex(6)}~"


def read_records(
    command: str, text: str, mark: str, width: int, *, key: re.Pattern[str] | None = None
) -> list[list[str]]:
    """Return the `width` cells of each record, "" for missing values ("N/A", "(null)", ...).

    The mark follows every cell, and a newline the last cell; `key` matches the first cell of a record. Raises
    UnreadableError if `text` contains anything else.
    """
    *cells, rest = text.replace("\r\n", "\n").split(mark)
    if rest.strip():
        raise UnreadableError(command, rest)
    if not cells:
        return []
    greeting, _, cells[0] = cells[0].rpartition("\n")
    damaged = next((line for line in greeting.split("\n") if key is not None and key.match(line.strip())), None)
    if damaged is not None:
        raise UnreadableError(command, damaged)
    records = []
    for begin in range(0, len(cells), width):
        record = [cell.strip() for cell in cells[begin : begin + width]]
        in_place = cells[begin].startswith("\n") or not begin
        whole = len(record) == width and record[0] == record[-1] and (key is None or key.fullmatch(record[0]))
        if not in_place or not whole:
            raise UnreadableError(command, " ".join(record))
        records.append(["" if cell in NOTHING else cell for cell in record])
    return records


# Keys with free text as value, up to the next known key or the end of the line.
FREE_TEXT = frozenset(
    "JobName Name Comment AdminComment SystemComment Extra Reason OS Command WorkDir StdErr StdIn StdOut SubmitLine".split()  # noqa: SIM905
)
# Every key that may follow free text in the output of scontrol for jobs, nodes and partitions, Slurm 17.11 to 26.05.
KNOWN = FREE_TEXT | frozenset(
    """JobId ArrayJobId ArrayTaskId ArrayTaskThrottle HetJobId HetJobIdSet HetJobOffset PackJobId PackJobOffset UserId GroupId
    MCS_label Priority Nice Account QOS WCKey JobState Requeue Restarts BatchFlag Reboot ExitCode DerivedExitCode RunTime
    TimeLimit TimeMin SubmitTime EligibleTime AccrueTime ResizeTime StartTime EndTime Deadline PreemptEligibleTime
    PreemptTime SuspendTime SecsPreSuspend LastSchedEval Scheduler Partition AllocNode:Sid ReqNodeList ExcNodeList NodeList
    SchedNodeList BatchHost FedOrigin FedViableSiblings FedActiveSiblings NumNodes NumCPUs NumTasks CPUs/Task ReqB:S:C:T TRES ReqTRES
    AllocTRES Socks/Node NtasksPerN:B:S:C CoreSpec ThreadSpec JOB_GRES Nodes CPU_IDs Mem GRES MinCPUsNode MinMemoryNode
    MinMemoryCPU MinTmpDiskNode Features Gres Reservation DelayBoot OverSubscribe Contiguous Licenses LicensesAlloc Network
    BurstBuffer Power MailUser MailType CpusPerTres MemPerTres TresBind TresFreq TresPerJob TresPerNode TresPerSocket
    TresPerTask NtasksPerTRES KillOInInvalidDependent KillOnInvalidDep Shared Switches StepMgrEnabled SegmentSize Container
    ContainerID ContainerType Cluster SLUID SpreadSegments ConsolidateSegments ExpeditedRequeue KillOnInvalidDependent
    OOMKillStep GresAllowTaskSharing GresOneTaskPerSharing ResvPorts
    NodeName Arch CoresPerSocket CPUAlloc CPUErr CPUEfctv CPUTot CPULoad AvailableFeatures ActiveFeatures GresDrain GresUsed
    NodeAddr NodeHostName Port Version RealMemory AllocMem FreeMem Sockets Boards State ThreadsPerCore TmpDisk Weight Owner
    Partitions ResumeAfterTime CfgTRES CapWatts CurrentWatts AveWatts LowestJoules ConsumedJoules ExtSensorsJoules
    ExtSensorsWatts ExtSensorsTemp CoreSpecCount CPUSpecList MemSpecLimit NextState ReservationName InstanceId InstanceType
    BcastAddr DynamicNorm GpuSpec TopologyStr TLSCertTokenSet TLSCertLastRenewal Parameters
    PartitionName AllowGroups AllowAccounts DenyAccounts AllowQos DenyQos AllocNodes Alternate Default QoS DefaultTime
    DisableRootJobs Exclusive ExclusiveUser ExclusiveTopo GraceTime Hidden MaxNodes MaxTime MinNodes LLN MaxCPUsPerNode MaxCPUsPerSocket
    NodeSets PriorityJobFactor PriorityTier RootOnly ReqResv OverTimeLimit PreemptMode TotalCPUs TotalNodes
    SelectTypeParameters JobDefaults DefMemPerNode DefMemPerCPU MaxMemPerNode MaxMemPerCPU TRESBillingWeights ResumeTimeout
    SuspendTimeout PowerDownOnIdle Topology""".split()  # noqa: SIM905
)
KEYS_ON_ONE_LINE = 10  # a line with this many keys is from --oneliner, since lines of the long format have fewer
# Keys that `scontrol show job -d` repeats for each node or group of nodes.
REPEATED = frozenset({"Nodes", "CPU_IDs", "Mem", "GRES"})
_KEY = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_:/()-]*)=")


@dataclass
class Block:
    """One object in the output of scontrol, which starts on `line`; `values` are as printed, without outer spaces."""

    line: int
    values: dict[str, str] = field(default_factory=dict)
    contested: set[str] = field(default_factory=set)  # keys with contradictory values, which `values` omits

    def get(self, *keys: str) -> str | None:
        """Return the value of the first of `keys` that occurs."""
        return next((self.values[key] for key in keys if key in self.values), None)

    def add(self, key: str, value: str) -> None:
        """Add a value; a key with two different values is removed."""
        if key in REPEATED and key in self.values:
            return
        if key in self.contested or self.values.get(key, value) != value:
            self.contested.add(key)
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def go_on(self, key: str, text: str) -> None:
        """Append a further line to a value."""
        if key in self.values:
            self.values[key] += "\n" + text


def show_fields(text: str, first: str) -> tuple[list[Block], tuple[str, ...]]:
    """Return all blocks that start with the key `first`, and warnings about damaged lines; CheckFailedError if none."""
    blocks: list[Block] = []
    warnings: list[str] = []
    last = ""  # the key whose value continues on a line without a key
    on_one_line = False
    for number, line in enumerate(_lines_of(text), 1):
        before, fields = _fields(line)
        keys = [key for key, _ in fields]
        if keys[:1] == [first] and not before:
            blocks.append(Block(number))
            on_one_line |= len(keys) >= KEYS_ON_ONE_LINE
        elif first in keys and not before and not (last in FREE_TEXT and blocks and not on_one_line):
            warnings.append(f"line {number}: expected {first} at the start of the line")
            blocks.append(Block(number))
        elif on_one_line and len(keys) >= KEYS_ON_ONE_LINE:
            warnings.append(f"line {number}: a record without {first}; ignored")
            continue
        if before and blocks and last in FREE_TEXT:
            blocks[-1].go_on(last, before)
        elif before or (fields and not blocks):
            warnings.append(f"line {number}: expected KEY=VALUE, got {line.strip()[:60]!r}")
        if blocks:
            strange = [key for key in keys if key[0].islower() and last not in FREE_TEXT]
            warnings += [f"line {number}: unknown key {key[:60]}" for key in strange]
            for key, value in fields:
                blocks[-1].add(key, value)
            last = keys[-1] if keys else last
        if not line.strip():
            last = ""
    if not blocks:
        shown = next((line.strip() for line in _lines_of(text) if line.strip()), "")
        raise CheckFailedError(f"expected a block that starts with {first}=, got {shown[:60]!r}", where="line 1")
    for block in blocks:
        for key in sorted(block.contested):
            warnings.append(f"line {block.line}: {key} has two values, so both are ignored")
    return blocks, tuple(warnings)


def _lines_of(text: str) -> list[str]:
    """Return the lines of `text`; `str.splitlines` would also split at characters that values may contain."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _fields(line: str) -> tuple[str, list[tuple[str, str]]]:
    """Return (the text before the first key of a line, the keys with their values)."""
    before, fields, key, begin = "", list[tuple[str, str]](), "", 0
    for match in _KEY.finditer(line):
        if key in FREE_TEXT and match[1] not in KNOWN:
            continue  # this key is part of the value
        if key:
            fields.append((key, line[begin : match.start()].strip()))
        else:
            before = line[: match.start()].strip()
        key, begin = match[1], match.end()
    if not key:
        return line.strip(), fields
    return before, [*fields, (key, line[begin:].strip())]


# Slurm commands with the option --clusters.
_WITH_CLUSTER = ("sbatch", "salloc", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct")


_COMMAND = re.compile(rf"`({'|'.join(_WITH_CLUSTER)}) ")


# Messages of these commands about a cluster without an address, Slurm 22.05 to 26.05.
_NO_ADDRESS = re.compile(
    r"can't be reached now, or it is an invalid entry for --cluster|problem talking to the database"
)


def for_cluster(argv: Sequence[str], cluster: str) -> list[str]:
    """Return a Slurm command with --clusters for another cluster; any other command unchanged."""
    option = [f"--clusters={cluster}"] if cluster and argv[0] in _WITH_CLUSTER else []
    return [argv[0], *option, *argv[1:]]


def with_cluster_option(text: str, cluster: str) -> str:
    """Return a message with -M added to each Slurm command in it."""
    return _COMMAND.sub(rf"`\1 -M {cluster} ", text) if cluster else text


def named(job_id: str, cluster: str) -> str:
    """Return a job id as sbatch prints it for another cluster, `123;cluster`."""
    return f"{job_id};{cluster}" if job_id and cluster else job_id


def has_no_address(output: str) -> bool:
    """Return whether a command failed because accounting has no address for the cluster."""
    return _NO_ADDRESS.search(output) is not None


def cluster_of_allocation(environ: Mapping[str, str]) -> str:
    """Return the cluster of this allocation if Slurm commands use another cluster by default, else "".

    This is the case in the shell of `salloc -M` on a login node; on nodes of the allocation, its cluster is the default.
    """
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ:
        return ""
    return environ.get("SLURM_WORKING_CLUSTER", "").partition(":")[0] or environ.get("SLURM_CLUSTERS", "")
