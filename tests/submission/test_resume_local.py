"""Resume: another shape, other values, a named checkpoint, the next start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from whole_checkpoints import make_whole_checkpoint

from toolkit.metrics.training import TrainRecord
from toolkit.metrics.validation import ValidationRecord

# A job that shows its shape and settings, and saves nothing.
SHOW = 'cat $TOOLKIT_RESOLVED_JOB > "$TOOLKIT_RUN_DIR/seen-$TOOLKIT_ATTEMPT.json"; echo ranks $TOOLKIT_WORLD_SIZE'


@pytest.fixture
def ended(toolkit):
    """A run of one rank that has completed."""
    run = toolkit.submit(toolkit.job(SHOW))
    assert toolkit("wait", run.run_id).code == 0
    return run


def checkpoints(run, *steps: int) -> list[str]:
    for step in steps:
        make_whole_checkpoint(run.checkpoints, step)
    return names(run)


def names(run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def seen(run, attempt: int) -> dict:
    return json.loads((run.path / f"seen-{attempt}.json").read_text())


def test_shape_and_values_change_and_starts_count_up(toolkit, ended) -> None:
    (ended.control / "cancel").touch()
    (ended.control / "stop").touch()
    said = toolkit("resume", "last", "-n", 2, "--set", "train.steps=7", "--wait")
    assert said.code == 0, said
    assert toolkit.ok("logs", "--rank", 1) == "ranks 2\n"
    assert seen(ended, 1)["train"]["steps"] == 7
    assert not list(ended.control.iterdir())
    assert toolkit("resume", "last", "--wait").code == 0
    assert ended.start_numbers() == [0, 1, 2]
    assert "export TOOLKIT_START=2\n" in ended.script(2).read_text()
    assert seen(ended, 2)["train"]["steps"] == 7  # what a resume changed stays changed
    assert json.loads(toolkit.ok("status", "--json"))["ranks"] == 2


def test_a_completed_script_says_how_it_is_resumed(toolkit, ended) -> None:
    said = toolkit("resume", "last", "--wait").err
    assert (
        f"run {ended.run_id} had completed; it now starts again and must restore any state that it saved itself, in the same folder"
        in said
    )
    assert f"`toolkit rerun {ended.run_id}` repeats it" in said
    checkpoints(ended, 10)
    assert (
        "had completed; it now continues from step-00000010, in the same folder"
        in toolkit("resume", "last", "--wait").err
    )


def test_ranks_in_all_are_divided_by_the_nodes_that_a_setting_gives(toolkit, ended) -> None:
    said = toolkit("resume", "last", "--set", "job.nodes=2", "-n", 7)
    assert (said.code, "7 ranks are not divisible by 2 nodes" in said.err, "-n 6 or 8" in said.err) == (2, True, True)


def test_from_a_named_checkpoint(toolkit, ended) -> None:
    checkpoints(ended, 10, 20, 30)
    said = toolkit("resume", "last", "--from", "20", "--wait")
    assert said.code == 0, said
    assert names(ended) == ["step-00000010", "step-00000020", "step-00000030.aside-001"]
    assert "renamed step-00000030 to step-00000030.aside-001" in said.err
    assert seen(ended, 1)["checkpoint"]["source"] == str(ended.checkpoints / "step-00000020")
    toolkit.ok("resume", "last", "--wait")
    assert seen(ended, 2)["checkpoint"]["source"] == ""  # only that one resume began there


def test_a_run_that_began_with_anothers_weights_goes_on_from_its_own_with_everything(toolkit) -> None:
    source = make_whole_checkpoint(toolkit.folder / "old", 900)
    taken = f'[checkpoint]\nsource = "{source}"\ntake = "weights"\nwithout = ["head"]\n'
    run = toolkit.submit(toolkit.job(SHOW, more=taken))
    assert toolkit("wait", run.run_id).code == 0
    checkpoints(run, 10)
    toolkit.ok("resume", "last", "--wait")
    assert (seen(run, 1)["checkpoint"]["take"], seen(run, 1)["checkpoint"]["without"]) == ("weights", ["head"])
    toolkit.ok("resume", "last", "--from", "10", "--wait")
    assert (seen(run, 2)["checkpoint"]["take"], seen(run, 2)["checkpoint"]["without"]) == ("all", [])


def test_from_behind_a_symbolic_link(toolkit, ended) -> None:
    checkpoints(ended, 10, 20)
    link = toolkit.folder / "link"
    link.symlink_to(toolkit.runs)
    assert toolkit("resume", "last", "--runs", link, "--from", "step-00000010", "--wait").code == 0
    assert names(ended) == ["step-00000010", "step-00000020.aside-001"]


def test_from_another_runs_checkpoint(toolkit, ended) -> None:
    checkpoints(ended, 10)
    other = make_whole_checkpoint(toolkit.folder, 500)
    assert toolkit("resume", "last", "--from", other, "--wait").code == 0
    assert names(ended) == ["step-00000010.aside-001"]


def test_unknown_checkpoints_name_those_that_exist(toolkit, ended) -> None:
    before = checkpoints(ended, 10, 20)
    said = toolkit("resume", "last", "--from", 15)
    assert said.code == 4 and "step-00000010, step-00000020" in said.err
    assert names(ended) == before and ended.start_numbers() == [0]


def test_a_wrong_value_changes_nothing(toolkit, ended) -> None:
    checkpoints(ended, 10, 20)
    said = toolkit("resume", "last", "-N", 2, "--from", 10)
    assert (said.code, "-N 1" in said.err) == (2, True)
    assert names(ended) == ["step-00000010", "step-00000020"]
    assert not list(ended.path.glob("resumed-*"))


def test_what_the_scheduler_refused_does_not_last(toolkit, ended, monkeypatch) -> None:
    from toolkit.errors import SchedulerRefusedError
    from toolkit.submission import next_start

    def refuse(*_: object, **__: object) -> None:
        raise SchedulerRefusedError("sbatch: no")

    with monkeypatch.context() as patch:
        patch.setattr(next_start, "submit", refuse)
        assert toolkit("resume", "last", "-n", 4).code == 3
        before = checkpoints(ended, 10, 20, 30)
        said = toolkit("resume", "last", "--from", 10)
    assert (said.code, names(ended)) == (3, before)
    assert "renamed step-00000030.aside-001 back to step-00000030" in said.err
    assert json.loads(toolkit.ok("status", "--json"))["ranks"] == 1
    assert toolkit("resume", "last", "--wait").code == 0


def test_a_site_that_was_named_by_its_file(toolkit, monkeypatch) -> None:
    path = toolkit.folder / "mine.toml"
    path.write_text('name = "mine"\nextends = "local"\n[env]\nvars = { MINE = "yes" }\n')
    monkeypatch.delenv("TOOLKIT_SITE")
    run = toolkit.submit(toolkit.job("echo $MINE"), "--site", path)
    toolkit.ok("wait", run.run_id)
    assert toolkit("resume", run.run_id, "--wait").code == 0
    assert toolkit.ok("logs", "--rank", 0) == "yes\n"


def test_of_two_resumes_at_the_same_time_one_is_refused(toolkit, ended) -> None:
    from toolkit.submission.resume import prepare_resume, undo_resume

    checkpoints(ended, 10, 20)
    prepared = prepare_resume(ended)  # the other one is about to submit
    script = ended.script(1).read_text()
    said = toolkit("resume", "last", "--from", 10, "-n", 2)
    assert (said.code, "start 1 of run" in said.err, "by another resume" in said.err) == (1, True, True)
    assert ended.script(1).read_text() == script
    assert names(ended) == ["step-00000010", "step-00000020"]
    undo_resume(prepared)
    assert toolkit("resume", "last", "--wait").code == 0


def test_a_resume_after_a_start_by_hand_is_the_newest_job(toolkit) -> None:
    """The first start has no submitted-000.json: somebody gave the script to the scheduler by hand."""
    import subprocess

    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    subprocess.run(
        ["bash", path / "job.sbatch"], env={**os.environ, "TOOLKIT_LOCAL": "1"}, check=True, stdout=subprocess.DEVNULL
    )
    assert "completed" in toolkit.ok("status")
    job_id = toolkit.ok("resume", "last", "--parsable").partition(";")[0]
    assert toolkit("wait", "last").code == 0
    assert json.loads(toolkit.ok("status", "--json"))["job_id"] == job_id
    assert Path(path / "submitted-001.json").exists()


def test_from_a_damaged_checkpoint_is_refused_before_newer_ones_are_set_aside(toolkit, ended) -> None:
    before = checkpoints(ended, 10, 20)
    (ended.checkpoints / "step-00000010" / "manifest.json").write_text("{}")
    said = toolkit("resume", "last", "--from", "10")
    assert (said.code, names(ended)) == (2, before)
    assert "--from: " in said.err and "step-00000010 is damaged: manifest.json: is not a valid manifest" in said.err
    assert ended.start_numbers() == [0]


def records(run, step: int, *, steps: int) -> None:
    """What the training loop leaves of its last step."""
    record = TrainRecord(
        step, steps, loss=1.0, loss_hex=1.0.hex(), lr=0.1, grad_norm=1.0, samples=step, tokens=step, seconds=1.0,
        tokens_per_s=1.0, time="2026-11-20T14:22:33Z", attempt=0, world=1,
    )  # fmt: skip
    (run.metrics / "train.jsonl").write_text(record.to_line() + "\n")


def test_a_resume_with_no_step_left_is_refused_with_a_number_that_is_accepted(toolkit, ended) -> None:
    before = checkpoints(ended, 10, 20)
    said = toolkit("resume", "last", "--set", "train.steps=20")
    assert (said.code, said.out, names(ended)) == (1, "", before)
    place = "toolkit: --set train.steps=20:train.steps: "
    assert said.err == (
        f"{place}run {ended.run_id} is at step 20, and train.steps is 20: no steps remain. "
        f"Fix: `toolkit resume {ended.run_id} --set train.steps=40` adds 20 steps; --from CKPT repeats earlier ones\n"
    )
    assert not list(ended.path.glob("resumed-*"))
    assert toolkit("resume", "last", "--set", "train.steps=20", "--from", 10, "--wait").code == 0
    checkpoints(ended, 20)
    assert "--set train.steps=20:train.steps at the last start: run " in toolkit("resume", "last").err
    assert toolkit("resume", "last", "--set", "train.steps=40", "--wait").code == 0


def test_a_completed_run_whose_records_ended_at_its_steps_has_none_left(toolkit, ended) -> None:
    checkpoints(ended, 1000)
    toolkit.ok("resume", "last", "--wait")  # no word of train.steps: a script may count by itself
    records(ended, 1000, steps=1000)
    said = toolkit("resume", "last")
    assert (said.code, "is at step 1000, and train.steps is 1000: no steps remain" in said.err) == (1, True)
    assert "toolkit: train.steps: " in said.err
    (ended.checkpoints / "step-00001000" / "manifest.json").write_text("{}")  # then ranks take an older one
    assert toolkit("resume", "last", "--wait").code == 0


def test_a_run_that_failed_behind_its_last_step_is_resumed_with_a_word(toolkit) -> None:
    run = toolkit.submit(toolkit.job("exit 3", more="[train]\nsteps = 10\n[restart]\ncrashes = 0\n"))
    assert toolkit("wait", run.run_id).code == 3
    checkpoints(run, 10)
    said = toolkit("resume", "last")
    assert (said.code, "has completed all 10 steps; only the work after the last step remains" in said.err) == (0, True)
    toolkit("wait", run.run_id)


def test_an_attempt_without_a_step_stands_at_the_newest_checkpoint(toolkit, ended) -> None:
    assert json.loads(toolkit.ok("status", "--json"))["step"] is None
    checkpoints(ended, 10, 2500)
    assert json.loads(toolkit.ok("status", "--json"))["step"] == 2500


def test_a_run_that_stopped_early_says_so_and_goes_on_with_more_patience_alone(toolkit) -> None:
    settings = "[train]\nsteps = 12\nvalidate_every = 2\nearly_stop_patience = 2\n"
    run = toolkit.submit(toolkit.job(SHOW, more=settings))
    assert toolkit("wait", run.run_id).code == 0
    stop = {"best": 2.5, "best_step": 2, "waited": 2}
    make_whole_checkpoint(run.checkpoints, 2, state={"extra": {"early_stop": stop | {"waited": 0}}})
    make_whole_checkpoint(run.checkpoints, 6, state={"extra": {"early_stop": stop}})
    records(run, 6, steps=12)
    why = "the last 2 validations did not improve on 2.5000 of step 2"
    last = ValidationRecord(6, 10, {"loss": 2.75}, average=False, time="", attempt=0, stopped=why)
    (run.metrics / "validation.jsonl").write_text(last.to_line() + "\n")
    words = f"validated at step 6: loss 2.7500; stopped early: {why}"
    assert toolkit.ok("status").endswith(f"; {words}\n")
    assert json.loads(toolkit.ok("status", "--json"))["validation"] == json.loads(last.to_line())
    explained = toolkit.ok("explain")
    assert f"metrics/validation.jsonl: {words}\n" in explained
    assert f"`toolkit resume {run.run_id} --set train.early_stop_patience=4` continues with more patience" in explained
    said = toolkit("resume", "last", "--set", "train.steps=20")
    assert (said.code, said.out) == (1, "")
    assert "stopped early at step 6: no improvement in 2 validations, and train.early_stop_patience is 2" in said.err
    assert (
        f"Fix: `toolkit resume {run.run_id} --set train.early_stop_patience=4` allows 2 more, 0 any number" in said.err
    )
    toolkit.ok("resume", "last", "--wait", "--set", "train.early_stop_patience=3")
    toolkit.ok("resume", "last", "--wait", "--set", "train.early_stop_patience=2", "--from", 2)


def test_arguments_after_the_dashes_are_those_of_the_new_start(toolkit):
    """nanoGPT would begin again, and overwrite its checkpoint, if it were not told --init_from=resume."""
    (toolkit.folder / "show.py").write_text("import sys; print('got', *sys.argv[1:])\n")
    job = toolkit.folder / "show.toml"
    job.write_text('[job]\nentry = "show.py"\nargv = ["config.py"]\n')
    run = toolkit.submit(job, "--", "--init_from=scratch")
    assert toolkit("wait", run.run_id).code == 0
    for words, expected in ((["--", "--init_from=resume"], "--init_from=resume"), ([], "--init_from=resume")):
        toolkit.ok("resume", run.run_id, "--wait", *words)
        assert f"got config.py {expected}" in toolkit.ok("logs", run.run_id, "--rank", 0)
    said = toolkit("resume", run.run_id, "--wait", "--", "--other")
    assert "the arguments after `--` are now --other, no longer --init_from=resume" in said.err
    cleared = toolkit("resume", run.run_id, "--wait", "--")
    assert "the arguments after `--` are now none, no longer --other" in cleared.err
    assert toolkit.ok("logs", run.run_id, "--rank", 0).splitlines()[-1].endswith("got config.py")
    assert toolkit("resume", run.run_id, "--init_from=other").code == 2
    assert "unexpected argument 'word'; write `--` before" in toolkit("resume", run.run_id, "word").err
    assert json.loads(run.record.read_text())["job"]["argv"] == ["--init_from=scratch"]
    assert json.loads(run.resumed(1).read_text())["job"]["argv"] == ["--init_from=resume"]
