"""What `status` says of runs whose jobs Slurm holds: small programs stand for squeue, the run directories are real."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from toolkit.batch import follow, history, logs
from toolkit.batch.living import slurm_word
from toolkit.batch.settle import close_submission
from toolkit.rundir.claims import claim_start, end_start
from toolkit.rundir.files import utc_now, write_json
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.states import RunState
from toolkit.slurm.job_facts import JobFacts
from toolkit.slurm.states import STATES

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "run-directory.schema.json").read_text())
SAMPLES = DOCS / "samples"
FACT = JobFacts("7", "RUNNING", source="squeue", restarts=0)


def claim(run, *, job_id="7", number=0):
    claim_start(run, first=number, job_id=job_id, host="node1", pid=1, process_started=1)


def say(run, **facts):
    """State and reason of job 7."""
    return slurm_word(run, "7", {"7": replace(FACT, **facts)})[:2]


@pytest.mark.parametrize("state", [*STATES, "", "NEW_STATE_OF_SLURM"])
def test_no_state_of_slurms_completes_a_run(run_directory, state):
    assert say(run_directory, state=state)[0] not in (RunState.COMPLETED, RunState.CREATED)


def test_a_lost_supervisor_is_named_in_slurms_state(run_directory):
    claim(run_directory)
    for state, ours in (("FAILED", "failed"), ("NODE_FAIL", "failed"), ("COMPLETED", "lost"), ("TIMEOUT", "timeout")):
        told, reason = say(run_directory, state=state)
        assert (told, "supervisor lost" in reason) == (ours, True)
    vanished = slurm_word(run_directory, "7", {})
    assert (vanished[0], "supervisor lost" in vanished[1]) == ("lost", True)
    end_start(run_directory, 0, state="requeued", exit_code=0)
    assert "supervisor lost" not in say(run_directory, state="CANCELLED by 0")[1]


def test_what_was_cancelled_in_the_queue_is_not_lost_when_slurm_forgets_it(run_directory):
    assert slurm_word(run_directory, "7", {})[0] is RunState.LOST
    (run_directory.control / "cancel").touch()
    assert say(run_directory, state="PENDING")[0] is RunState.CANCELLING
    assert slurm_word(run_directory, "7", {})[0] is RunState.CANCELLED
    claim(run_directory)  # but what has begun has to say how it ended
    assert slurm_word(run_directory, "7", {})[0] is RunState.LOST


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
        "Slurm: PENDING (BeginTime): requeued 2 times, and Slurm holds a requeued job back until 2026-11-21T02:48:01",
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


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Answer for squeue: `rows` are (id, state, reason); the calls are counted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answer, calls = folder / "answer.json", folder / "calls"
    calls.touch()
    program = f"""#!{sys.executable}
import json, re, sys
open({str(calls)!r}, "a").write(" ".join(sys.argv) + "\\n")
mark = re.search("--Format=JobArrayID:([^,]*),", " ".join(sys.argv))[1]
for job, state, reason in json.load(open({str(answer)!r})):
    print("".join(cell + mark for cell in (job, state, reason, "n1", "1:00", "N/A", "N/A", "0", *6 * ["(null)"], "N/A", job)))
"""
    (folder / "squeue").write_text(program)
    (folder / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    for command in ("squeue", "sacct"):
        (folder / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def say(*rows):
        answer.write_text(json.dumps(rows))
        return lambda: calls.read_text().splitlines()

    return say


@pytest.fixture
def sbatch(squeue, tmp_path):
    """Answer for sbatch: job 8, whatever is submitted."""
    for command, line in (("sbatch", "echo 8"), ("srun", "exit 1")):
        (tmp_path / "bin" / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / command).chmod(0o755)


def end_attempt(task, *, start=0, **end):
    """The task's attempt 0 as its supervisor leaves it behind."""
    (task.attempts / "000").mkdir()
    for name, path, more in (
        ("attempt_start", task.attempt(0).start_file, {"start": start}),
        ("attempt_exit", task.attempt(0).exit_file, {"final": True, **end}),
    ):
        write_json(path, {**json.loads((SAMPLES / f"{name}.json").read_text()), **more})


def submitted(toolkit, job_id, name, *, array=""):
    """A run as `submit` leaves it behind, without Slurm."""
    job = toolkit.job("true", name=name)
    toolkit.ok("render", job, "--site", "devcluster", *(("-a", array) if array else ()))
    (path,) = toolkit.runs.glob(f"{name}/*")
    write_json(path / "submitted-000.json", {"job_id": job_id, "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    return RunDirectory(path)


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
    real = history.ask_slurm

    def ask(job, job_ids, *, echo=False):
        answer = real(job, job_ids, echo=echo)
        squeue(("1", "RUNNING", "None"), (f"8{end}", "PENDING", "None"), (f"9{end}", "PENDING", "None"))
        (new.path / "later.json").rename(new.path / "submitted-000.json")
        new.submitting(0).unlink()
        close_submission(resumed, 1, "9")
        return answer

    monkeypatch.setattr(history, "ask_slurm", ask)
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


def files_of(run):
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", [(), ("--here",), ("--from", "10")])
def test_a_refused_resume_leaves_the_run_as_it_was(toolkit, squeue, sbatch, tmp_path, words):
    """Cancelled in the queue, which only `control/cancel` knows, with a supervisor that vanished before that."""
    run = submitted(toolkit, "8", "again")
    claim(run, job_id="7")
    (run.control / "cancel").write_text("2026-11-21T02:48:01.000Z\n")
    for step in (10, 20):
        (run.checkpoints / f"step-{step:08}").mkdir()
        (run.checkpoints / f"step-{step:08}" / "manifest.json").write_text("{}")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    squeue()
    seen = [toolkit.ok("status", run.run_id), toolkit.ok("explain", run.run_id), files_of(run)]
    assert "cancelled" in seen[0]
    said = toolkit("resume", run.run_id, *words)
    assert said.code == (2 if "--here" in words else 3), said
    assert [toolkit.ok("status", run.run_id), toolkit.ok("explain", run.run_id), files_of(run)] == seen


def test_a_refused_resume_of_a_task_leaves_it_as_it_was(toolkit, squeue, sbatch, tmp_path):
    run = submitted(toolkit, "7", "many", array="0-1")
    task = make_task(run, 1)
    claim(task, job_id="7_1")
    (task.control / "cancel").touch()
    for step in (10, 20):
        (task.checkpoints / f"step-{step:08}").mkdir()
        (task.checkpoints / f"step-{step:08}" / "manifest.json").write_text("{}")
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
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


def states_of(told):
    return {task["job_id"]: task["state"] for task in told["tasks"]}


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
    assert "is no array" in toolkit("logs", alone.run_id, "--task", "1").err


def test_the_tasks_of_an_array_that_was_given_to_sbatch_by_hand_are_found(toolkit, squeue):
    run = submitted(toolkit, "9", "many", array="0-1")
    (run.path / "submitted-000.json").unlink()
    claim(make_task(run, 0), job_id="11_0")
    squeue(("11_0", "RUNNING", "None"), ("11_[1]", "PENDING", "None"))
    assert states_of(json.loads(toolkit.ok("status", run.run_id, "--json"))) == {"11_0": "running", "11_1": "pending"}


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


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only sleeping moves; `clock.at` are things to do once a time has come."""

    class Clock:
        def __init__(self):
            self.now, self.at = 0.0, []

        def sleep(self, seconds):
            self.now += seconds
            for time_s, action in [entry for entry in self.at if entry[0] <= self.now]:
                action()
                self.at.remove((time_s, action))

    clock = Clock()
    for module in (follow, logs):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


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
    assert (waited.code, "waiting for the result" in waited.err) == (125, True)
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
    assert "is no array" in toolkit("logs", elsewhere / "alone" / alone.run_id, "--task", "1").err


@pytest.mark.parametrize("array", ["", "0-1"])
def test_a_cancel_while_sbatch_has_not_answered(toolkit, squeue, tmp_path, array):
    """Nobody knows the job's id; what it becomes finds the request."""
    run = submitted(toolkit, "7", "open", array=array)
    task = make_task(run, 1) if array else run
    claim(task, job_id="7_1" if array else "7")
    end_start(task, 0, state="failed", exit_code=1)
    end_attempt(task, state="failed", exit_code=1)
    now = {"token": "t", "pid": 1, "process_started": 1, "host": "elsewhere", "time": utc_now()}
    write_json(run.submitting(1), now)
    write_json(run.resumed(1), json.loads(run.record.read_text()))
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")  # it knows no job with the comment
    (tmp_path / "bin" / "scancel").write_text("#!/bin/sh\necho 'scancel: error: Invalid job id' >&2; exit 1\n")
    (tmp_path / "bin" / "scancel").chmod(0o755)
    said = toolkit.ok("cancel", run.run_id)
    assert f"run {run.run_id} was asked to save and end (start 1 is being submitted" in said
    assert "ends before its first rank" in said
    assert (run.control / "cancel").exists()
    close_submission(run, 1, "8")
    assert task.is_asked("cancel") and run.task(0).is_asked("cancel")


def test_a_cancel_says_what_follows(toolkit, squeue, tmp_path, clock):
    run = submitted(toolkit, "9", "many", array="0-1")
    calls = tmp_path / "bin" / "cancelled"
    (tmp_path / "bin" / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    (tmp_path / "bin" / "scancel").chmod(0o755)
    squeue(("9_0", "RUNNING", "None"), ("9_[1]", "PENDING", "None"))
    one, name = f"{run.run_id}_0", run.run_id
    assert toolkit.ok("cancel", name, "--task", "0") == (
        f"run {one} was asked to save and end; `toolkit wait {one}` waits for it\n"
    )
    assert toolkit.ok("cancel", name) == f"run {name} was asked to save and end; `toolkit wait {name}` waits for it\n"
    assert calls.read_text() == "--full 9_0\n--full 9\n"
    squeue(("9_[0-1]", "CANCELLED", "None"))
    assert [toolkit("wait", each).code for each in (name, one, f"{name}_1")] == [143, 143, 143]
    assert toolkit.ok("status", name).count("cancelled") == 2  # its state and its reason
