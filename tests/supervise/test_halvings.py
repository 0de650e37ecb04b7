"""Restarts with a smaller micro-batch after a rank ran out of memory: how often, beside which budgets, and which attempts know it."""

from __future__ import annotations

import json

import pytest
from sampling import sampled

from toolkit.rundir.files import read_json

HALVED = 'crashes = 0\nout_of_memory = "smaller_micro_batch"'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
HOST = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


def fails_below(halvings: int, line: str = CUDA):
    return ["bash", "-c", f'if [ $TOOLKIT_HALVINGS -lt {halvings} ]; then echo "{line}" >&2; exit 1; fi']


@pytest.mark.parametrize("line", sampled([CUDA, HOST], lambda case: case[0] == CUDA))
def test_the_next_attempts_have_a_smaller_micro_batch(supervise, local_job, line):
    job = supervise(local_job(fails_below(2, line), restart=HALVED))
    assert job.wait() == 0
    starts = [read_json(job.run.attempt(number).start_file) for number in range(3)]
    assert [start["halvings"] for start in starts] == [0, 1, 2]


def test_after_three_halvings_the_run_fails(supervise, local_job):
    job = supervise(local_job(fails_below(9), restart=HALVED))
    assert job.wait() == 1
    assert job.run.attempt_numbers() == [0, 1, 2, 3]
    end = read_json(job.run.attempt(3).exit_file)
    assert end["final"] and end["symptom"] == "gpu_out_of_memory"


def test_other_crashes_have_their_own_budget(supervise, local_job):
    program = f'case $TOOLKIT_ATTEMPT in 0|2) echo "{CUDA}" >&2; exit 1;; 1) echo other >&2; exit 3;; esac'
    restart = HALVED.replace("crashes = 0", "crashes = 1")
    job = supervise(local_job(["bash", "-c", program], restart=restart))
    assert job.wait() == 0
    starts = [read_json(job.run.attempt(number).start_file) for number in range(4)]
    assert [start["halvings"] for start in starts] == [0, 1, 1, 2]


IN_PYTHON = """

def main(world, config):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
"""


def test_the_log_has_no_traceback_of_an_error_that_a_smaller_micro_batch_follows(supervise, local_job):
    job = supervise(local_job("out.py:main", ranks=1, files={"out.py": IN_PYTHON}, restart=HALVED))
    assert job.wait() == 1
    logs = [job.run.attempt(number).log_file(0).read_text() for number in (0, 3)]
    assert logs[0].count("can't allocate memory") == 1 and "Traceback" not in logs[0]
    assert "Traceback" in logs[1], "no attempt follows the last one"
    kept = read_json(job.run.attempt(0).error_file(0))["traceback"]
    assert any("out.py" in line for line in kept), "the record of the error has the place"


def test_without_the_key_it_is_a_crash(supervise, local_job):
    job = supervise(local_job(fails_below(1)))
    assert job.wait() == 1
    assert job.run.attempt_numbers() == [0]
    assert json.loads(job.run.attempt(0).start_file.read_text())["halvings"] == 0
