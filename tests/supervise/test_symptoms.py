"""Words of launchers, of torch and of the C library are known for what they mean; the user's own are left alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit
from toolkit.rundir.states import ENDINGS
from toolkit.runs.explain.foreign import _ENDS as ENDS_OF_FOREIGN_JOBS
from toolkit.runs.explain.model import _ENDS
from toolkit.slurm.refusals import _FIXES
from toolkit.supervise.symptoms import SYMPTOMS, match_symptom, symptom_named

# As they were printed on the dev cluster, or stand in the sources of those who print them.
SEEN = [
    ("slurmstepd-node1: error: StepId=16.0 exceeded memory limit (2347798528 > 2147483648), being killed", "out_of_memory"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=16.0. Some of the step tasks have been OOM Killed.", "out_of_memory"),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in step 16.0 cgroup.", "out_of_memory"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory", "out_of_memory"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "gpu_out_of_memory"),
    ("OSError: [Errno 28] No space left on device: 'x'", "disk_full"),
    ("OSError: [Errno 122] Disk quota exceeded", "disk_full"),
    ('The application appears to have been direct launched using "srun",', "wrong_pmi"),
    ("slurmstepd-node1: error:  mpi/pmix_v4: pmixp_dconn_connect: node2 [1]: pmixp_dconn.h:245: Cannot establish direct connection to node1 (0)", "pmix_order"),
    ("srun: error: Couldn't find the specified plugin name for mpi/pmix_v9 looking at all files", "wrong_pmi"),
    ("check_MPIR_CVAR_PMI_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting.", "wrong_pmi"),
    ("srun speaks PMI-2 and Open MPI wants PMIx: every process would believe to be rank 0 of 1", "wrong_pmi"),  # up to 0.1
    ("srun uses PMI-2, but Open MPI requires PMIx: every process would be rank 0 of 1", "wrong_pmi"),
    ("slurmstepd-node2: error: execve(): /opt/venv/bin/python: No such file or directory", "no_interpreter"),
    ("/spool/job00022/slurm_script: line 29: /opt/venv/bin/python: No such file or directory", "no_interpreter"),
    ("toolkit: this line of the site file failed: module load nothing/1", "setup_failed"),
    ('FATAL:   "python9": executable file not found in $PATH', "image_failed"),
    ("slurmstepd: error: pyxis: failed to import docker image", "image_failed"),
    ("[rank 0]: gloo/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete", "collective_timeout"),
    ("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)", "collective_timeout"),
    ("gradient reduction number 7 did not finish in 60.0 s; rank 3 did not come (alive, last in barrier)", "collective_timeout"),
    ("gradient reduction number 7 did not finish in 60.0 s; rank 3 did not join (alive, last in barrier)", "collective_timeout"),
    ("srun: error: Node failure on node3", "node_lost"),
    ("srun: error: task 1 launch failed: Unspecified error", "launch_failed"),
    ("srun: error: Task launch for StepId=47.1 failed on node node3: Unspecified error", "launch_failed"),
    ("srun: error: Task launch for StepId=47.1 failed on node node3: Socket timed out on send/recv operation", "launch_failed"),
    ("srun: error: Unable to confirm allocation for job 7: Socket timed out on send/recv operation", "controller_away"),
    ("    what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 1000000 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?", "collective_mismatch"),
    ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(", "collective_mismatch"),
    ("node3:411:512 [0] NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 1.", "collective_mismatch"),
    ("[cli_1]: PMIU_write error; fd=10 buf=:cmd=init pmi_version=1 pmi_subversion=1", "mpi_in_child"),
    ("*** An error occurred in MPI_Init_thread", "mpi_in_child"),
    ("  getting local rank failed", "mpi_in_child"),
    ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "rendezvous"),
    ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.", "rendezvous"),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 10000ms while trying to connect to (127.0.0.1, 29777).", "rendezvous"),
    ("torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined.", "rendezvous"),
    ('  File "/venv/site-packages/torch/utils/file_baton.py", line 50 in wait', "compile_lock"),
    ("filelock._error.Timeout: The file lock '/tmp/torchinductor_ada/locks/c4.lock' could not be acquired.", "compile_lock"),
    ("python invoked oom-killer: gfp_mask=0xcc0, order=0", "out_of_memory"),
    ("sbcast: error: Slurm job ID 7 lookup error: Unable to contact slurm controller (connect failure)", "controller_away"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "word"), SEEN)
def test_known_words(line: str, word: str) -> None:
    seen = match_symptom(["srun: Job step aborted: Waiting up to 17 seconds for job step to finish.", line])
    assert seen is not None
    assert (seen.symptom.word, seen.line) == (word, line.strip())


@pytest.mark.parametrize(
    "line",
    [
        "killed by SIGKILL (out of memory?)",  # our own guess proves nothing
        "ValueError: labels out of range: 7 > 5",
        "FileNotFoundError: [Errno 2] No such file or directory: 'corpus.txt'",
        'FATAL:  role "ada" does not exist',
        "timed out: the data server did not answer",
        "",
    ],
)
def test_other_words_mean_nothing(line: str) -> None:
    assert match_symptom([line]) is None


def hints() -> Iterator[str]:
    """Every advice and every sentence on an end in the package, as its source has it."""
    for symptom in SYMPTOMS:
        yield from (symptom.means, symptom.fix.format(run="20261120-142233-9f3a"))
    for ending in ENDINGS.values():
        yield ending.when
    yield from _ENDS.values()
    for _, why, change in ENDS_OF_FOREIGN_JOBS.values():
        yield from (why, change)
    yield from (fix for _, fix in _FIXES)
    for path in sorted(Path(toolkit.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("FIX")
            if is_named or (isinstance(node, ast.keyword) and node.arg == "fix"):
                yield "".join(
                    part.value if isinstance(part.value, str) else "7"
                    for part in ast.walk(node.value)
                    if isinstance(part, ast.Constant)
                )


def test_no_hint_of_toolkits_own_is_a_symptom() -> None:
    every = list(hints())
    assert len(every) > 500
    assert [hint for hint in every if match_symptom([hint]) is not None] == []


@pytest.mark.parametrize("line", [line for line, _ in SEEN if not line.startswith("toolkit: ")])
def test_what_toolkit_quotes_or_advises_is_not_what_happened(line: str) -> None:
    quoted = [
        f"toolkit: attempt 0 ended: crashed (rank 1 on node2): {line}", f"toolkit:     | {line}", f"toolkit: fix: {line}",
        f"[3] toolkit: attempt 0: waiting reason={line}", f"toolkit.errors.CheckFailedError: a step failed. Fix: {line}",
        f'toolkit: cannot write /runs/a/exit.json: Input/output error; its contents: {{"reason": "{line}"}}',
    ]  # fmt: skip
    assert match_symptom(quoted) is None


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("*** An error occurred in MPI_Init", "It looks like MPI_INIT failed for some reason; your parallel process is"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
         "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"),
    ],
)  # fmt: skip
def test_a_line_that_another_failure_explains_is_not_its_own_symptom(line: str, other: str) -> None:
    assert match_symptom([line]) is not None
    assert match_symptom([other, line]) is None and match_symptom([line], context=[other]) is None


def test_a_fix_names_the_run_and_nothing_else() -> None:
    for symptom in SYMPTOMS:
        assert "{" not in symptom.fix.format(run="20261120-142233-9f3a")
        assert symptom_named(symptom.word) is symptom
