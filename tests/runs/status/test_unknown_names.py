"""What is said of a run whose directory is gone while Slurm still has its job: a small program stands for squeue."""

import re
import shutil

import pytest
from queued_runs import submitted

from toolkit.errors import NotFoundError
from toolkit.rundir.layout import sessions_folder
from toolkit.runs.follow.follow import Follower

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")
RUN = "20261120-142233-9f3a"


@pytest.fixture
def queue(fake_slurm, monkeypatch):
    """Set the queue to rows of (id of the array, own id, state, comment)."""
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")
    return fake_slurm.comments


@pytest.mark.parametrize("command", ["status", "cancel", "logs", "explain", "wait", "watch", "resume"])
def test_its_job_is_named_with_what_ends_it(toolkit, queue, command):
    queue(("6", "6", "RUNNING", ""), ("7", "9", "RUNNING", f"toolkit:{RUN}:0 and words of a user"))
    for name in ("7", "7_1", "9", RUN, RUN[:13], f"train_lm/{RUN}"):
        said = toolkit(command, name)
        assert said.code == 4, said
        assert f"job 7 (RUNNING) is in the queue, but its run {RUN} is not in this folder" in said.err
        assert "Fix: `scancel 7` ends it; if the run is in another folder, pass that folder with --runs" in said.err


def test_a_job_of_something_else_is_called_so(toolkit, queue):
    queue(("6", "6", "PENDING", "(null)"), ("8", "8", "RUNNING", "toolkit:session:dev"), ("9", "9", "COMPLETED", ""))
    assert "job 6 (PENDING) is in the queue, but toolkit did not submit it" in toolkit("status", "6").err
    assert "`scancel -M far 6` ends it; `scontrol -M far show job 6` shows it" in toolkit("cancel", "6;far").err
    said = toolkit("status", "8").err
    assert "job 8 (RUNNING) is session dev, not a run. Fix: `toolkit session stop dev`, or `scancel 8`" in said
    sessions_folder().joinpath("dev.json").touch()
    assert "dev is a session, not a run. Fix: `toolkit run JOB --session dev` runs on" in toolkit("resume", "dev").err
    for name in ("9", RUN):  # what has ended, and what Slurm does not know
        assert re.search("not found|no run of job 9 found", told := toolkit("status", name).err) and "queue" not in told


def test_who_follows_a_run_is_told_that_it_was_removed(toolkit, squeue, queue):
    run = submitted(toolkit, "7", "run7")
    squeue(("7", "RUNNING", "None"))
    follower = Follower(run)
    assert follower.look().state == "running"
    shutil.rmtree(run.path)
    queue(("7", "7", "RUNNING", f"toolkit:{run.run_id}:0"))
    follower._asked_at = float("-inf")
    with pytest.raises(NotFoundError) as error:
        follower.look()
    assert "`scancel 7` ends it" in error.value.fix
    queue()
    with pytest.raises(NotFoundError) as error:
        follower.look()
    assert error.value.message == f"the directory of run {run.run_id} was removed" and error.value.fix
