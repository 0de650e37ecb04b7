"""What a task of a sweep runs."""

import pytest

from toolkit.errors import OwnFailureError
from toolkit.supervise.start import job_of_task

JOB = {"train": {"lr": 1, "steps": 5}, "args": {}, "sweep": {"3": {"train.lr": 2, "args.model": {"layers": 4}}}}


def test_its_own_values_lie_over_the_job():
    assert job_of_task(JOB, 3) == {"train": {"lr": 2, "steps": 5}, "args": {"model": {"layers": 4}}}
    assert JOB["train"]["lr"] == 1


@pytest.mark.parametrize("task", [4, None])
def test_a_task_that_the_sweep_has_not_is_refused(task):
    with pytest.raises(OwnFailureError, match="but not of task"):
        job_of_task(JOB, task)


def test_a_job_without_a_sweep_is_as_it_was():
    job = {"train": {"lr": 1}}
    assert job_of_task(job, None) is job
