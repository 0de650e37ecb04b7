"""Words of launchers, of torch and of the C library are known for what they mean; the user's own are left alone."""

from __future__ import annotations

import pytest

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
    ("sbcast: error: Slurm job ID 7 lookup error: Unable to contact slurm controller (connect failure)", "controller_away"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "word"), SEEN)
def test_known_words(line: str, word: str) -> None:
    seen = match_symptom(["srun: Job step aborted: Waiting up to 17 seconds for job step to finish.", line])
    assert seen is not None
    assert (seen.symptom.word, seen.line) == (word, line)


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


def test_a_fix_names_the_run_and_nothing_else() -> None:
    for symptom in SYMPTOMS:
        assert "{" not in symptom.fix.format(run="20261120-142233-9f3a")
        assert symptom_named(symptom.word) is symptom
