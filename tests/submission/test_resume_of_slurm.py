"""Resumes of runs whose jobs Slurm holds: small programs stand for Slurm's commands, the run directories are real."""

import json

import pytest
from queued_runs import claim, end_attempt, files_of, states_of, submitted
from whole_checkpoints import make_whole_checkpoint

from toolkit.rundir.claims import end_start
from toolkit.rundir.layout import make_task
from toolkit.runs.follow import follow

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


@pytest.mark.parametrize("words", [(), ("--here",), ("--from", "10")])
def test_a_refused_resume_leaves_the_run_as_it_was(toolkit, squeue, sbatch, fake_slurm, words):
    """Cancelled in the queue, which only `control/cancel` knows, with a supervisor that vanished before that."""
    run = submitted(toolkit, "8", "again")
    claim(run, job_id="7")
    (run.control / "cancel").write_text("2026-11-21T02:48:01.000Z\n")
    for step in (10, 20):
        make_whole_checkpoint(run.checkpoints, step)
    fake_slurm.respond("sbatch", stderr="sbatch: error: Invalid account\n", code=1)
    squeue()
    seen = [toolkit.ok("status", run.run_id), toolkit.ok("explain", run.run_id), files_of(run)]
    assert "cancelled" in seen[0]
    said = toolkit("resume", run.run_id, *words)
    assert said.code == (2 if "--here" in words else 3), said
    assert [toolkit.ok("status", run.run_id), toolkit.ok("explain", run.run_id), files_of(run)] == seen


def test_a_refused_resume_of_a_task_leaves_it_as_it_was(toolkit, squeue, sbatch, fake_slurm):
    run = submitted(toolkit, "7", "many", array="0-1")
    task = make_task(run, 1)
    claim(task, job_id="7_1")
    (task.control / "cancel").touch()
    for step in (10, 20):
        make_whole_checkpoint(task.checkpoints, step)
    fake_slurm.respond("sbatch", stderr="sbatch: error: Invalid account\n", code=1)
    squeue()
    seen = [toolkit.ok("status", run.run_id, "--json"), files_of(run)]
    assert toolkit("resume", f"{run.run_id}_1", "--from", "10").code == 3
    assert [toolkit.ok("status", run.run_id, "--json"), files_of(run)] == seen


def test_options_of_one_submission_are_not_those_of_the_next(toolkit, squeue, sbatch):
    job = toolkit.job("true", name="once")
    job.write_text(job.read_text() + 'sbatch = ["--reservation=r"]\n')
    run = toolkit.submit(job, "--site", "devcluster", "-d", "afterok:5", "-o", "first.out", "-e", "first.err")
    once = ["--output=first.out", "--error=first.err", "--dependency=afterok:5"]
    assert directives(run, 0)[-3:] == once
    squeue()
    for start, words in ((1, ()), (2, ("-d", "afterany:6")), (3, ())):
        toolkit.ok("resume", run.run_id, *words)
        found = [line for line in directives(run, start) if line.startswith(("--depend", "--reserv", "--err", "--out"))]
        assert found[1:] == ["--reservation=r", *(["--dependency=afterany:6"] if words else [])]


def directives(run, start):
    lines = run.script(start).read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("rows", "state", "code"),
    [
        ([("8", "CANCELLED", "None")], "cancelled", 143),
        ([("8", "NODE_FAIL", "None")], "failed", 125),
        ([], "lost", 125),
    ],
)
def test_a_resume_that_ends_in_the_queue_does_not_end_as_the_life_before(
    toolkit, squeue, monkeypatch, rows, state, code
):
    monkeypatch.setattr(follow, "SETTLE_S", 0.0)
    run = submitted(toolkit, "7", "again")
    claim(run)
    end_start(run, 0, state="completed", exit_code=0)
    end_attempt(run, state="completed", exit_code=0, last_lines=["of the first life"], fix="of the first life")
    squeue()
    assert toolkit("wait", run.run_id).code == 0
    toolkit.ok("resume", run.run_id)
    squeue(*rows)
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (told["state"], told["exit_code"]) == (state, None)
    waited = toolkit("wait", run.run_id)
    assert (waited.code, "of the first life" in waited.err) == (code, False), waited


@pytest.mark.usefixtures("sbatch")
def test_a_resumed_task_that_ends_in_the_queue_does_not_end_as_the_life_before(toolkit, squeue):
    run = submitted(toolkit, "7", "many", array="0-1")
    for task in (make_task(run, number) for number in (0, 1)):
        claim(task, job_id=f"7_{task.task_number}")
        end_start(task, 0, state="completed", exit_code=0)
        end_attempt(task, state="completed", exit_code=0)
    squeue()
    toolkit.ok("resume", f"{run.run_id}_1")
    squeue(("8_1", "NODE_FAIL", "None"))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert [(task["state"], task["exit_code"]) for task in told["tasks"]] == [("completed", 0), ("failed", None)]
    assert (told["state"], told["exit_code"]) == ("failed", None)


@pytest.mark.usefixtures("sbatch")
def test_a_resumed_array_runs_what_is_not_completed_and_forgets_old_ends(toolkit, squeue):
    run = submitted(toolkit, "7", "many", array="0-3%2")
    completed, cancelled = make_task(run, 0), make_task(run, 1)
    for task, state in ((completed, "completed"), (cancelled, "cancelled")):
        for number in (0, 1):  # each was requeued once: the resume is start 2
            claim(task, job_id=f"7_{task.task_number}", number=number)
            end_start(task, number, state=state, exit_code=0)
        end_attempt(task, start=1, state=state, exit_code=0)
    (cancelled.control / "cancel").touch()
    squeue(("7_[2-3%2]", "CANCELLED", "None"))
    assert "2 cancelled" not in toolkit.ok("status", run.run_id)  # 3 are, and 1 is completed

    toolkit.ok("resume", run.run_id)
    assert "#SBATCH --array=1,2,3%2" in run.script(2).read_text()
    squeue(("8_[1-3%2]", "PENDING", "None"))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert states_of(told) == {"7_0": "completed", "8_1": "pending", "8_2": "pending", "8_3": "pending"}
    assert not (cancelled.control / "cancel").exists()
    refused = toolkit("logs", f"{run.run_id}_9")  # all tasks are named, also those that were not resumed
    assert (refused.code, "Fix: choose one of its tasks, 0-3\n" in refused.err) == (4, True)


@pytest.mark.usefixtures("sbatch")
def test_one_task_is_resumed_once_all_have_ended(toolkit, squeue):
    run = submitted(toolkit, "7", "many", array="0-2")
    failed = make_task(run, 1)
    claim(failed, job_id="7_1")
    end_start(failed, 0, state="failed", exit_code=1)
    end_attempt(failed, state="failed", exit_code=1)
    squeue(("7_0", "CANCELLED", "None"), ("7_[2]", "PENDING", "None"))
    assert "is pending" in toolkit("resume", f"{run.run_id}_1").err
    squeue(("7_[0,2]", "CANCELLED", "None"))
    toolkit.ok("resume", f"{run.run_id}_1")
    assert "#SBATCH --array=1\n" in run.script(1).read_text()
    squeue(("8_1", "COMPLETED", "None"))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert states_of(told) == {"8_0": "lost", "8_1": "lost", "8_2": "lost"}  # never completed without a word


@pytest.mark.usefixtures("sbatch")
def test_an_array_whose_tasks_are_all_completed_is_not_run_again_unasked(toolkit, squeue):
    run = submitted(toolkit, "7", "many", array="0-2%2")
    for task in (make_task(run, number) for number in range(3)):
        claim(task, job_id=f"7_{task.task_number}")
        end_start(task, 0, state="completed", exit_code=0)
        end_attempt(task, state="completed", exit_code=0)
    squeue()
    before = files_of(run)
    said = toolkit("resume", run.run_id)
    fix = "--set job.array=0-2%2"
    assert (said.code, "all 3 tasks" in said.err, fix in said.err) == (1, True, True), said
    assert files_of(run) == before
    asked = toolkit("resume", run.run_id, *fix.split())
    assert (asked.code, "stay as they are" in asked.err) == (0, False), asked
    assert "#SBATCH --array=0-2%2\n" in run.script(1).read_text()


@pytest.mark.usefixtures("sbatch")
def test_a_resume_on_another_site_is_submitted_there_and_stays_there(toolkit, squeue):
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    squeue(("8", "PENDING", "Priority"))
    said = toolkit("resume", run.run_id, "--site", "devcluster", "-p", "nosuch")
    assert (said.code, "partition 'nosuch' not found at site devcluster" in said.err) == (2, True), said
    assert toolkit("resume", run.run_id, "-d", "afterok:5").code == 2  # no sbatch starts it here
    toolkit.ok("resume", run.run_id, "--site", "devcluster", "-d", "afterok:5")
    assert {"--partition=main", "--dependency=afterok:5"} <= set(directives(run, 1))
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (told["site"], told["state"], told["job_id"]) == ("devcluster", "pending", "8")
    squeue(("8", "FAILED", "NonZeroExitCode"))
    toolkit.ok("resume", run.run_id)
    assert "--partition=main" in directives(run, 2)
    toolkit.ok("resume", run.run_id, "--site", "local", "--wait")
    told = json.loads(toolkit.ok("status", run.run_id, "--json"))
    assert (told["site"], told["state"], told["starts"]) == ("local", "completed", 2)
