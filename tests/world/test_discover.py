"""Who am I: from dictionaries of variables, and under a real mpirun."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.supervise.launchers import find_mpirun
from toolkit.world.discover import discover, expand_tasks_per_node, in_slurm_step, pin_library

JOBS = Path(__file__).parents[2] / "jobs"
MPIRUN = find_mpirun("", {})
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,1",
}  # fmt: skip
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}  # fmt: skip
LOCAL = {"TOOLKIT_LAUNCHER": "local", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def place(environ):
    world = discover(environ)
    return (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes, world.launcher)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, 0, 1, "none")),
        (STEP, (4, 6, 0, 1, 2, 4, "srun")),
        # Over components the counts stand as the nodes' names sort, and SLURM_NODEID as the ranks do.
        (STEP | {"SLURM_HET_SIZE": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GTIDS": "0"}, (0, 6, 0, 1, 0, 4, "srun")),
        (TORCHRUN, (5, 8, 1, 4, 1, 2, "torchrun")),
        (STEP | TORCHRUN, (5, 8, 1, 4, 1, 2, "torchrun")),  # torchrun inside a step: one task, many ranks
        (LOCAL, (1, 2, 1, 2, 0, 1, "local")),
        (LOCAL | {"PMI_RANK": "0", "PMI_SIZE": "9"}, (1, 2, 1, 2, 0, 1, "local")),  # started inside another mpirun
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3, 4, 0, 1, "torchrun")),
    ],
)  # fmt: skip
def test_a_rank_finds_its_place(environ, expected):
    assert place(environ) == expected


def test_the_run_directory_and_the_attempt_come_along(run_directory):
    world = discover(LOCAL | {"TOOLKIT_RUN_DIR": str(run_directory.path), "TOOLKIT_ATTEMPT": "3"})
    assert (world.run_dir, world.attempt) == (run_directory.path, 3)
    assert discover({}).run_dir is None


@pytest.mark.parametrize("size", ["1", "8"])
def test_a_size_that_the_job_does_not_have_names_the_fix(size):
    with pytest.raises(ToolkitError, match=f"reports 6 ranks, but the job has {size}") as error:
        discover(STEP | {"TOOLKIT_WORLD_SIZE": size})
    assert "--mpi" in error.value.fix and "MPI4PY_LIBMPI" in error.value.fix


BATCH_SCRIPT = {  # what Slurm 22.05 sets in a batch script: a task number, but no step
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NUM_NODES": "2",
}  # fmt: skip


def test_a_batch_script_is_no_rank_of_its_job():
    assert not in_slurm_step(BATCH_SCRIPT)
    assert in_slurm_step(STEP)
    assert place(BATCH_SCRIPT) == (0, 1, 0, 1, 0, 1, "none")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),3", [1, 2, 2, 3]), ("16(x1)", [16])]
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2;3", "-1"])
def test_tasks_per_node_that_cannot_be_read_are_refused(text):
    with pytest.raises(ToolkitError, match="is not a valid list of tasks per node"):
        expand_tasks_per_node(text)


def mpirun(ranks, script, **variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [MPIRUN, "-n", str(ranks), sys.executable, str(script)], env={**kept, **variables}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside this Python")
class TestUnderMpirun:
    def test_mpi_itself_says_who_is_who(self):
        done = mpirun(4, JOBS / "mpi_hello.py")
        assert done.returncode == 0, done.stderr
        lines = sorted(done.stdout.splitlines())
        for rank, line in enumerate(lines):
            assert line.startswith(f"rank {rank} of 4, local rank {rank} on ")
            assert "(node 0 of 1)" in line and "launcher mpirun, discovered by MPI (MPICH" in line
        assert len(lines) == 4

    def test_a_size_that_the_job_does_not_have_is_one_line(self):
        done = mpirun(2, JOBS / "mpi_hello.py", TOOLKIT_WORLD_SIZE="8")
        assert done.returncode == 1
        assert "reports 2 ranks, but the job has 8" in done.stderr and "Traceback" not in done.stderr

    def test_the_wrong_library_names_the_fix(self):
        try:
            ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_LOCAL)
        except OSError:
            if os.environ.get("TOOLKIT_REQUIRE_CLUSTER") == "1":
                raise
            pytest.skip("no Open MPI here")
        done = mpirun(2, JOBS / "mpi_hello.py", MPI4PY_LIBMPI="libmpi.so.40")
        assert done.returncode == 1
        assert "reports 1 rank, but the launcher has 2" in done.stderr
        assert "Fix: " in done.stderr and "MPI4PY_LIBMPI" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "own", "found"),
    [
        ({"PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None, "1"),
        ({"PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, "0", "0"),
        ({"PMIX_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, None, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None, None),
    ],
)
def test_open_mpi_waits_only_when_it_can_receive(monkeypatch, variables, own, found):
    """Else an early message kills a rank in MPI_Init. A user's own setting stays; ranks of one node wait twice."""
    name = "OMPI_MCA_pmix_base_async_modex"
    monkeypatch.setenv("MPI4PY_LIBMPI", "libmpi.so.40")
    for variable in ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    pin_library()
    assert os.environ.get(name) == found


def test_torchrun_starts_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", JOBS / "mpi_hello.py"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Both ranks write unbuffered into one pipe: lines may mix, these parts do not.
    assert sorted(re.findall(r"rank \d of \d, local rank \d", done.stdout)) == [
        "rank 0 of 2, local rank 0", "rank 1 of 2, local rank 1",
    ]  # fmt: skip
