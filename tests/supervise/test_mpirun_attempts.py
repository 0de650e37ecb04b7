"""The same ends under a real mpirun, the one of the mpich wheel."""

import os
import signal
import time
from pathlib import Path

import pytest

from toolkit.rundir.files import read_json
from toolkit.supervise.launchers import find_mpirun

pytestmark = pytest.mark.skipif(find_mpirun("", {}) is None, reason="no mpirun beside this Python")
SLEEP = "sleep 100; true"


def shell(text):
    return ["bash", "-c", text]


def test_ranks_under_mpirun_complete_and_write_their_own_logs(supervise, local_job):
    job = supervise(local_job(shell("echo rank $PMI_RANK"), launcher="mpirun"))
    assert job.wait() == 0
    assert [job.rank_log(rank) for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]


def test_a_rank_killed_under_mpirun_is_named_and_the_rest_ended(supervise, local_job):
    began = time.monotonic()
    job = supervise(local_job(shell(f"if [ $PMI_RANK = 1 ]; then kill -9 $$; fi; {SLEEP}"), launcher="mpirun"))
    assert job.wait() == 137
    assert time.monotonic() - began < 60
    assert (job.end()["rank"], job.end()["cause"]) == (1, "crashed")
    assert "SIGKILL" in job.end()["reason"]


def test_sys_exit_under_mpi_does_not_wait_for_the_others(supervise, local_job):
    script = (
        "import sys, time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    sys.exit(3)\ntime.sleep(100)\n"
    )
    began = time.monotonic()
    job = supervise(local_job("leave.py", files={"leave.py": script}, launcher="mpirun"))
    assert job.wait() == 3
    assert time.monotonic() - began < 80
    assert (job.end()["rank"], job.end()["reason"]) == (1, "exit code 3")


def test_killed_ranks_leave_no_shared_memory(supervise, local_job):
    """MPICH unlinks its segment at MPI_Finalize alone. The second attempt's is there while it runs."""
    script = (
        "import os, re, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "print(*set(re.findall(r'mpich_shm_\\w+', open('/proc/self/maps').read())), flush=True)\n"
        "time.sleep(1.5)\n"
        "if MPI.COMM_WORLD.rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(100)\n"
    )
    job = supervise(local_job("killed.py", files={"killed.py": script}, launcher="mpirun", restart="crashes = 1"))
    assert job.wait() == 137
    segments = [job.rank_log(0, attempt).split()[-1] for attempt in (0, 1)]
    assert all(segment.startswith("mpich_shm_") for segment in segments) and len(set(segments)) == 2
    assert not [segment for segment in segments if Path("/dev/shm", segment).exists()]


@pytest.mark.parametrize("victim", ["supervisor", "mpirun"])
def test_ranks_do_not_outlive_what_started_them(supervise, local_job, victim):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}"), launcher="mpirun"))
    job.until_log_says("ready", rank=1)
    if victim == "supervisor":
        job.process.kill()
        job.process.wait()
        return  # the fixture's end finds orphans
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(int(children[0]), signal.SIGKILL)
    assert job.wait() != 0
    assert job.end()["cause"] == "crashed"


def test_term_to_the_supervisor_ends_ranks_under_mpirun(supervise, local_job):
    job = supervise(local_job(shell(f"echo ready; {SLEEP}"), launcher="mpirun"))
    job.until_log_says("ready", rank=1)
    job.process.terminate()
    assert job.wait() == 143
    assert job.end()["state"] == "cancelled"


LEAVES_ITS_GROUP_OPEN = """
import atexit, os
from pathlib import Path
import torch, torch.distributed as dist

def main(world, config):
    atexit.register(lambda: Path(world.run_dir, f"left-{world.rank}").touch())
    held = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    main.held = held
"""


def test_a_function_that_leaves_work_in_flight_ends_well(supervise, local_job):
    """gloo's threads let go of tensors late, and Hydra kills ranks that take no leave of it: neither is a crash."""
    files = {"open.py": LEAVES_ITS_GROUP_OPEN}
    job = supervise(local_job("open.py:main", files=files, launcher="mpirun"))
    assert job.wait() == 0
    assert job.end()["cause"] == "completed"
    assert sorted(path.name for path in job.run.path.glob("left-*")) == ["left-0", "left-1"]


def test_a_killed_guard_is_a_crash_and_nobody_is_blamed_wrongly(supervise, local_job):
    script = "import time\nfrom mpi4py import MPI\nprint('ready', flush=True)\ntime.sleep(100)\n"
    job = supervise(local_job("sleeper.py", files={"sleeper.py": script}, launcher="mpirun"))
    job.until_log_says("ready", rank=1)
    os.kill(read_json(job.run.attempt(0).rank_file(1))["pid"], signal.SIGKILL)
    assert job.wait() == 137
    assert (job.end()["rank"], job.end()["cause"]) == (None, "crashed")  # Hydra itself names the wrong one
