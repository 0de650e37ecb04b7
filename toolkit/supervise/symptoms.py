"""Recognize failures by the messages of ranks and launchers: each kind has a stable name, a meaning and a fix.

docs/explain.md lists the names; `exit.json` contains them. The patterns match messages of Slurm 22.05 to 24.11, torch
2.11 to 2.13, Open MPI, MPICH, CUDA and the C library.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "COLLECTIVE_MISMATCH", "COMPILE_LOCK", "GPU_OUT_OF_MEMORY", "KILLED", "MPI_IN_CHILD", "OUT_OF_MEMORY", "RENDEZVOUS",
    "STEP_FAILED", "SYMPTOMS", "Symptom", "SymptomMatch", "match_symptom", "pattern_of", "symptom_named",
]  # fmt: skip


@dataclass(frozen=True)
class Symptom:
    """A kind of failure. `fix` may contain {run}; "" if only the author of the program can know one.

    `plain`: the meaning adds nothing to the message of the rank or the supervisor. `lasting`: every launch fails until
    the user fixes the cause. `script_fix` is that of a program without toolkit's training loop, if it differs.
    """

    word: str
    means: str
    fix: str = ""
    plain: bool = False
    lasting: bool = False
    script_fix: str = ""


@dataclass(frozen=True)
class SymptomMatch:
    """A symptom and the line that matched it."""

    symptom: Symptom
    line: str


EXCEPTION = Symptom("exception", "the program raised an exception", "fix the program", plain=True)
EXIT_CODE = Symptom("exit_code", "the program exited with its own exit code", plain=True)
KILLED = Symptom(
    "killed", "a signal killed the process; its sender is unknown",
    "`dmesg -T` on the node shows whether the kernel's OOM killer sent the signal",
)  # fmt: skip
NATIVE_CRASH = Symptom(
    "native_crash", "native code crashed", "set PYTHONFAULTHANDLER=1 in [env] vars to log where Python code crashes"
)
OUT_OF_MEMORY = Symptom(
    "out_of_memory", "the job used more memory than was allocated to it",
    "`toolkit resume {run} --set job.mem_gb_per_node=GIB` with a larger value, or without Slurm a larger `ulimit -d`; use fewer "
    "ranks per node, a smaller train.micro_batch (`toolkit bench batch` finds one), or train.offload",
    script_fix="request more memory: `--mem` of a batch script, or `toolkit resume {run} --set job.mem_gb_per_node=GIB`; without Slurm "
    "a larger `ulimit -d`",
)  # fmt: skip
GPU_OUT_OF_MEMORY = Symptom(
    "gpu_out_of_memory", "the memory of a GPU was not sufficient",
    'use a smaller train.micro_batch (restart.out_of_memory = "smaller_micro_batch" halves it); a larger parallel.shard; train.offload; '
    "or larger GPUs", script_fix="use a smaller batch in the program, or larger GPUs",
)  # fmt: skip
DISK_FULL = Symptom(
    "disk_full", "a file system is full, or a quota is reached",
    "free space (`df -h`, the site's quota command), then run `toolkit resume {run}`",
)  # fmt: skip
WRONG_PMI = Symptom(
    "wrong_pmi", "the launcher and the MPI library are incompatible",
    'set launcher_options = ["--mpi=pmi2"] in [job] for MPICH, or ["--mpi=pmix"] for Open MPI (`srun --mpi=list` lists the '
    "available types; in a batch script, it is an option of srun); for all jobs, set [launcher] mpi in the site file, or "
    "libmpi to another MPI library",
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
    script_fix="`|| ...`, a pipeline or a background step without `wait PID` hides it from `set -e`; with "
    "restart.steps_must_succeed = true the run fails",
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
COLLECTIVE_MISMATCH = Symptom(
    "collective_mismatch", "ranks called different collectives, or one collective with tensors of different sizes or types",
    "make all ranks of a group call the same collectives in the same order, with equal shapes and types; "
    'TORCH_DISTRIBUTED_DEBUG = "DETAIL" in [env] vars makes torch name the collective of each rank',
)  # fmt: skip
MPI_IN_CHILD = Symptom(
    "mpi_in_child", "a child process of a rank started MPI again, which MPI does not support",
    "import mpi4py inside main, or set `mpi4py.rc.initialize = False` before `from mpi4py import MPI`: a child process that is "
    "spawned imports the main module again", lasting=True,
)  # fmt: skip
RENDEZVOUS = Symptom(
    "rendezvous", "the processes of the job did not find each other",
    "start one torchrun per node, with --nnodes and the same --rdzv-endpoint on a host that all nodes can reach, not localhost; "
    'or set entry = "train.py" and ranks_per_node in [job], so that toolkit starts the ranks',
)  # fmt: skip
COMPILE_LOCK = Symptom(
    "compile_lock", "a rank waits for the lock of a compilation, which a killed process may have left",
    "if no other job compiles this extension now, remove its lock file",
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
    IMAGE_FAILED, SETUP_FAILED, STEP_FAILED, LAUNCH_FAILED, CONTROLLER_AWAY, COLLECTIVE_TIMEOUT, COLLECTIVE_MISMATCH, MPI_IN_CHILD,
    RENDEZVOUS, COMPILE_LOCK, PEER_LOST, NODE_LOST, REPLICAS_DIFFER, REFUSED, FAILED, SILENT,
)  # fmt: skip

# The first match counts, so specific patterns precede general ones. A third value matches lines that show another cause.
_PATTERNS: tuple[tuple[Symptom, re.Pattern[str], re.Pattern[str] | None], ...] = tuple(
    (symptom, re.compile(pattern, re.IGNORECASE), re.compile(unless[0]) if unless else None)
    for symptom, pattern, *unless in (
        (GPU_OUT_OF_MEMORY, r"(?:CUDA|HIP|XPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"),
        (OUT_OF_MEMORY,
         r"exceeded (?:job |step )?memory limit|oom[-_ ]kill(?!er\b)|invoked oom-killer|OOM Killed|"
         r"(?<!restart\.)out[-_ ]of[-_ ]memory(?!\?)|MemoryError|"
         r"cannot allocate memory|can't allocate memory|std::bad_alloc"),
        (DISK_FULL, r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b"),
        (MPI_IN_CHILD, r"PMIU_write error; fd=\d+ buf=:cmd=init |getting local rank failed$"),
        (WRONG_PMI,
         r"process management interface|direct launched using \"srun\"|(?:believe to|process would) be rank 0 of 1|PMI2?_Init failed|not built with .*PMI support|"
         r"OPAL ERROR: .*pmix|PMIX ERROR: .*UNREACH|unsupported PMI version|invalid MPI (?:plugin )?type|"
         r"Couldn't find the specified plugin name for mpi"),
        # Open MPI explains other failures of MPI_Init in a paragraph of its own.
        (MPI_IN_CHILD, r"\*\*\* An error occurred in MPI_Init", r"It looks like MPI_INIT failed"),
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
        (COLLECTIVE_MISMATCH,
         r"Is there a distributed collective mismatch in your code|Detected mismatch between collectives on ranks|"
         r"Mismatched collective detected|message sizes do not match across processes in the collective"),
        (COLLECTIVE_TIMEOUT,
         r"Timed out waiting \d+ ?ms|Watchdog caught collective operation timeout|failed to pass monitoredBarrier|"
         r"timed out .*(?:gloo|nccl|collective)|did not finish in [\d.]+ s; rank \d+ did not (?:come|join)"),
        (REPLICAS_DIFFER, r"replicas differ after step \d+: "),
        (RENDEZVOUS,
         r"\.api\.Rendezvous(?:Timeout|Connection)Error|"
         r"^torch\.distributed\.Dist(?:NetworkError: The client socket has (?:timed out|failed)|StoreError: .* clients joined)",
         r"ChildFailedError|SignalException"),  # a torchrun also fails when that of another node has exited
        (COMPILE_LOCK, r"\(file_baton\.py:\d+\)|/file_baton\.py\", line \d+ in wait|file lock '.*' could not be acquired"),
    )
)  # fmt: skip
# Lines of toolkit itself, which contain advice and quotations, except those that report a failure of the machine.
_OWN = re.compile(
    r"^(?:\[\d+\] )?toolkit: (?!cannot write |\[Errno \d+\] |this line of the (?:site|job) file failed: )"
)
# What follows in messages of toolkit: advice, or a record that could not be written, as each release prints it.
_AFTER_THE_CAUSE = re.compile(r"\. Fix: |; (?:it would say|its contents): ")


def match_symptom(lines: Sequence[str], *, context: Sequence[str] = ()) -> SymptomMatch | None:
    """Return the first symptom that matches a line, with the first line that it matches; None if there is none.

    `context` are further lines, which may only show that a symptom is the consequence of another failure.
    """
    causes = [_AFTER_THE_CAUSE.split(line, maxsplit=1)[0].strip() for line in lines if not _OWN.match(line)]
    for symptom, pattern, unless in _PATTERNS:
        line = next(filter(pattern.search, causes), None)
        if line is not None and not (unless and any(map(unless.search, [*context, *lines]))):
            return SymptomMatch(symptom, line)
    return None


def pattern_of(symptoms: Sequence[Symptom]) -> re.Pattern[str]:
    """Return a pattern that finds any line of these symptoms in several lines, and few others."""
    patterns = (pattern.pattern for symptom, pattern, _ in _PATTERNS if symptom in symptoms)
    return re.compile("|".join(f"(?:{one})" for one in patterns), re.IGNORECASE | re.MULTILINE)


def symptom_named(word: str) -> Symptom | None:
    """Return the symptom with this stable name; None if the name is that of a cause, such as `walltime`."""
    return next((symptom for symptom in SYMPTOMS if symptom.word == word), None)
