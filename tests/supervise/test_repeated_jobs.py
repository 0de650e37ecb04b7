"""Jobs in turn, and what a task that is done leaves: in this process, with small programs for Slurm's."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from toolkit.errors import OWN_FAILURE
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.claims import claim_attempt, claim_start, end_start, read_claim
from toolkit.rundir.files import append_line, read_json, write_json
from toolkit.rundir.layout import make_task
from toolkit.rundir.states import Cause, Next
from toolkit.rundir.task_files import read_usage
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.done_task import tidy_done_task
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.repeated_jobs import Turn, cancel_later_turns, end_since, start_of_turn, take_turn
from toolkit.supervise.requests import StopRequest
from toolkit.supervise.shape import Shape
from toolkit.supervise.supervisor import Supervisor

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"


def claim(run, number, job_id):
    claim_start(run, first=number, job_id=job_id, host="node1", pid=1, process_started=1)


def end(run, *, final, start=0, code=0):
    attempt = claim_attempt(run)
    write_json(attempt.start_file, {"start": start, "job_id": "9_1", "nodes": 1, "ranks": 1, "time": "t", "host": "n"})
    write_json(
        attempt.exit_file,
        {"cause": "completed", "next": "end", "final": final, "state": "completed", "exit_code": code, "reason": "r",
         "decision": "d", "rank": None, "host": None, "fix": "", "last_lines": [], "step": None, "time": "t"},
    )  # fmt: skip
    return attempt


def test_an_array_is_jobs_in_turn_where_the_job_says_so():
    allocation = Allocation("9_3", 1, True, True, 0.0, task=3)
    assert take_turn({"job": {"repeat": 1}}, allocation) is None
    assert allocation.task == 3
    assert take_turn({"job": {"repeat": 5}}, allocation) == Turn(3, 5, "9")
    assert allocation.task is None


def test_each_job_claims_the_next_start_and_closes_one_that_was_killed(run_directory):
    assert start_of_turn(run_directory, 0, "9_1") == 0
    claim(run_directory, 0, "9_1")
    assert start_of_turn(run_directory, 0, "9_1") == 0  # Slurm began it a second time
    assert start_of_turn(run_directory, 0, "9_2") == 1
    assert "9_2" in read_json(run_directory.start(0) / "lost.json")["note"]
    claim(run_directory, 1, "9_2")
    end_start(run_directory, 1, state="follow_up", exit_code=140)
    assert start_of_turn(run_directory, 0, "9_3") == 2
    assert not (run_directory.start(1) / "lost.json").exists()
    assert start_of_turn(run_directory, 7, "11_1") == 7  # of a resume


def test_a_run_that_has_ended_is_left_alone_until_it_is_resumed(run_directory):
    assert end_since(run_directory, 0) is None
    end(run_directory, final=False)
    assert end_since(run_directory, 0) is None
    end(run_directory, final=True, start=1, code=3)
    assert end_since(run_directory, 0).exit_code == 3
    assert end_since(run_directory, 2) is None


@pytest.mark.parametrize(("number", "follows"), [(1, Next.FOLLOW_UP), (5, None)])
def test_only_the_last_job_ends_the_run_at_its_walltime(run_directory, number, follows):
    job = {
        "job": {"requeue": False, "entry": "x.py:main"},
        "scheduler": {},
        "restart": {"crashes": 0, "walltimes": -1, "preemptions": -1},
    }
    one = Supervisor(
        run_directory, job, 0, Allocation("9_1", 1, True, True, time.time()), Shape.of(1, 1), run_directory.script(0),
        StopRequest(), Turn(number, 5, "9"),
    )  # fmt: skip
    assert one._next_start(Cause.WALLTIME) is follows
    if follows is None:
        decision = one._decision(AttemptEnd(Cause.WALLTIME, "walltime"))
        assert (
            decision.reason
            == f"this was the last of 5 repeated jobs; `toolkit resume {run_directory.run_id}` submits 5 more"
        )


@pytest.mark.parametrize(("body", "said"), [("true", "cancelling"), ("echo no >&2; exit 1", "as soon as it starts")])
def test_the_jobs_that_wait_leave_the_queue_at_the_end(fake_slurm, capsys, body, said):
    fake_slurm.script("scancel", body)
    cancel_later_turns(Turn(5, 5, "9"))
    assert fake_slurm.calls("scancel") == []
    cancel_later_turns(Turn(2, 5, "9"))
    assert fake_slurm.calls("scancel") == ["scancel --state=PENDING 9"]
    assert said in capsys.readouterr().out


@pytest.fixture
def done(run_directory):
    """A task whose attempt has just completed, with its job's log."""
    task = make_task(run_directory, 3)
    claim(task, 0, "9_3")
    write_json(task.start(0) / "job.json", {})
    attempt = end(task, final=True)
    append_line(attempt.events, {"event": "ended", "time": "t"})
    write_json(attempt.usage_file(0), json.loads((SAMPLES / "usage.json").read_text()))
    attempt.usage_file(4).write_text('{"host": "no')  # of a node that was lost as it ended
    attempt.log_file(0).write_bytes(b"one\ntwo \xff without an end")
    attempt.log_file(1).write_text("of rank 1\n")
    attempt.launcher_log.write_text("srun: hello\n")
    for path in (attempt.done_marker(0), attempt.rank_file(0), attempt.heartbeat, task.whole.path / "slurm-9_3.out"):
        path.write_text("{}" if path.suffix == ".json" else "")
    end_start(task, 0, state="completed", exit_code=0)
    return task


def files_of(task):
    return sorted(str(path.relative_to(task.path)) for path in task.path.rglob("*") if path.is_file())


def tidy(task, log):
    """In a process whose standard output is a file, as a batch job's is."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        sys.stdout = os.fdopen(1, "w")
        tidy_done_task(task, 0, "9_3")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_task_that_is_done_keeps_its_end_its_events_and_one_log(done):
    log = done.whole.path / "slurm-9_3.out"
    tidy(done, log)
    assert files_of(done) == ["attempts/000/events.jsonl", "attempts/000/exit.json", "starts/000/end.json"]
    printed, _, said = log.read_bytes().partition(b"toolkit: ")
    assert printed == b"srun: hello\n[0] one\n[0] two \xff without an end\n[1] of rank 1\n"
    assert said.startswith(b"cannot keep ") and b"rank-00004.json" in said
    assert StartRecord.read(done.attempt(0)).start == 0
    (used,) = read_usage(done.attempt(0), pytest.fail)
    assert (used["host"], used["cpu_s"], len(used["gpus"])) == ("node1", 312.4, 1)
    assert (read_claim(done, 0).job_id, read_claim(done, 0).pid) == ("9_3", 1)
    with pytest.raises(Exception, match="belongs to job 9_3") as refused:
        claim(done, 0, "10_3")
    assert refused.value.exit_code == OWN_FAILURE


def test_nothing_is_removed_where_nobody_would_find_the_log(done, tmp_path):
    before = files_of(done)
    tidy(done, tmp_path / "elsewhere.out")
    assert files_of(done) == before
