"""`toolkit gc`: what goes, what never goes, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import time
from io import StringIO
from pathlib import Path

import pytest
from queued_runs import claim, end_attempt, submitted

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.layout import create_run, make_task
from toolkit.slurm.submit import _SEPARATOR, token_of

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")
DAY_S = 86400.0


def age(run, days):
    """Let nothing of a run be newer than some days."""
    then = time.time() - days * DAY_S
    for folder, _, files in os.walk(run.path, topdown=False):
        for name in [*files, ""]:
            os.utime(Path(folder) / name, (then, then))
    return run


@pytest.fixture
def comments(fake_slurm):
    """Set what squeue prints for every query, line by line."""
    return lambda *lines: fake_slurm.respond("squeue", "".join(f"{line}\n" for line in lines))


def ended(toolkit, job_id, name, **more):
    run = submitted(toolkit, job_id, name)
    claim(run, job_id=job_id)
    end_attempt(run, state="failed", exit_code=4, **more)
    return run


def rendered(toolkit, name):
    toolkit.ok("render", toolkit.job("true", name=name), "--site", "devcluster")
    (path,) = toolkit.runs.glob(f"{name}/*")
    return toolkit.run(path.name)


def going(toolkit, *options):
    told = json.loads(toolkit.ok("gc", "--dry-run", "--json", *options))
    return {(one["run_id"], one["why"]) for one in told}


def test_what_never_started_goes_after_an_hour(toolkit, comments):
    comments()
    fresh, old = rendered(toolkit, "fresh"), age(rendered(toolkit, "old"), 1)
    broken = create_run(toolkit.runs, "broken")
    assert going(toolkit) == {(old.run_id, "created, but never started")}
    age(broken, 1)
    said = toolkit("gc")
    assert said.code == 2 and "no terminal to confirm it" in said.err and "old/" in said.out and old.path.exists()
    told = toolkit.ok("gc", "--yes")
    assert " in 2 folders below " in told and "its creation was interrupted" in told
    assert (fresh.path.exists(), old.path.exists(), broken.path.exists()) == (True, False, False)
    assert not old.path.parent.exists()
    assert toolkit.ok("gc").startswith("0 bytes in 0 folders")


def test_what_ended_within_the_hour_stays_and_is_counted(toolkit, squeue):
    run = ended(toolkit, "7", "bad")
    age(run, 0.5 / 24)
    said = toolkit("gc", "--older-than", "0d", "--yes")
    assert said.out.startswith("0 bytes in 0 folders") and run.path.exists()
    assert "kept, because they changed within the last hour: 1 run that ended" in said.err
    assert toolkit("gc", "--older-than", "1d", "--yes").err == ""  # it is younger than was asked


def test_what_was_given_to_sbatch_by_hand_stays(toolkit, comments, fake_slurm):
    run = age(rendered(toolkit, "by_hand"), 1)
    comments(f"7{_SEPARATOR}{token_of(run.run_id, 0)}")
    assert going(toolkit) == set()
    fake_slurm.respond("squeue", stderr="slurm_load_jobs error\n", code=1)
    said = toolkit("gc", "--dry-run")
    assert (
        said.out.startswith("0 bytes in 0 folders")
        and "kept, because Slurm does not report" in said.err
        and run.run_id in said.err
    )


def test_leftovers_of_saves_go_and_the_living_are_left_alone(toolkit, squeue):
    squeue(("8", "RUNNING", "None"))
    runs = [ended(toolkit, "7", "bad"), submitted(toolkit, "8", "lives")]
    for run in runs:
        for name in ("step-00000001", "step-00000002.part-0-7", "step-00000003.bad-0", "step-00000004.aside-0"):
            (run.checkpoints / name).mkdir()
            (run.checkpoints / name / "shard").write_bytes(bytes(1000))
        age(run, 1)
    told = json.loads(toolkit.ok("gc", "--yes", "--json"))
    assert [(one["run_id"], one["size_bytes"]) for one in told] == [(runs[0].run_id, 1000)] * 2
    assert sorted(path.name for path in runs[0].checkpoints.iterdir()) == ["step-00000001", "step-00000004.aside-0"]
    assert len(list(runs[1].checkpoints.iterdir())) == 4


def test_old_runs_go_on_request_and_never_what_another_run_begins_from(toolkit, squeue):
    squeue(("9", "RUNNING", "None"))
    first, second, plain, saved = (ended(toolkit, str(number), f"job{number}") for number in range(1, 5))
    third = submitted(toolkit, "9", "third")
    for begins, source in ((second, first), (third, second)):
        record = json.loads(begins.record.read_text())
        record["job"]["checkpoint"]["source"] = str(source.checkpoints / "step-00000001")
        begins.record.write_text(json.dumps(record))
    (saved.checkpoints / "step-00000001").mkdir()
    for run in (first, second, third, plain, saved):
        age(run, 40)
    assert going(toolkit) == set() == going(toolkit, "--older-than", "41d")
    assert going(toolkit, "--older-than", "30d") == {(run.run_id, "failed 40 days ago") for run in (plain, saved)}
    assert going(toolkit, "--older-than", "30d", "--keep-checkpoints") == {(plain.run_id, "failed 40 days ago")}
    toolkit.ok("gc", "--older-than", "30d", "--yes")
    assert [run.path.exists() for run in (first, second, third, plain, saved)] == [True] * 3 + [False] * 2
    shutil.rmtree(third.path)
    assert {run_id for run_id, _ in going(toolkit, "--older-than", "30d")} == {first.run_id, second.run_id}


def test_a_run_that_lives_again_before_its_turn_stays(toolkit, squeue, monkeypatch):
    squeue(("9", "RUNNING", "None"))
    run = age(ended(toolkit, "7", "bad"), 40)
    import toolkit.cli.doctor as command
    from toolkit.runs.status.reconcile_submission import close_submission

    monkeypatch.setattr(command, "_ask", lambda found, yes: close_submission(run, 1, "9"))
    said = toolkit("gc", "--older-than", "1d")
    assert said.code == 1 and "is running again, so it is not removed" in said.err and run.record.exists()


def test_what_lies_beside_a_kept_checkpoint_goes_and_tasks_count(toolkit, squeue):
    squeue()
    whole, array = ended(toolkit, "7", "whole"), ended(toolkit, "8", "array")
    task = make_task(array, 3)
    for part in (whole, task):
        for name in ("step-00000001", "step-00000002.part-0-7"):
            (part.checkpoints / name).mkdir()
    for run in (whole, array):
        age(run, 40)
    saves = {(run.run_id, "an interrupted save") for run in (whole, array)}
    assert going(toolkit) == saves == going(toolkit, "--older-than", "30d", "--keep-checkpoints")
    assert len(going(toolkit, "--older-than", "30d")) == 2
    os.utime(whole.checkpoints / "step-00000002.part-0-7")  # somebody is writing it
    assert {run_id for run_id, _ in going(toolkit)} == {array.run_id}
    os.utime(task.path)
    assert going(toolkit) == set() and {run_id for run_id, _ in going(toolkit, "--older-than", "1d")} == {whole.run_id}
    age(array, 40)
    heartbeat = claim_attempt(task).heartbeat
    heartbeat.touch()
    age(array, 40)
    os.utime(heartbeat)
    assert going(toolkit) == set()


def test_a_run_whose_making_broke_off_stays_where_it_has_begun(toolkit, squeue):
    squeue()
    begun = create_run(toolkit.runs, "begun")
    claim(begun, job_id="7")
    age(begun, 1)
    assert going(toolkit) == set()


def test_a_resume_names_where_it_begins_and_the_environment_names_nothing(toolkit, squeue):
    squeue(("9", "RUNNING", "None"))
    source, noted = ended(toolkit, "1", "source"), ended(toolkit, "2", "noted")
    living = submitted(toolkit, "9", "living")
    living.resumed(1).write_text(json.dumps({"job": {"checkpoint": {"source": str(source.checkpoints)}}}))
    record = json.loads(living.record.read_text())
    living.record.write_text(json.dumps({**record, "environment": {"NOTE": noted.run_id}}))
    for run in (source, noted):
        age(run, 40)
    assert {run_id for run_id, _ in going(toolkit, "--older-than", "30d")} == {noted.run_id}


def test_what_cannot_be_removed_is_said_and_is_no_half_run(toolkit, squeue, monkeypatch):
    squeue()
    run = age(ended(toolkit, "7", "bad"), 40)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path / "held"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        said = toolkit("gc", "--older-than", "1d", "--yes")
    assert said.code == 1 and "held: cannot be removed: Permission denied. Fix: ask the owner" in said.err
    assert not run.path.exists() and run.path.with_name(f".removing-{run.run_id}").exists()


def test_what_somebody_else_removed_meanwhile_is_no_failure(toolkit, squeue, monkeypatch):
    squeue()
    runs = [age(ended(toolkit, str(number), f"job{number}"), 40) for number in (7, 8)]
    monkeypatch.setattr("toolkit.cli.doctor._ask", lambda found, yes: shutil.rmtree(found[0].path / "checkpoints"))
    monkeypatch.setattr(Path, "rename", _without(runs[1], Path.rename))
    assert toolkit("gc", "--older-than", "1d").code == 0 and not runs[0].path.exists()


def _without(run, rename):
    def renamed(path, target):
        if path == run.path:
            shutil.rmtree(path)
        return rename(path, target)

    return renamed


def test_a_run_of_this_host_that_never_started(toolkit, squeue):
    squeue()
    toolkit.ok("render", toolkit.job("true", name="here"))
    (path,) = toolkit.runs.glob("here/*")
    run = age(toolkit.run(path.name), 1)
    assert going(toolkit) == {(run.run_id, "created, but never started")}


def test_no_takes_no_for_an_answer(toolkit, squeue, monkeypatch):
    squeue()
    run = age(ended(toolkit, "7", "bad"), 40)
    run.revived_marker.touch()
    for answer, stays in (("n\n", True), ("y\n", False)):
        keyboard = StringIO(answer)
        keyboard.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", keyboard)
        said = toolkit("gc", "--older-than", "30d")
        assert "Remove 1 folder?" in said.err and run.path.exists() is stays
        assert (said.code == 0) is not stays
    assert not run.revived_marker.exists()
    assert toolkit("gc", "--keep-checkpoints").code == 2


def test_a_removal_that_broke_off_is_ended(toolkit, squeue):
    squeue()
    run = age(ended(toolkit, "7", "bad"), 40)
    run.path.rename(run.path.with_name(f".removing-{run.run_id}"))
    assert going(toolkit) == {(run.run_id, "its removal was interrupted")}
    toolkit.ok("gc", "-y")
    assert not list(toolkit.runs.glob("bad/.*"))
