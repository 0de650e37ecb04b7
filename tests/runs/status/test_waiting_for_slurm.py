"""Who waits for a run that Slurm holds, or cancels it: small programs stand for Slurm's commands."""

import json
from itertools import pairwise

import pytest
from queued_runs import claim, end_attempt, submitted

from toolkit.rundir.claims import end_start
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import make_task
from toolkit.runs.follow import follow
from toolkit.runs.status import state_table
from toolkit.runs.status.reconcile_submission import close_submission

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


def test_a_waiter_asks_ever_more_rarely_and_sees_the_end_at_once(toolkit, squeue, monkeypatch):
    """Ten minutes of waiting, with a clock that sleeping moves."""
    run = submitted(toolkit, "7", "long")
    calls = squeue(("7", "RUNNING", "None"))
    clock = [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])
    asked = []
    follower = follow.Follower(run)
    while clock[0] < 600:
        follower.look()
        asked += [clock[0]] * (len(calls()) - len(asked))
        clock[0] += follow.MARKER_PERIOD_S
    pauses = [later - sooner for sooner, later in pairwise(asked)]
    assert 10 < len(asked) < 25
    assert (pauses[0], max(pauses)) == (2.0, 60.0)
    assert pauses == sorted(pauses)

    claim(run)  # a mark of the run's own is news at once, and so is what follows it
    before = len(calls())
    follower.look()
    assert len(calls()) == before + 1
    clock[0] += 2.0
    follower.look()
    assert len(calls()) == before + 2


@pytest.mark.parametrize("array", ["", "0-1"])
def test_the_result_of_a_job_that_slurm_calls_completed_may_come_late(toolkit, squeue, clock, array):
    """As over NFS, where a file that was not there stays so for half a minute."""
    run = submitted(toolkit, "7", "late", array=array)
    parts = [make_task(run, number) for number in (0, 1)] if array else [run]
    for part in parts:
        claim(part, job_id=f"7_{part.task_number}" if array else "7")
    squeue(*((f"7_{number}", "COMPLETED", "None") for number in (0, 1)), ("7", "COMPLETED", "None"))

    def results():
        for part in parts:
            end_attempt(part, state="completed", exit_code=0)

    clock.at = [(45.0, results)]
    assert toolkit("wait", run.run_id).code == 0
    assert 45 <= clock.now < 50


def test_a_result_that_never_comes_is_a_loss(toolkit, squeue, clock):
    run = submitted(toolkit, "7", "never")
    squeue(("7", "COMPLETED", "None"))
    waited = toolkit("wait", run.run_id)
    assert (waited.code, "waiting for its result" in waited.err) == (125, True)
    assert follow.RESULT_S <= clock.now < follow.RESULT_S + 5


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_an_end_of_slurms_lasts_anew_after_a_run_lived_again(toolkit, squeue, clock, state):
    run = submitted(toolkit, "7", "again")
    follower = follow.Follower(run)
    squeue(("7", state, "None"))
    assert not follower.is_over()
    squeue(("7", "RUNNING", "None"))
    clock.sleep(100)
    assert not follower.is_over()
    squeue(("7", state, "None"))
    clock.sleep(100)
    assert not follower.is_over()
    clock.sleep(follow.SETTLE_S)
    assert follower.is_over()


def test_logs_are_followed_until_the_end_has_lasted(toolkit, squeue, clock):
    run = submitted(toolkit, "7", "late")
    claim(run)
    log = run.path / "slurm-7.out"
    log.write_text("one\n")
    squeue(("7", "COMPLETED", "None"))

    def result():
        log.write_text("one\ntwo\n")
        end_attempt(run, state="completed", exit_code=0)

    clock.at = [(40.0, result)]
    assert toolkit.ok("logs", run.run_id, "-f").splitlines() == ["one", "two"]
    assert 40 <= clock.now < 45


@pytest.mark.parametrize(
    ("ends", "state", "code"),
    [
        ({2: ("failed", 5)}, "failed", 5),  # task 1 was cancelled in the queue, and has no code of its own
        ({1: ("cancelled", 143), 2: ("failed", 5)}, "failed", 5),
        ({2: ("completed", 0)}, "cancelled", 143),
    ],
)
def test_an_array_ends_with_the_code_of_its_first_task_that_failed(toolkit, squeue, monkeypatch, ends, state, code):
    monkeypatch.setattr(follow, "SETTLE_S", 0.0)
    run = submitted(toolkit, "9", "many", array="1-2")
    for number, (word, exit_code) in ends.items():
        task = make_task(run, number)
        claim(task, job_id=f"9_{number}")
        end_attempt(task, state=word, exit_code=exit_code)
    squeue(("9_1", "CANCELLED", "None"))
    assert json.loads(toolkit.ok("status", run.run_id, "--json"))["state"] == state
    assert toolkit("wait", run.run_id).code == code


@pytest.mark.parametrize("array", ["", "0-1"])
def test_a_cancel_while_sbatch_has_not_answered(toolkit, squeue, fake_slurm, array):
    """Nobody knows the job's id; what it becomes finds the request."""
    run = submitted(toolkit, "7", "open", array=array)
    task = make_task(run, 1) if array else run
    claim(task, job_id="7_1" if array else "7")
    end_start(task, 0, state="failed", exit_code=1)
    end_attempt(task, state="failed", exit_code=1)
    now = {"token": "t", "pid": 1, "process_started": 1, "host": "elsewhere", "time": utc_now()}
    write_json(run.submitting(1), now)
    write_json(run.resumed(1), json.loads(run.record.read_text()))
    fake_slurm.respond("squeue")  # it knows no job with the comment
    fake_slurm.respond("scancel", stderr="scancel: error: Invalid job id\n", code=1)
    said = toolkit.ok("cancel", run.run_id)
    assert f"run {run.run_id} was asked to save and exit (start 1 is being submitted" in said
    assert "exits without starting ranks" in said
    assert (run.control / "cancel").exists()
    close_submission(run, 1, "8")
    assert task.is_asked("cancel") and run.task(0).is_asked("cancel")


def test_a_cancel_says_what_follows(toolkit, squeue, fake_slurm, clock):
    run = submitted(toolkit, "9", "many", array="0-1")
    fake_slurm.respond("scancel")
    squeue(("9_0", "RUNNING", "None"), ("9_[1]", "PENDING", "None"))
    one, name = f"{run.run_id}_0", run.run_id
    assert toolkit.ok("cancel", name, "--task", "0") == (
        f"run {one} was asked to save and exit; `toolkit wait {one}` waits for it\n"
    )
    assert toolkit.ok("cancel", name) == f"run {name} was asked to save and exit; `toolkit wait {name}` waits for it\n"
    assert fake_slurm.calls("scancel") == ["scancel --full 9_0", "scancel --full 9"]
    squeue(("9_[0-1]", "CANCELLED", "None"))
    assert [toolkit("wait", each).code for each in (name, one, f"{name}_1")] == [143, 143, 143]
    assert toolkit.ok("status", name).count("cancelled") == 2  # its state and its reason


def test_several_runs_are_cancelled_and_one_that_cannot_be_keeps_no_other_from_it(toolkit, squeue, fake_slurm):
    runs = [submitted(toolkit, job_id, f"run{job_id}") for job_id in ("7", "8")]
    fake_slurm.respond("scancel")
    squeue(("7", "RUNNING", "None"), ("8", "RUNNING", "None"))
    first, second = (run.run_id for run in runs)
    said = toolkit("cancel", first, "nobody", second, "nothing", first)
    assert said.code == 4, said
    assert said.out == "".join(
        f"run {name} was asked to save and exit; `toolkit wait {name}` waits for it\n" for name in (first, second)
    )
    refused = said.err.splitlines()
    assert len(refused) == 2 and "'nobody'" in refused[0] and "'nothing'" in refused[1], said
    assert fake_slurm.calls("scancel") == ["scancel --full 7", "scancel --full 8"]
    assert (toolkit("cancel").code, toolkit("cancel", first, second, "--task", 0).code) == (2, 2)


@pytest.mark.parametrize(
    ("array", "reasons", "stuck"),
    [
        ("", ["DependencyNeverSatisfied"], True),
        ("", ["PartitionTimeLimit"], True),
        ("", ["Priority"], False),
        ("0-1", ["JobHeldUser", "JobHeldUser"], True),
        ("0-1", ["JobHeldUser", "Priority"], False),
    ],
)
def test_who_waits_for_what_cannot_start_is_told_once(toolkit, squeue, clock, monkeypatch, array, reasons, stuck):
    monkeypatch.setattr(state_table, "explain_facts", lambda fact: f"{fact.reason} in any words")
    run = submitted(toolkit, "7", "stuck", array=array)
    ids = [f"7_{number}" for number in (0, 1)] if array else ["7"]
    squeue(*((job_id, "PENDING", reason) for job_id, reason in zip(ids, reasons, strict=True)))
    clock.at = [(300.0, lambda: squeue(*((job_id, "CANCELLED", "None") for job_id in ids)))]
    said = toolkit("wait", run.run_id)
    assert said.code == 143, said
    assert said.err.count(f"the job cannot start as it is: `toolkit explain {run.run_id}`") == int(stuck), said.err


def test_what_was_cancelled_in_the_queue_is_not_said_to_wait(toolkit, squeue):
    run = submitted(toolkit, "7", "early")
    (run.control / "cancel").touch()
    squeue()
    for options in ((), ("--rank", "0")):
        said = toolkit("logs", run.run_id, *options)
        assert said.code == 4 and "none will appear, because the run was cancelled before it wrote one" in said.err, (
            options
        )


def test_a_cancel_that_slurm_does_not_hear_says_what_stands(toolkit, fake_slurm, squeue):
    run = submitted(toolkit, "7", "unheard")
    claim(run)
    squeue(("7", "RUNNING", "None"))
    fake_slurm.respond("scancel", stderr="slurm_load_jobs error: Socket timed out\n", code=1)
    said = toolkit("cancel", run.run_id)
    assert said.code == 3 and run.is_asked("cancel")
    assert (
        "was asked to save and exit, which its ranks do at their next step, but job 7 could not be cancelled in Slurm"
        in said.err
    )
    assert f"Fix: once Slurm responds, `toolkit cancel {run.run_id}`" in said.err
