"""The two kinds of entry that are Python: a script as under torchrun, and a function that saves when asked."""

import signal

import pytest
from sampling import sampled

from toolkit.rundir.files import read_json

GLOO_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
assert all(name in os.environ for name in names)
print("sum", total.item(), sys.argv[1:], __name__, flush=True)
if dist.get_rank() == 1:
    raise ValueError("bad batch 17")
dist.barrier()
"""
LOOP = """
import time
import torch.distributed as dist
def main(world, config):
    step = 0
    print("config", config.job.name, flush=True)
    while not world.should_stop(step):
        step += 1
        time.sleep(0.02)
        if step == 20:
            print("twenty", flush=True)
    print("saved at", step, flush=True)
    if world.attempt == 0 and config.args.get("tidy", True):
        dist.destroy_process_group()
"""


def test_a_script_runs_as_under_torchrun_and_its_exception_is_told(supervise, local_job):
    job = local_job("gloo.py", files={"gloo.py": GLOO_SCRIPT})
    job["argv"] = ["--fast"]
    job = supervise(job)
    assert job.wait() == 1
    for rank in (0, 1):
        assert "sum 3.0 ['--fast'] __main__" in job.rank_log(rank)
    end = job.end()
    # Rank 0 fails too, at the barrier, since rank 1 has gone: it is not the culprit.
    assert (end["rank"], end["reason"], end["exit_code"]) == (1, "ValueError: bad batch 17 at gloo.py:11", 1)
    error = read_json(job.run.attempt(0).error_file(1))
    assert error["traceback"][0].startswith("Traceback") and 'gloo.py", line 11' in error["traceback"][1]
    assert end["last_lines"][-1] == "ValueError: bad batch 17"


def test_a_function_is_asked_to_stop_and_all_ranks_stop_at_one_step(supervise, local_job):
    job = supervise(local_job("loop.py:main", files={"loop.py": LOOP}))
    job.until_log_says("twenty")
    job.process.send_signal(signal.SIGUSR2)  # no time limit here, so this is a preemption
    assert job.wait() == 143
    assert job.end()["cause"] == "preempted"
    attempt = job.run.attempt(0)
    assert [attempt.done_marker(rank).read_text() for rank in (0, 1)] == ["stopped\n"] * 2
    said = {job.rank_log(rank).split("saved at ")[1] for rank in (0, 1)}
    assert len(said) == 1
    assert job.end()["step"] == int(said.pop())
    assert not list(attempt.errors.iterdir())


FAST = """
def main(world, config):
    for step in range(1, 211):
        world.should_stop(step)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    sampled([("return", 0), ("raise ValueError", 1), ("raise SystemExit(3)", 3)], lambda case: case[1] == 3),
)
def test_the_last_step_of_a_fast_loop_is_known_however_it_ends(supervise, local_job, end, code):
    job = supervise(local_job("fast.py:main", files={"fast.py": FAST.format(end=end)}, ranks=1))
    assert job.wait() == code
    assert job.end()["step"] == 210


WAITS = """
import time
import torch, torch.distributed as dist
def main(world, config):
    began = time.monotonic()
    if world.rank == 1:
        time.sleep(60)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        print("waited", time.monotonic() - began, flush=True)
"""


def test_how_long_ranks_wait_for_each_other_is_the_jobs_to_say(supervise, local_job):
    restart = "crashes = 0\ncollective_timeout_s = 8"
    job = supervise(local_job("waits.py:main", files={"waits.py": WAITS}, restart=restart))
    assert job.wait() == 1
    waited_s = float(job.rank_log(0).split("waited ")[1].split()[0])
    assert 7 < waited_s < 40  # rank 1 sleeps for 60 s
    assert (job.end()["cause"], job.end()["symptom"]) == ("crashed", "collective_timeout")


def test_a_function_whose_file_is_missing_on_the_node(supervise, local_job, tmp_path):
    job = local_job("loop.py:main", ranks=1, files={"loop.py": LOOP})
    (tmp_path / "loop.py").unlink()
    job = supervise(job)
    assert job.wait() == 2
    assert "file not found" in job.end()["reason"]
    assert "file system that all nodes share" in job.end()["fix"]
    assert "Traceback" not in job.rank_log(0)
