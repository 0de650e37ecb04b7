"""What a failed rank's or a launcher's messages mean: one stable name for each kind of failure, and its fix.

docs/explain.md lists the names; `exit.json` contains them. The patterns are what Slurm 22.05 to 24.11, torch 2.11 to
2.13, Open MPI, MPICH, CUDA and the C library print.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OUT_OF_MEMORY", "Symptom", "SymptomMatch", "match_symptom", "symptom_named"]


@dataclass(frozen=True)
class Symptom:
    """A kind of failure. `fix` may contain {run}; "" if only the program's author knows one.

    `plain` ones add nothing to the message of the rank or the supervisor. `lasting` ones keep each launch from
    starting its ranks until the user fixes them.
    """

    word: str
    means: str
    fix: str = ""
    plain: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class SymptomMatch:
    """A symptom and the line that shows it."""

    symptom: Symptom
    line: str


EXCEPTION = Symptom("exception", "the program raised an exception", "fix the program", plain=True)
EXIT_CODE = Symptom("exit_code", "the program exited with its own exit code", plain=True)
KILLED = Symptom(
    "killed", "a signal ended the process; the program did not request it",
    "`dmesg -T` on the node shows whether the kernel did it for memory",
)  # fmt: skip
NATIVE_CRASH = Symptom(
    "native_crash", "native code crashed", "PYTHONFAULTHANDLER=1 in [env] vars shows where in a Python program"
)
OUT_OF_MEMORY = Symptom(
    "out_of_memory", "the job used more memory than was allocated to it",
    "`toolkit resume {run} --set job.mem_gb_per_node=GIB` with a larger value, or use fewer ranks on a node",
)  # fmt: skip
GPU_OUT_OF_MEMORY = Symptom(
    "gpu_out_of_memory", "a GPU's memory was full",
    "use a smaller train.micro_batch, a larger parallel.shard, or larger GPUs",
)  # fmt: skip
DISK_FULL = Symptom(
    "disk_full", "a file system is full, or a quota is reached",
    "free space (`df -h`, the site's quota command), then `toolkit resume {run}`",
)  # fmt: skip
WRONG_PMI = Symptom(
    "wrong_pmi", "the launcher and the MPI library are incompatible",
    'the site file\'s [launcher] mpi must be what the MPI was built for: "pmi2" for MPICH, "pmix" for Open MPI; '
    "`srun --mpi=list` lists the available types; or set another MPI as [launcher] libmpi",
    lasting=True,
)  # fmt: skip
PMIX_ORDER = Symptom(
    "pmix_order", "Slurm's PMIx did not find the nodes of the step; one cause is a heterogeneous job whose node names are not "
    "sorted in the order of its components",
    "set nodelist in each [[component]], with the first component's node names before the others' (docs/heterogeneous.md)",
)  # fmt: skip
NO_INTERPRETER = Symptom(
    "no_interpreter", "the program to start does not exist on a node",
    "install it on a file system that all nodes see, and submit with the toolkit that is installed there",
    lasting=True,
)  # fmt: skip
IMAGE_FAILED = Symptom(
    "image_failed", "the container of a rank could not be started",
    "check image, mounts and python in [container] of the job and of the site", lasting=True,
)  # fmt: skip
SETUP_FAILED = Symptom(
    "setup_failed", "a line of the site's [env] failed before any rank started",
    "fix that module or set-up line of the site file; `toolkit site show` prints its place", lasting=True,
)  # fmt: skip
LAUNCH_FAILED = Symptom("launch_failed", "the launcher could not start every rank")
CONTROLLER_AWAY = Symptom(
    "controller_away", "Slurm's controller did not respond, so srun could not start anything",
    "wait until `scontrol ping` reports it UP, then run `toolkit resume {run}`",
)  # fmt: skip
COLLECTIVE_TIMEOUT = Symptom(
    "collective_timeout", "ranks waited in a collective for one that did not come",
    "check what that rank did; if it was only slow, raise restart.collective_timeout_s, or the time-out of your "
    "own group", plain=True,
)  # fmt: skip
PEER_LOST = Symptom("peer_lost", "a connection to another rank broke, and no rank reported the reason")
NODE_LOST = Symptom("node_lost", "a node failed")
REFUSED = Symptom("refused", "a rank refused its input", plain=True)
FAILED = Symptom("failed", "toolkit could not do its own part of the work on this machine", plain=True)
SILENT = Symptom("silent_end", "ranks exited without reporting an error", plain=True)

SYMPTOMS = (
    EXCEPTION, EXIT_CODE, KILLED, NATIVE_CRASH, OUT_OF_MEMORY, GPU_OUT_OF_MEMORY, DISK_FULL, WRONG_PMI, PMIX_ORDER, NO_INTERPRETER,
    IMAGE_FAILED, SETUP_FAILED, LAUNCH_FAILED, CONTROLLER_AWAY, COLLECTIVE_TIMEOUT, PEER_LOST, NODE_LOST, REFUSED, FAILED,
    SILENT,
)  # fmt: skip

# The first match counts, so specific patterns come before general ones.
_PATTERNS: tuple[tuple[Symptom, re.Pattern[str]], ...] = tuple(
    (symptom, re.compile(pattern, re.IGNORECASE))
    for symptom, pattern in (
        (GPU_OUT_OF_MEMORY, r"(?:CUDA|HIP|XPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"),
        (OUT_OF_MEMORY,
         r"exceeded (?:job |step )?memory limit|oom[-_ ]kill|OOM Killed|out[-_ ]of[-_ ]memory(?!\?)|MemoryError|"
         r"cannot allocate memory|can't allocate memory|std::bad_alloc"),
        (DISK_FULL, r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b"),
        (WRONG_PMI,
         r"process management interface|direct launched using \"srun\"|(?:believe to|process would) be rank 0 of 1|PMI2?_Init failed|not built with .*PMI support|"
         r"OPAL ERROR: .*pmix|PMIX ERROR: .*UNREACH|unsupported PMI version|invalid MPI (?:plugin )?type|"
         r"Couldn't find the specified plugin name for mpi"),
        (PMIX_ORDER, r"pmixp_dconn_connect: .*Cannot establish direct connection"),
        (NO_INTERPRETER,
         r"execve\(\): .*: (?:No such file|Permission denied|Not a directory)|"
         r"slurm_script: line \d+: /\S+: (?:No such file|cannot execute|Permission denied|Not a directory)"),
        (IMAGE_FAILED, r"^FATAL: {3}|slurmstepd(?:-\S+)?: error: pyxis: "),
        (SETUP_FAILED, r"^toolkit: this line of the site file failed: "),
        (NODE_LOST, r"srun: error: Node failure on|DUE TO NODE FAILURE"),
        (LAUNCH_FAILED,
         r"srun: error: (?:tasks? [\d,-]+ launch failed|Task launch for .* failed on node|Application launch failed)"),
        (CONTROLLER_AWAY,
         r"Unable to contact slurm controller|"
         r"error: (?:Unable to confirm allocation for job|Unable to create step for job|Slurm job ID \S+ lookup error).*"
         r"(?:timed out|Zero Bytes|Connection reset|Unexpected message)"),
        (COLLECTIVE_TIMEOUT,
         r"Timed out waiting \d+ ?ms|Watchdog caught collective operation timeout|failed to pass monitoredBarrier|"
         r"timed out .*(?:gloo|nccl|collective)|did not finish in [\d.]+ s; rank \d+ did not come"),
    )
)  # fmt: skip


def match_symptom(lines: Sequence[str]) -> SymptomMatch | None:
    """The first symptom in some lines, with the first line that shows it; None if they show none."""
    for symptom, pattern in _PATTERNS:
        for line in lines:
            if pattern.search(line):
                return SymptomMatch(symptom, line.strip())
    return None


def symptom_named(word: str) -> Symptom | None:
    """The symptom with a stable name; None for the name of a plain cause, such as `walltime`."""
    return next((symptom for symptom in SYMPTOMS if symptom.word == word), None)
