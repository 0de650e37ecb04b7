"""Recognize failures by the messages of ranks and launchers: each kind has a stable name, a meaning and a fix.

docs/explain.md lists the names; `exit.json` contains them. The patterns match messages of Slurm 22.05 to 24.11, torch
2.11 to 2.13, Open MPI, MPICH, CUDA and the C library.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "GPU_OUT_OF_MEMORY",
    "KILLED",
    "OUT_OF_MEMORY",
    "STEP_FAILED",
    "Symptom",
    "SymptomMatch",
    "match_symptom",
    "symptom_named",
]


@dataclass(frozen=True)
class Symptom:
    """A kind of failure. `fix` may contain {run}; "" if only the author of the program can know one.

    `plain`: the meaning adds nothing to the message of the rank or the supervisor. `lasting`: every launch fails until
    the user fixes the cause.
    """

    word: str
    means: str
    fix: str = ""
    plain: bool = False
    lasting: bool = False


@dataclass(frozen=True)
class SymptomMatch:
    """A symptom and the line that matched it."""

    symptom: Symptom
    line: str


EXCEPTION = Symptom("exception", "the program raised an exception", "fix the program", plain=True)
EXIT_CODE = Symptom("exit_code", "the program exited with its own exit code", plain=True)
KILLED = Symptom(
    "killed", "a signal killed the process; the program did not send it",
    "`dmesg -T` on the node shows whether the kernel's OOM killer sent the signal",
)  # fmt: skip
NATIVE_CRASH = Symptom(
    "native_crash", "native code crashed", "set PYTHONFAULTHANDLER=1 in [env] vars to log where Python code crashes"
)
OUT_OF_MEMORY = Symptom(
    "out_of_memory", "the job used more memory than was allocated to it",
    "`toolkit resume {run} --set job.mem_gb_per_node=GIB` with a larger value, or without Slurm a larger `ulimit -d`; use fewer "
    "ranks per node, a smaller train.micro_batch (`toolkit bench batch` finds one), or train.offload",
)  # fmt: skip
GPU_OUT_OF_MEMORY = Symptom(
    "gpu_out_of_memory", "a GPU ran out of memory",
    'use a smaller train.micro_batch, or restart.out_of_memory = "smaller_micro_batch"; a larger parallel.shard; train.offload; '
    "or larger GPUs",
)  # fmt: skip
DISK_FULL = Symptom(
    "disk_full", "a file system is full, or a quota is reached",
    "free space (`df -h`, the site's quota command), then run `toolkit resume {run}`",
)  # fmt: skip
WRONG_PMI = Symptom(
    "wrong_pmi", "the launcher and the MPI library are incompatible",
    'set [launcher] mpi in the site file to the type that the MPI library was built for: "pmi2" for MPICH, "pmix" for '
    "Open MPI (`srun --mpi=list` lists the available types); or set [launcher] libmpi to another MPI library",
    lasting=True,
)  # fmt: skip
PMIX_ORDER = Symptom(
    "pmix_order", "Slurm's PMIx did not find the nodes of the step; one cause is a heterogeneous job whose node names are not "
    "sorted in the order of its components",
    "set nodelist in each [[component]] so that node names are sorted across the components (docs/heterogeneous.md)",
)  # fmt: skip
NO_INTERPRETER = Symptom(
    "no_interpreter", "the program to start does not exist on a node",
    "install toolkit on a file system that all nodes mount, and submit with that installation",
    lasting=True,
)  # fmt: skip
IMAGE_FAILED = Symptom(
    "image_failed", "the container of a rank could not be started",
    "check image, mounts and python in [container] of the job file and the site file", lasting=True,
)  # fmt: skip
SETUP_FAILED = Symptom(
    "setup_failed", "a line of [env] failed before any rank started",
    "fix this module or setup line of the site file (`toolkit site show` prints its location) or the job file", lasting=True,
)  # fmt: skip
STEP_FAILED = Symptom(
    "step_failed", "a step failed, although the script exited with 0",
    "begin the script with `set -eo pipefail` and wait for each background step with `wait PID`; with "
    "restart.steps_must_succeed = true the run fails", plain=True,
)  # fmt: skip
LAUNCH_FAILED = Symptom("launch_failed", "the launcher could not start every rank")
CONTROLLER_AWAY = Symptom(
    "controller_away", "Slurm's controller did not respond, so srun could not start anything",
    "wait until `scontrol ping` reports slurmctld UP, then run `toolkit resume {run}`",
)  # fmt: skip
COLLECTIVE_TIMEOUT = Symptom(
    "collective_timeout", "ranks waited in a collective for a rank that did not join it",
    "check what that rank did; if it was only slow, raise restart.collective_timeout_s, or the time-out of your own "
    "process group", plain=True,
)  # fmt: skip
PEER_LOST = Symptom("peer_lost", "the connection to another rank was lost, and no rank reported the reason")
NODE_LOST = Symptom("node_lost", "a node failed")
REPLICAS_DIFFER = Symptom(
    "replicas_differ", "replicas of the model are not equal, as after a fault of memory or of a GPU"
)
REFUSED = Symptom("refused", "a rank rejected its input", plain=True)
FAILED = Symptom("failed", "toolkit itself failed on this host", plain=True)
SILENT = Symptom("silent_end", "ranks exited without reporting an error", plain=True)

SYMPTOMS = (
    EXCEPTION, EXIT_CODE, KILLED, NATIVE_CRASH, OUT_OF_MEMORY, GPU_OUT_OF_MEMORY, DISK_FULL, WRONG_PMI, PMIX_ORDER, NO_INTERPRETER,
    IMAGE_FAILED, SETUP_FAILED, STEP_FAILED, LAUNCH_FAILED, CONTROLLER_AWAY, COLLECTIVE_TIMEOUT, PEER_LOST, NODE_LOST, REPLICAS_DIFFER,
    REFUSED, FAILED, SILENT,
)  # fmt: skip

# The first match counts, so specific patterns precede general ones.
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
        (SETUP_FAILED, r"^toolkit: this line of the (?:site|job) file failed: "),
        (NODE_LOST, r"srun: error: Node failure on|DUE TO NODE FAILURE"),
        (LAUNCH_FAILED,
         r"srun: error: (?:tasks? [\d,-]+ launch failed|Task launch for .* failed on node|Application launch failed)"),
        (CONTROLLER_AWAY,
         r"Unable to contact slurm controller|"
         r"error: (?:Unable to confirm allocation for job|Unable to create step for job|Slurm job ID \S+ lookup error).*"
         r"(?:timed out|Zero Bytes|Connection reset|Unexpected message)"),
        (COLLECTIVE_TIMEOUT,
         r"Timed out waiting \d+ ?ms|Watchdog caught collective operation timeout|failed to pass monitoredBarrier|"
         r"timed out .*(?:gloo|nccl|collective)|did not finish in [\d.]+ s; rank \d+ did not (?:come|join)"),
        (REPLICAS_DIFFER, r"replicas differ after step \d+: "),
    )
)  # fmt: skip


def match_symptom(lines: Sequence[str]) -> SymptomMatch | None:
    """Return the first symptom that matches a line, with the first line that it matches; None if there is none."""
    for symptom, pattern in _PATTERNS:
        for line in lines:
            if pattern.search(line):
                return SymptomMatch(symptom, line.strip())
    return None


def symptom_named(word: str) -> Symptom | None:
    """Return the symptom with this stable name; None if the name is that of a cause, such as `walltime`."""
    return next((symptom for symptom in SYMPTOMS if symptom.word == word), None)
