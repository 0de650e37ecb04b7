"""What `status` says of runs whose jobs Slurm holds: small programs stand for squeue, the run directories are real."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from queued_runs import claim, end_attempt, state_from_slurm, states_of, submitted

from toolkit.rundir.attempt_records import AttemptRecord, reason_of
from toolkit.rundir.claims import end_start
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import make_task
from toolkit.rundir.run_files import read_folder
from toolkit.rundir.states import RunState
from toolkit.runs.status.reconcile_submission import close_submission
from toolkit.runs.status.state_table import recorded_state
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import STATES, JobFacts

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())
FACT = JobFacts("7", "RUNNING", source="squeue", restarts=0)


def say(run, **facts):
    """State and reason of job 7."""
    return state_from_slurm(run, "7", {"7": replace(FACT, **facts)})[:2]


@pytest.mark.parametrize("state", [*STATES, "", "NEW_STATE_OF_SLURM"])
def test_no_state_of_slurms_completes_a_run(run_directory, state):
    assert say(run_directory, state=state)[0] not in (RunState.COMPLETED, RunState.CREATED)


def test_a_lost_supervisor_is_named_in_slurms_state(run_directory):
    claim(run_directory)
    for state, ours in (("FAILED", "failed"), ("NODE_FAIL", "failed"), ("COMPLETED", "lost"), ("TIMEOUT", "timeout")):
        told, reason = say(run_directory, state=state)
        assert (told, "supervisor lost" in reason) == (ours, True)
    vanished = state_from_slurm(run_directory, "7", {})
    assert (vanished[0], "supervisor lost" in vanished[1]) == ("lost", True)
    end_start(run_directory, 0, state="requeued", exit_code=0)
    assert "supervisor lost" not in say(run_directory, state="CANCELLED by 0")[1]


def test_what_was_cancelled_in_the_queue_is_not_lost_when_slurm_forgets_it(run_directory):
    assert state_from_slurm(run_directory, "7", {})[0] is RunState.LOST
    (run_directory.control / "cancel").touch()
    assert say(run_directory, state="PENDING")[0] is RunState.CANCELLING
    assert state_from_slurm(run_directory, "7", {})[0] is RunState.CANCELLED
    claim(run_directory)  # but what has begun has to say how it ended
    assert state_from_slurm(run_directory, "7", {})[0] is RunState.LOST


def test_no_moment_of_a_requeue_is_an_end(toolkit, squeue):
    """What squeue shows from the supervisor's last word to the next start, as watched on a cluster of 22.05."""
    run = submitted(toolkit, "7", "again")
    claim(run)
    end_attempt(run, final=False, next="requeue", cause="walltime", state="timeout")
    squeue(("7", "COMPLETING", "None"))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (told["state"], "is being requeued; Slurm: COMPLETING" in told["reason"]) == ("pending", True)
    for state in ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING", "RUNNING"):
        squeue(("7", state, "BeginTime" if state == "PENDING" else "None"))
        told = json.loads(toolkit.ok("status", run.run_id, "--json"))
        assert told["state"] in ("running", "pending"), told
        end_start(run, 0, state="requeue", exit_code=140)  # after the first look


def test_an_older_answer_takes_no_start_back_but_a_requeue_does(run_directory):
    assert say(run_directory, state="PENDING")[0] is RunState.PENDING
    claim(run_directory)
    told, reason = say(run_directory, state="PENDING")
    assert (told, "start 0 has begun on node1" in reason) == (RunState.RUNNING, True)
    assert say(run_directory, state="PENDING", restarts=1)[0] is RunState.PENDING  # its next life waits


def test_waiting_in_words(run_directory):
    hold = say(run_directory, state="PENDING", reason="BeginTime", restarts=2, eligible_time="2026-11-21T02:48:01")
    assert hold == (
        RunState.PENDING,
        "Slurm: PENDING (BeginTime): requeued 2 times, and Slurm delays a requeued job until 2026-11-21T02:48:01",
    )
    assert (
        "not before 2026" in say(run_directory, state="PENDING", reason="BeginTime", start_time="2026-11-21T02:48")[1]
    )
    held = say(run_directory, state="CANCELLED", reason="JobHeldUser", start_time="2026-11-21T02:48:01")
    assert held == (RunState.CANCELLED, "Slurm: CANCELLED (JobHeldUser)")
    of_an_admin = say(run_directory, state="PENDING", reason="JobHeldAdmin")[1]
    assert of_an_admin == "Slurm: PENDING (JobHeldAdmin): held until an administrator releases it"
    assert "`scontrol release 7`" in say(run_directory, state="PENDING", reason="JobHeldUser")[1]
    assert "`scontrol release 7`" in say(run_directory, state="REQUEUE_HOLD", reason="job requeued in held state")[1]
    assert "expected to start at 2026" in say(run_directory, state="PENDING", start_time="2026-11-21T02:48:01")[1]


def test_many_runs_are_one_question(toolkit, squeue):
    runs = [submitted(toolkit, str(number), f"job{number}") for number in range(1, 6)]
    calls = squeue(*((str(number), "RUNNING", "None") for number in range(1, 5)))
    told = json.loads(toolkit.ok("status", *(run.run_id for run in runs), "--json"))
    assert [entry["state"] for entry in told] == ["running"] * 4 + ["lost"]
    assert len(calls()) == 1
    living = toolkit.ok("status", "--live")
    assert [run.run_id in living for run in runs] == [True] * 4 + [False]
    toolkit.ok("history")
    assert len(calls()) == 3
    assert toolkit("status", runs[0].run_id, "--live").code == 2


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("array", ["", "0-1"])
def test_a_run_that_is_submitted_after_the_question_is_not_lost(toolkit, squeue, monkeypatch, array):
    """Of three runs one has a job; one is in sbatch's hands, and one has ended and is resumed, while squeue answers."""
    other = submitted(toolkit, "1", "other")
    new, resumed = submitted(toolkit, "8", "new", array=array), submitted(toolkit, "7", "resumed", array=array)
    (new.path / "submitted-000.json").rename(new.path / "later.json")
    write_json(
        new.submitting(0), {"token": "t", "pid": 1, "process_started": 1, "host": "elsewhere", "time": utc_now()}
    )
    for part in [make_task(resumed, 0), make_task(resumed, 1)] if array else [resumed]:
        claim(part, job_id=f"7_{part.task_number}" if array else "7")
        end_start(part, 0, state="completed", exit_code=0)
        end_attempt(part, state="completed", exit_code=0)
    end = "_[0-1]" if array else ""
    squeue(("1", "RUNNING", "None"))
    real = Slurm.query

    def ask(slurm, job_ids):
        answer = real(slurm, job_ids)
        if not new.submitting(0).exists():
            return answer
        squeue(("1", "RUNNING", "None"), (f"8{end}", "PENDING", "None"), (f"9{end}", "PENDING", "None"))
        (new.path / "later.json").rename(new.path / "submitted-000.json")
        new.submitting(0).unlink()
        close_submission(resumed, 1, "9")
        return answer

    monkeypatch.setattr(Slurm, "query", ask)
    told = json.loads(toolkit.ok("status", *(run.run_id for run in (other, new, resumed)), "--json"))
    assert [entry["state"] for entry in told] == ["running", "pending", "pending"], told


def test_an_array_is_told_by_task(toolkit, squeue):
    run = submitted(toolkit, "9", "many", array="0-5%2")
    squeue(
        ("9_0", "RUNNING", "None"), ("9_1", "FAILED", "NonZeroExitCode"), ("9_[3-5%2]", "PENDING", "JobArrayTaskLimit")
    )
    done = make_task(run, 2)
    claim(done, job_id="9_2")
    end_attempt(done, state="completed", exit_code=0)

    told = json.loads(toolkit.ok("status", "last", "--json"))
    jsonschema.validate(told, {**SCHEMA, "$ref": "#/$defs/status"})
    assert (told["state"], told["exit_code"]) == ("running", None)
    assert told["reason"] == "array 0-5%2: 1 running, 3 pending, 1 failed, 1 completed"
    assert [task["state"] for task in told["tasks"]] == [
        "running",
        "failed",
        "completed",
        "pending",
        "pending",
        "pending",
    ]
    assert json.loads(toolkit.ok("status", "9_2", "--json"))["state"] == "completed"

    squeue(*((f"9_{task}", "COMPLETED", "None") for task in (0, 1, 3, 4, 5)))
    told = json.loads(toolkit.ok("status", "last", "--json"))
    assert (told["state"], told["reason"]) == ("lost", "array 0-5%2: 5 lost, 1 completed")


def test_a_task_that_ends_during_the_query_has_its_own_end(toolkit, squeue, monkeypatch):
    run = submitted(toolkit, "9", "many", array="0-1")
    squeue()
    first, last = make_task(run, 0), make_task(run, 1)
    for task in (first, last):
        claim(task, job_id=f"9_{task.task_number}")
    end_attempt(first, state="completed", exit_code=0)
    query = Slurm.query

    def end_meanwhile(slurm, ids):
        if last.attempt(0).exit_file.exists():
            return query(slurm, ids)
        answer = query(slurm, ids)
        end_attempt(last, state="completed", exit_code=0)
        return answer

    monkeypatch.setattr(Slurm, "query", end_meanwhile)
    assert json.loads(toolkit.ok("status", "last", "--json"))["state"] == "completed"


def test_a_task_that_has_not_begun_has_a_status_and_one_that_is_none_has_not(toolkit, squeue):
    run = submitted(toolkit, "9", "many", array="0-5%2")
    squeue(("9_[0-5%2]", "PENDING", "Resources"))
    for name in ("9_4", f"{run.run_id}_4"):
        assert json.loads(toolkit.ok("status", name, "--json"))["state"] == "pending"
    said = toolkit("status", "9_6")
    assert (said.code, "has no task 6" in said.err) == (4, True)
    assert "no log yet" in toolkit("logs", "9_4").err
    make_task(run, 0)
    assert "--task T" in toolkit("logs", "9", "--rank", "0").err
    alone = submitted(toolkit, "10", "alone")
    squeue(("10", "RUNNING", "None"))
    assert "is not an array" in toolkit("logs", alone.run_id, "--task", "1").err


def test_the_tasks_of_an_array_that_was_given_to_sbatch_by_hand_are_found(toolkit, squeue):
    run = submitted(toolkit, "9", "many", array="0-1")
    (run.path / "submitted-000.json").unlink()
    claim(make_task(run, 0), job_id="11_0")
    squeue(("11_0", "RUNNING", "None"), ("11_[1]", "PENDING", "None"))
    assert states_of(json.loads(toolkit.ok("status", run.run_id, "--json"))) == {"11_0": "running", "11_1": "pending"}


def test_a_task_of_a_run_that_is_named_by_its_path(toolkit, squeue):
    run = submitted(toolkit, "9", "many", array="0-1")
    alone = submitted(toolkit, "10", "alone")
    elsewhere = toolkit.folder / "elsewhere"
    toolkit.runs.rename(elsewhere)
    squeue(("9_[0-1]", "PENDING", "None"))
    path = elsewhere / "many" / run.run_id
    (path / "slurm-9_1.out").write_text("of task 1\n")
    assert toolkit.ok("logs", path, "--task", "1") == "of task 1\n"
    said = toolkit("logs", path, "--task", "2")
    assert (said.code, "has no task 2" in said.err) == (4, True)
    assert "is not an array" in toolkit("logs", elsewhere / "alone" / alone.run_id, "--task", "1").err


def test_a_rank_that_a_rehearsal_killed_had_memory_enough(run_directory):
    end_attempt(run_directory, reason="killed by SIGKILL (out of memory?)")
    attempt = run_directory.attempt(0)
    killed = AttemptRecord.read(attempt)
    assert reason_of(attempt, killed) == killed.reason
    write_json(attempt.rehearsed, json.loads((DOCS / "samples" / "rehearsed.json").read_text()))
    assert reason_of(attempt, killed) == "killed by SIGKILL (by a rehearsal)"
    assert recorded_state(read_folder(run_directory)).reason.endswith("killed by SIGKILL (by a rehearsal)")


def test_what_is_wrong_with_one_run_hides_no_other(toolkit, squeue):
    first, array, damaged = (
        submitted(toolkit, job_id, f"run{job_id}", array="0-1" if job_id == "8" else "") for job_id in ("7", "8", "9")
    )
    damaged.record.write_text("{")
    squeue(("7", "RUNNING", "None"), ("8_0", "RUNNING", "None"), ("8_1", "PENDING", "Priority"))
    said = toolkit("status", "nobody", first.run_id, damaged.run_id, array.run_id, first.run_id)
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == [first.run_id, array.run_id], said
    unknown, broken = said.err.splitlines()
    assert said.code == 4 and "run 'nobody' not found" in unknown and "record.json: invalid JSON" in broken
    said = toolkit("status", "--json", damaged.run_id, first.run_id)
    assert said.code == 2 and [one["run_id"] for one in json.loads(said.out)] == [first.run_id]
    said = toolkit("status", "--tasks", first.run_id, array.run_id)
    assert len(said.out.splitlines()) == 3 and f"run {first.run_id} is not an array" in said.err and said.code == 2
    said = toolkit("status", "nobody", "nothing")
    assert (said.code, said.out, len(said.err.splitlines())) == (4, "", 2), "no table of nothing"
