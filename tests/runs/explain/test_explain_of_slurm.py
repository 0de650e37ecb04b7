"""What `explain` says of runs whose jobs Slurm holds or has ended: programs stand for squeue and sinfo, the runs are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.rundir.claims import claim_start, end_start
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.rundir.states import ENDINGS
from toolkit.runs.explain.foreign import _explain
from toolkit.slurm.commands import Slurm
from toolkit.slurm.job_facts import JobFacts

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")

SAMPLES = Path(__file__).parents[3] / "docs" / "samples"
OUT_OF_MEMORY = "slurmstepd: error: Detected 1 oom_kill event in StepId=8.batch"


@pytest.fixture
def slurm(fake_slurm):
    """Set the queue to rows of (id, state, reason, nodes, required nodes, restarts), or make squeue fail with `silent`."""
    fake_slurm.respond("sinfo", stderr="sinfo: error: Access denied\n", code=1)
    fake_slurm.comments()
    defaults = {"nodes": "(null)", "required_nodes": "(null)", "restarts": "0", "time_limit": "5:00",
                "partition": "main", "node_count": "1", "end_time": "N/A"}  # fmt: skip

    def set_queue(*rows, silent=""):
        if silent:
            fake_slurm.respond("squeue", stderr=f"{silent}\n", code=1)
            return
        columns = ("job_id", "state", "reason", "nodes", "required_nodes", "restarts")
        fake_slurm.queue(*(dict(zip(columns, row, strict=False)) for row in rows), **defaults)

    return set_queue


def submitted(toolkit, job_id, *argv, name="work") -> RunDirectory:
    """A run as `submit` leaves it behind, without Slurm."""
    toolkit.ok("render", toolkit.job("true", name=name), "--site", "devcluster", *argv)
    (path,) = toolkit.runs.glob(f"{name}/*")
    mark_submitted(RunDirectory(path), 0, job_id)
    return RunDirectory(path)


def mark_submitted(run, start, job_id):
    write_json(run.submitted(start), {"job_id": job_id, "start": start, "time": "2026-11-21T02:48:01.000Z"})


def lived(run, *, start=0, job_id="8"):
    """A start that came to an end, and its attempt, which the toolkit was asked to stop."""
    claim_start(run, first=start, job_id=job_id, host="node1", pid=1, process_started=1)
    end_start(run, start, state="stopped", exit_code=130)
    (run.attempts / f"{start:03}").mkdir()
    of_job = {"start": start, "job_id": job_id}
    for sample, path, more in (
        ("attempt_start", run.attempt(start).start_file, of_job),
        ("attempt_exit", run.attempt(start).exit_file, {"final": True, "state": "stopped", "cause": "stopped"}),
    ):
        write_json(path, {**json.loads((SAMPLES / f"{sample}.json").read_text()), **more})


def explain(toolkit, name):
    return json.loads(toolkit.ok("explain", name, "--json"))


def sources(told):
    return {one["source"] for one in told["evidence"]}


def test_a_task_is_not_explained_by_another_tasks_log(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    (run.path / "slurm-8_0.out").write_text(OUT_OF_MEMORY + "\n")
    slurm(("8_0", "FAILED", "NonZeroExitCode", "node1"), ("8_1", "FAILED", "NonZeroExitCode", "node2"))
    assert explain(toolkit, f"{run.run_id}_0")["symptom"] == "out_of_memory"
    told = explain(toolkit, f"{run.run_id}_1")
    assert (told["symptom"], "slurm-8_0.out" in sources(told)) == ("no_log_folder", False)
    assert "mem_gb_per_node" not in " ".join(told["actions"])


def test_a_resumed_job_is_not_explained_by_an_earlier_ones_log(toolkit, slurm):
    run = submitted(toolkit, "8")
    lived(run)
    (run.path / "slurm-8.out").write_text(OUT_OF_MEMORY + "\n")
    mark_submitted(run, 1, "9")
    slurm(("9", "FAILED", "NonZeroExitCode", "node[1-2]"))
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], "slurm-8.out" in sources(told)) == ("no_log_folder", False)
    assert f"`srun -w 'node[1-2]' ls -d {run.path}`" in told["actions"][0]
    slurm()  # and it is forgotten
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], "slurm-8.out" in sources(told)) == ("forgotten", False)


def test_a_job_without_a_node_is_looked_for_on_none(toolkit, slurm):
    run = submitted(toolkit, "8")
    slurm(("8", "FAILED", "NonZeroExitCode"))
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], "srun" in " ".join(told["actions"])) == ("no_log_folder", False)


@pytest.mark.parametrize("place", ["out/%j.log", "%j.log", "with space/%A.log"])
def test_a_log_that_was_put_elsewhere_is_read_there(toolkit, slurm, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    asked = place if place == "%j.log" else str(tmp_path / place)  # sbatch reads a relative one from where it stands
    run = submitted(toolkit, "8", "-o", asked)
    slurm(("8", "FAILED", "NonZeroExitCode", "node1"))
    told = explain(toolkit, run.run_id)
    assert told["symptom"] == "supervisor_failed"
    assert told["actions"][0].startswith(f"option -o placed its log at {asked}; if there is none, Slurm could not")
    said = toolkit("logs", run.run_id)
    assert (said.code, f"option -o placed its log at {asked}" in said.err) == (4, True)
    log = tmp_path / place.replace("%j", "8").replace("%A", "8")
    log.parent.mkdir(exist_ok=True)
    log.write_text("toolkit: this line of the site file failed: module load cuda\n")
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], str(log) in sources(told)) == ("setup_failed", True)
    assert "module load cuda" in toolkit.ok("logs", run.run_id)


@pytest.mark.parametrize("option", ["-o {}", '-o "{}"', "--output {}", "--output={}"])
def test_a_log_is_found_however_sbatch_was_told_of_it(toolkit, slurm, tmp_path, option):
    words = json.dumps([option.format(tmp_path / "%x-%j.log")])
    run = submitted(toolkit, "8", "--set", f"job.sbatch={words}")
    (tmp_path / "work-8.log").write_text(OUT_OF_MEMORY + "\n")
    slurm(("8", "FAILED", "NonZeroExitCode", "node1"))
    assert explain(toolkit, run.run_id)["symptom"] == "out_of_memory"


def test_a_log_that_jobs_share_explains_none_of_them(toolkit, slurm, tmp_path):
    (tmp_path / "all.log").write_text(OUT_OF_MEMORY + "\n")
    run = submitted(toolkit, "8", "-o", tmp_path / "all.log")
    slurm(("8", "FAILED", "NonZeroExitCode", "node1"))
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], str(tmp_path / "all.log") in told["actions"][0]) == ("supervisor_failed", True)
    assert OUT_OF_MEMORY in toolkit.ok("logs", run.run_id)


def test_the_log_of_a_task_that_was_put_elsewhere(toolkit, slurm, tmp_path):
    run = submitted(toolkit, "8", "-a", "0-1", "-o", tmp_path / "%A-%a.log")
    (tmp_path / "8-1.log").write_text(OUT_OF_MEMORY + "\n")
    slurm(("8_0", "FAILED", "NonZeroExitCode", "node1"), ("8_1", "FAILED", "NonZeroExitCode", "node2"))
    assert [explain(toolkit, f"{run.run_id}_{task}")["symptom"] for task in (0, 1)] == [
        "supervisor_failed",
        "out_of_memory",
    ]


SETUP_FAILED = "toolkit: this line of the job file failed: source missing/bin/activate"


@pytest.mark.parametrize(
    "places", [("%A_%a.out", "%A_%a.err"), ("", "e_%A_%a"), ("%x-%j.out", "%x-%j.err"), ("lg/%j", "lg/%j.err")]
)
def test_the_reason_that_all_tasks_share_in_their_files_of_errors(toolkit, slurm, tmp_path, places):
    (tmp_path / "lg" / "7").mkdir(parents=True)  # not a log
    options = [f"--{name}={tmp_path / place}" for name, place in zip(("output", "error"), places, strict=True) if place]
    run = submitted(toolkit, "8", "-a", "0-1", "--set", f"job.sbatch={json.dumps(options)}")
    for task, number in enumerate(("8", "9")):
        texts = (f"toolkit: job 8_{task} begins (restart 0)\n", f"line 44: activate: No such file\n{SETUP_FAILED}\n")
        for place, text in zip(places, texts, strict=True):
            fields = {"%A": "8", "%a": str(task), "%j": number, "%x": "work"}
            for field, value in fields.items():
                place = place.replace(field, value)
            if place:
                (tmp_path / place).write_text(text)
    slurm(*((f"8_{task}", "FAILED", "NonZeroExitCode", "node1") for task in (0, 1)))
    told = explain(toolkit, f"{run.run_id}_1")
    assert told["symptom"] == "setup_failed" and told["evidence"][-1]["line"] == SETUP_FAILED
    told = explain(toolkit, run.run_id)
    assert told["why"] == f"array 0-1: 2 failed; all 2 failed for the same reason: {SETUP_FAILED}"


def test_tasks_that_failed_for_different_reasons(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-2")
    slurm(*((f"8_{task}", "FAILED", "NonZeroExitCode", "node1") for task in range(3)))

    def why(*lines):
        for task, line in enumerate(lines):
            (run.path / f"slurm-8_{task}.out").write_text(f"{line}\n")
        return explain(toolkit, run.run_id)["why"].partition("; ")[2]

    assert why(*(f"OSError: cannot read /data/{task}.bin" for task in range(3))) == (
        "all 3 failed for similar reasons, the first: OSError: cannot read /data/0.bin"
    )
    assert why("OSError: a", "OSError: a", "KeyError: b") == ""


@pytest.mark.parametrize(("codes", "is_similar"), [((3, 3), True), ((3, 77), False)])
def test_tasks_that_exit_with_different_codes_did_not_fail_alike(toolkit, slurm, codes, is_similar):
    run = submitted(toolkit, "8", "-a", "0-1")
    for number, code in enumerate(codes):
        task = make_task(run, number)
        lived(task, job_id=f"8_{number}")
        path = task.attempt(0).exit_file
        end = {"state": "failed", "cause": "crashed", "exit_code": code, "reason": f"exit code {code}", "rank": None}
        write_json(path, json.loads(path.read_text()) | end | {"symptom": "exit_code", "last_lines": ["error: 0.3"]})
        end_start(task, 0, state="failed", exit_code=code)
    slurm()
    why = explain(toolkit, run.run_id)["why"]
    assert ("all 2 failed for the same reason: exit code 3" in why) is is_similar and ("similar" not in why)


def test_a_log_that_cannot_be_read_is_no_cause(tmp_path):
    job = JobFacts("8", "FAILED", exit_code="1:0")
    told = _explain(Slurm(), job, {"StdOut": str(tmp_path / "away" / "slurm-8.out"), "ExitCode": "1:0"})
    assert told.why == "its script exited with code 1"
    assert "this host cannot read it: No such file or directory" in told.evidence[-1].line


def test_a_follow_up_job_of_a_task_is_explained_by_its_own_log(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    task = make_task(run, 1)
    lived(task, job_id="8_1")
    task.script(1).write_text(run.script(0).read_text())
    mark_submitted(task, 1, "9")  # as the supervisor does it: the job is an array of this task alone
    (run.path / "slurm-8_1.out").write_text("toolkit: all is well\n")
    (run.path / "slurm-9_1.out").write_text(OUT_OF_MEMORY + "\n")
    slurm(("9_1", "FAILED", "NonZeroExitCode", "node1"))
    told = explain(toolkit, f"{run.run_id}_1")
    assert (told["symptom"], "slurm-9_1.out" in sources(told)) == ("out_of_memory", True)
    claim_start(task, first=1, job_id="9_1", host="node1", pid=1, process_started=1)
    (run.path / "slurm-9_1.out").unlink()
    assert explain(toolkit, f"{run.run_id}_1")["symptom"] != "no_log_folder"  # what has begun had its log


def test_a_submission_that_broke_off_was_not_cancelled_in_the_queue(toolkit, slurm):
    run = submitted(toolkit, "8")
    run.submitted(0).unlink()
    record = json.loads((SAMPLES / "submitting.json").read_text())
    write_json(run.submitting(0), {**record, "token": f"toolkit:{run.run_id}:0", "absent_since": 1.0})
    slurm()
    told = explain(toolkit, run.run_id)
    assert (told["state"], told["symptom"]) == ("lost", "submission_broken")
    assert told["why"].startswith("the submission of start 0 was interrupted")
    assert [one["line"] for one in told["evidence"]] == [told["why"]]
    assert "it has never started" in told["actions"][0]
    assert "toolkit resume" in told["actions"][0]


def test_the_log_of_a_run_is_read_although_its_cluster_is_gone(toolkit, slurm):
    run = submitted(toolkit, "8")
    (run.path / "slurm-8.out").write_text(f"{OUT_OF_MEMORY}\n")
    slurm(silent="squeue: error: Unable to contact slurm controller")
    told = explain(toolkit, run.run_id)
    assert (told["state"], told["symptom"]) == ("unknown", "no_answer")
    assert told["why"].endswith("; its log reports that the job used more memory than was allocated to it")
    assert {"source": "slurm-8.out", "line": OUT_OF_MEMORY} in told["evidence"]


def test_an_array_of_which_slurm_says_nothing_does_not_run(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    slurm(silent="squeue: error: Unable to contact slurm controller")
    told = explain(toolkit, run.run_id)
    assert (told["state"], told["symptom"], told["follows"]) == ("unknown", "no_answer", "unknown")
    assert "Unable to contact" in told["why"]


def test_an_array_that_is_being_cancelled_does_not_go_on_to_its_end(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    (run.control / "cancel").touch()
    slurm(("8_0", "RUNNING", "None", "node1"), ("8_1", "RUNNING", "None", "node1"))
    told = explain(toolkit, run.run_id)
    assert (told["state"], told["symptom"], "go on to their ends" in told["follows"]) == (
        "cancelling",
        "cancelling",
        False,
    )


def test_a_task_that_was_cancelled_with_its_array_was_cancelled_by_toolkit(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    (run.control / "cancel").write_text("2026-11-21T02:48:01.000Z\n")
    slurm(("8_[0-1]", "CANCELLED", "None"))
    told = explain(toolkit, f"{run.run_id}_1")
    assert (told["symptom"], sources(told)) == ("cancelled", {"control/cancel"})
    assert "2026-11-21T02:48:01.000Z" in told["why"]
    make_task(run, 0)
    (run.control / "cancel").unlink()
    assert explain(toolkit, f"{run.run_id}_1")["symptom"] == "cancelled_by_other"


def test_a_job_that_slurm_cancelled_for_its_memory_was_cancelled_by_nobody(toolkit, slurm):
    run = submitted(toolkit, "8")
    slurm(("8", "CANCELLED", "None", "node1"))
    log = run.path / "slurm-8.out"
    log.write_text("MemoryError\n")
    assert explain(toolkit, run.run_id)["symptom"] == "cancelled_by_other"
    log.write_text("[2026-11-24T06:46:43.016] error: Exceeded job memory limit\ntoolkit: SIGTERM\n")
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], "slurm-8.out" in sources(told)) == ("out_of_memory", True)


def test_why_a_job_waits_is_told_although_sinfo_says_nothing(toolkit, slurm):
    run = submitted(toolkit, "8")
    slurm(("8", "PENDING", "Resources"))
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], sources(told)) == ("pending_Resources", {"squeue"})


def test_a_node_is_taken_out_of_w_only_where_one_stands(toolkit, slurm):
    run = submitted(toolkit, "8")
    slurm(("8", "PENDING", "ReqNodeNotAvail, Reserved for maintenance"))
    (action,) = explain(toolkit, run.run_id)["actions"]
    assert "`scontrol show reservation`" in action and "-t" in action and "-w" not in action
    slurm(("8", "PENDING", "ReqNodeNotAvail, UnavailableNodes:node3", "", "node3"))
    (action,) = explain(toolkit, run.run_id)["actions"]
    assert "-w" in action


def test_who_knows_of_a_run_on_another_host(toolkit, slurm):
    run = toolkit.submit(toolkit.job("true", name="there"))
    toolkit.ok("wait", run.run_id)
    claim = json.loads((run.start(0) / "claim.json").read_text())
    write_json(run.start(0) / "claim.json", {**claim, "host": "elsewhere"})
    run.attempt(0).exit_file.unlink()
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], told["actions"]) == ("no_answer", [f"on elsewhere: `toolkit explain {run.run_id}`"])


NODE_FAILED = "slurmstepd: error: *** JOB 8 ON node1 CANCELLED AT 2026-11-21T02:48:01 DUE TO NODE FAILURE ***"


def mark(restart, job="8"):
    return f"toolkit: job {job} begins (restart {restart})"


def test_only_the_last_life_of_a_requeued_job_explains_its_end(toolkit, slurm):
    """The log is appended to: a life that was killed may have left half a line."""
    run = submitted(toolkit, "8")
    for _ in range(2):
        claim_start(run, first=0, job_id="8", host="node1", pid=1, process_started=1)
    log = run.path / "slurm-8.out"
    slurm(("8", "FAILED", "NonZeroExitCode", "node1", "", "1"))
    lives = [mark(0), NODE_FAILED, OUT_OF_MEMORY, "toolkit: half a li" + mark(1), "toolkit: attempt 1 begins"]
    log.write_text("\n".join(lives) + "\n")
    told = explain(toolkit, run.run_id)
    assert told["symptom"] in ("supervisor_failed", "supervisor_lost")
    assert {"source": "slurm-8.out", "line": "toolkit: attempt 1 begins"} in told["evidence"]
    log.write_text(f"{OUT_OF_MEMORY}\n")  # of a script that printed no mark
    assert explain(toolkit, run.run_id)["symptom"] == "out_of_memory"


@pytest.mark.parametrize("log", [[mark(0), OUT_OF_MEMORY, mark(1), OUT_OF_MEMORY], None])
def test_a_life_that_slurm_never_began_is_not_that_of_a_lost_supervisor(toolkit, slurm, log):
    run = submitted(toolkit, "8")
    for _ in range(2):
        claim_start(run, first=0, job_id="8", host="node1", pid=1, process_started=1)
    if log is not None:
        (run.path / "slurm-8.out").write_text("\n".join(log) + "\n")
    slurm(("8", "FAILED", "NonZeroExitCode", "node1", "", "2"))
    told = explain(toolkit, run.run_id)
    assert (told["symptom"], "restart 2" in told["why"], sources(told)) == ("never_began", True, {"squeue"})
    assert told["actions"][0].startswith(f"`toolkit resume {run.run_id}`")
    slurm(("8", "FAILED", "NonZeroExitCode", "node1", "", "1"))
    assert explain(toolkit, run.run_id)["symptom"] != "never_began"


def attempted(run, number, *, cause, final=False, **more):
    """An attempt that lasted from 02:00 to 03:00 of its number's day."""
    (run.attempts / f"{number:03}").mkdir()
    attempt, day = run.attempt(number), f"2026-11-{number + 1:02}"
    begun, end = (json.loads((SAMPLES / f"attempt_{name}.json").read_text()) for name in ("start", "exit"))
    write_json(attempt.start_file, {**begun, "start": 0, "job_id": "8", "time": f"{day}T02:00:00.000Z"})
    plain = {
        "rank": None,
        "host": None,
        "evidence": [],
        "last_lines": [],
        "symptom": cause,
        "reason": f"ended on request ({cause})",
    }
    told = {**end, **plain, "cause": cause, "final": final, "next": "end" if final else "await_slurm", **more}
    write_json(attempt.exit_file, {**told, "time": f"{day}T03:00:00.000Z"})


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=list(ENDINGS))
def test_what_budget_ended_a_run_is_told_of_each_cause_that_has_one(toolkit, slurm, ending):
    run = submitted(toolkit, "8")
    claim_start(run, first=0, job_id="8", host="node1", pid=1, process_started=1)
    decision = f"restart.{ending.budget} = 0 is spent"
    attempted(run, 0, cause=ending.cause, final=True, state=ending.final_state, decision=decision)
    slurm(("8", "FAILED", "None", "node1"))
    assert explain(toolkit, run.run_id)["follows"] == (f"nothing by itself ({decision})" if ending.budget else "")


def test_a_requeue_that_was_asked_for_is_no_preemption_by_others(toolkit, slurm):
    run = submitted(toolkit, "8")
    claim_start(run, first=0, job_id="8", host="node1", pid=1, process_started=1)
    attempted(run, 0, cause="preempted", step=None)
    slurm(("8", "RUNNING", "None", "node1"))
    assert explain(toolkit, run.run_id)["why"] == "Slurm preempted it"
    (run.control / "requeue").write_text("2026-11-01T02:30:00.000Z\n2026-11-01T04:00:00.000Z\n")
    asked = "requested with `toolkit requeue` at 2026-11-01T02:30:00.000Z"
    assert explain(toolkit, run.run_id)["why"] == asked
    slurm(("8", "PENDING", "BeginTime", "", "", "1"))
    assert f"it was requeued ({asked})" in explain(toolkit, run.run_id)["why"]
    attempted(run, 1, cause="preempted", step=4)  # by other jobs, a day later
    assert "(preempted)" in explain(toolkit, run.run_id)["why"]
    (run.attempts / "002").mkdir()
    slurm(("8", "RUNNING", "None", "node1", "", "2"))
    lines = [one["line"] for one in explain(toolkit, run.run_id)["evidence"]]
    assert lines == [f"preempted: {asked}", "preempted at step 4: ended on request (preempted)"]


def test_a_rehearsal_explains_its_own_attempt_and_the_next_one_while_it_lives(toolkit, slurm):
    run = submitted(toolkit, "8")
    claim_start(run, first=0, job_id="8", host="node1", pid=1, process_started=1)
    slurm(("8", "RUNNING", "None", "node1"))
    word = json.loads((SAMPLES / "rehearsed.json").read_text())

    def is_quoted():
        return "attempts/000/rehearsed.json" in sources(explain(toolkit, run.run_id))

    attempted(run, 0, cause="preempted")
    write_json(run.attempt(0).rehearsed, word)
    assert is_quoted()
    (run.attempts / "001").mkdir()
    assert is_quoted()
    (run.attempts / "001").rmdir()
    attempted(run, 1, cause="preempted")
    assert not is_quoted()
    (run.attempts / "002").mkdir()
    assert not is_quoted()


def test_a_job_that_may_not_be_requeued_is_not_put_to_slurm(toolkit, slurm, fake_slurm):
    run = submitted(toolkit, "8", "--set", "job.requeue=false")
    fake_slurm.respond("scontrol")
    slurm(("8", "RUNNING", "None", "node1"))
    said = toolkit("requeue", run.run_id)
    assert (said.code, "job.requeue is false" in said.err, f"`toolkit stop {run.run_id}`" in said.err) == (
        1,
        True,
        True,
    )
    assert not (run.control / "requeue").exists()
    other = submitted(toolkit, "9", name="other")
    slurm(("9", "RUNNING", "None", "node1"))
    toolkit.ok("requeue", other.run_id)
    toolkit.ok("requeue", other.run_id)
    assert len((other.control / "requeue").read_text().split()) == 2


def test_what_failed_of_an_array_is_resumed_at_once(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-1")
    for task in (make_task(run, 0), make_task(run, 1)):
        number = task.task_number
        claim_start(task, first=0, job_id=f"8_{number}", host="node1", pid=1, process_started=1)
        end_start(task, 0, state="failed", exit_code=1)
        attempted(task, 0, cause="crashed", final=True, state="failed" if number else "completed")
    slurm()
    told = explain(toolkit, run.run_id)
    again = f"`toolkit resume {run.run_id}` resumes the tasks that have not completed"
    assert (told["symptom"], told["actions"][-1]) == ("tasks_failed", again)
    assert f"{run.run_id}_1`" in told["actions"][0]


def test_the_failures_that_are_not_shown_are_counted(toolkit, slurm):
    run = submitted(toolkit, "8", "-a", "0-3")
    for number in range(4):
        task = make_task(run, number)
        claim_start(task, first=0, job_id=f"8_{number}", host="node1", pid=1, process_started=1)
        end_start(task, 0, state="failed", exit_code=1)
        attempted(task, 0, cause="crashed", final=True, state="failed")
    slurm()
    evidence = [one["line"] for one in explain(toolkit, run.run_id)["evidence"]]
    assert len(evidence) == 4
    assert evidence[-1] == f"1 more task not completed; `toolkit status {run.run_id} --tasks` lists all"
