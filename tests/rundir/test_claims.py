"""One start, one supervisor; one attempt number, one life of the ranks."""

import subprocess
import sys
import time

import pytest

from toolkit.errors import OwnFailureError
from toolkit.rundir.claims import claim_attempt, claim_start, end_start, read_claim
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory, make_task


def claim(run, first, job_id):
    return claim_start(run, first=first, job_id=job_id, host="n1", pid=17, process_started=4).start


def test_the_first_claim_takes_the_scripts_own_start(run_directory):
    assert claim(run_directory, 0, "10") == 0
    assert read_claim(run_directory, 0).job_id == "10"


def test_a_requeue_of_the_same_job_takes_the_next_number(run_directory):
    numbers = [claim(run_directory, 0, "10") for _ in range(3)]  # Slurm killed each before it could say "ended"
    assert numbers == [0, 1, 2]


def test_the_same_script_under_another_job_id_is_refused(run_directory):
    claim(run_directory, 0, "10")
    end_start(run_directory, 0, state="completed", exit_code=0)
    with pytest.raises(OwnFailureError, match="belongs to job 10, but this is job 11") as error:
        claim(run_directory, 0, "11")
    assert f"toolkit resume {run_directory.run_id}" in error.value.fix


def test_a_resume_waits_for_the_end_of_the_start_before_it(run_directory):
    claim(run_directory, 0, "10")
    with pytest.raises(OwnFailureError, match=r"start 0 .*job 10.* has not ended") as error:
        claim(run_directory, 1, "11")
    assert "toolkit cancel" in error.value.fix
    end_start(run_directory, 0, state="failed", exit_code=1)
    assert claim(run_directory, 1, "11") == 1


def test_a_lost_start_counts_as_ended(run_directory):
    claim(run_directory, 0, "10")
    write_json(run_directory.start(0) / "lost.json", {})
    assert claim(run_directory, 1, "11") == 1


def test_a_start_that_was_cancelled_in_the_queue_leaves_a_gap(run_directory):
    claim(run_directory, 0, "10")
    end_start(run_directory, 0, state="failed", exit_code=1)
    assert claim(run_directory, 2, "12") == 2


def test_an_older_script_cannot_begin_beside_or_after_a_newer_start(run_directory):
    claim(run_directory, 0, "10")
    end_start(run_directory, 0, state="failed", exit_code=1)
    claim(run_directory, 2, "12")
    with pytest.raises(OwnFailureError, match="start 1 is too late: start 2"):
        claim(run_directory, 1, "11")


def test_a_requeue_of_an_old_job_waits_for_the_newer_start(run_directory):
    claim(run_directory, 0, "10")
    end_start(run_directory, 0, state="failed", exit_code=1)
    claim(run_directory, 1, "11")
    with pytest.raises(OwnFailureError, match=r"start 1 .*has not ended"):
        claim(run_directory, 0, "10")


def test_a_requeue_of_a_job_whose_run_was_resumed_since_is_refused(run_directory):
    """Its script holds the job file of before; the resume may have changed it, and may have ended well."""
    claim(run_directory, 0, "10")
    end_start(run_directory, 0, state="failed", exit_code=1)
    write_json(run_directory.resumed(1), {"job": {}})
    write_json(run_directory.submitted(1), {"job_id": "11"})
    with pytest.raises(
        OwnFailureError, match="requeue of job 10 is too late: the run has since been resumed as start 1"
    ):
        claim(run_directory, 0, "10")  # while the resumed job waits
    claim(run_directory, 1, "11")
    end_start(run_directory, 1, state="completed", exit_code=0)
    with pytest.raises(OwnFailureError, match="is too late"):
        claim(run_directory, 0, "10")
    assert claim(run_directory, 1, "11") == 2  # its own requeue


def test_a_task_that_a_resume_left_out_is_requeued(run_directory):
    tasks = [make_task(run_directory, number) for number in range(2)]
    for task in tasks:
        claim(task, 0, f"10_{task.task_number}")
        end_start(task, 0, state="preempted", exit_code=143)
    write_json(run_directory.resumed(1), {"job": {}})
    write_json(tasks[1].submitted(1), {"job_id": "11"})  # the resume was of task 1 alone
    assert claim(tasks[0], 0, "10_0") == 1
    with pytest.raises(OwnFailureError, match="is too late"):
        claim(tasks[1], 0, "10_1")


def test_a_supervisor_killed_while_claiming_leaves_no_start(run_directory, monkeypatch):
    def killed(*_arguments, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("toolkit.rundir.claims.write_json", killed)
        claim(run_directory, 0, "10")
    assert run_directory.start_numbers() == []
    monkeypatch.setattr("toolkit.rundir.claims.utc_now", lambda: "later")
    assert claim_start(run_directory, first=0, job_id="11", host="n2", pid=18, process_started=5).start == 0


RACE = """
import sys, time
from pathlib import Path
from toolkit.errors import OwnFailureError
from toolkit.rundir.claims import claim_attempt, claim_start
from toolkit.rundir.layout import RunDirectory, make_task
run, name, begin = RunDirectory(Path(sys.argv[1])), sys.argv[2], float(sys.argv[3])
time.sleep(max(0.0, begin - time.time()))
try:
    claim_start(run, first=0, job_id=name, host="n1", pid=int(name), process_started=1)
    print("start")
except OwnFailureError:
    pass
for _ in range(50):
    print(claim_attempt(run).number)
"""


def test_two_supervisors_at_once_never_share_a_start_or_an_attempt(run_directory):
    begin = str(time.time() + 0.5)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(run_directory.path), name, begin], stdout=subprocess.PIPE, text=True
        )
        for name in ("1", "2")
    ]
    told = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    words = told[0] + told[1]
    assert words.count("start") == 1
    assert sorted(int(word) for word in words if word != "start") == list(range(100))
    assert not [path for path in run_directory.starts.iterdir() if path.name.startswith(".")]


def test_a_claim_that_another_wins_after_the_folder_was_listed(run_directory, monkeypatch):
    claim(run_directory, 0, "10")
    claim_attempt(run_directory)
    monkeypatch.setattr(RunDirectory, "start_numbers", lambda _: [])  # as listed a moment before
    monkeypatch.setattr(RunDirectory, "attempt_numbers", lambda _: [])
    with pytest.raises(OwnFailureError, match="was just claimed by another supervisor"):
        claim(run_directory, 0, "11")
    assert read_claim(run_directory, 0).job_id == "10"
    assert [path.name for path in run_directory.starts.iterdir()] == ["000"]
    assert claim_attempt(run_directory).number == 1


def test_unfinished_saves_of_older_attempts_are_fenced_off(run_directory):
    claim_attempt(run_directory)
    for name in (
        "step-00000010",
        "step-00000020.part-0",
        "step-00000020.stale-0",
        "step-00000020.part-0-77",
        "step-00000030.part-1-7",
    ):
        (run_directory.checkpoints / name).mkdir()
    attempt = claim_attempt(run_directory)
    assert attempt.number == 1
    assert sorted(path.name for path in run_directory.checkpoints.iterdir()) == [
        "step-00000010",
        "step-00000020.stale-0",
        "step-00000020.stale-0-2",
        "step-00000020.stale-0-3",
        "step-00000030.part-1-7",  # this attempt's own number
    ]
    with pytest.raises(FileNotFoundError):  # the late commit of a rank that was given up on
        (run_directory.checkpoints / "step-00000020.part-0").rename(run_directory.checkpoints / "step-00000020")


def test_a_save_that_is_committed_while_it_is_fenced_stays_a_checkpoint(run_directory, monkeypatch):
    claim_attempt(run_directory)
    part = run_directory.checkpoints / "step-00000020.part-0"
    monkeypatch.setattr("toolkit.rundir.claims.stale_parts", lambda *_: [part])  # listed, then renamed by its rank
    assert claim_attempt(run_directory).number == 1
