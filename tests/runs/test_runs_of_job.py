"""The name of a job means its newest run, after every other form of RUN; several unfinished runs are never confused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli import completers
from toolkit.rundir.layout import RunDirectory


@pytest.fixture
def two_runs(toolkit) -> list[RunDirectory]:
    job = toolkit.job("true")
    runs = [toolkit.submit(job, "--wait"), toolkit.submit(job, "--wait")]
    toolkit.ok("render", job)  # was never submitted
    return runs


def path_of(toolkit, name: str) -> str:
    return json.loads(toolkit.ok("status", "--json", name))["path"]


def test_a_name_is_its_newest_submitted_run(toolkit, two_runs) -> None:
    newest = max(two_runs, key=lambda run: run.run_id)
    said = toolkit("status", "--json", "work")
    assert json.loads(said.out)["run_id"] == newest.run_id
    assert f"work is {newest.run_id}, its newest run" in said.err
    assert "has completed" in toolkit.ok("explain", "work")
    again = toolkit.ok("rerun", "work", "--parsable", "--wait").partition(";")[2]
    assert path_of(toolkit, "work").endswith(again.split()[0])
    missing = toolkit("status", "works")
    assert missing.code == 4 and "run 'works' not found" in missing.err and "the name of a job" in missing.err


def test_every_other_form_comes_first(toolkit, two_runs) -> None:
    oldest = min(two_runs, key=lambda run: run.run_id)
    job_id = json.loads(toolkit.ok("status", "--json", oldest.run_id))["job_id"]
    named = toolkit.submit(toolkit.job("true", name=oldest.run_id), "--wait")
    for form in (oldest.run_id, job_id, f"work/{oldest.run_id}"):
        assert path_of(toolkit, form) == str(oldest.path)
    assert path_of(toolkit, "last") == str(named.path)
    toolkit.submit(toolkit.job("true", name="last"), "--wait")
    toolkit.submit(toolkit.job("true"), "--wait")
    assert "/work/" in path_of(toolkit, "last")


def test_other_folders_are_searched_last(toolkit, two_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLKIT_RUNS")
    for name in "elsewhere", "third":
        (toolkit.folder / name).mkdir()
    monkeypatch.chdir(toolkit.folder / "elsewhere")
    assert Path(path_of(toolkit, "work")).parent == toolkit.runs / "work"
    job, second = toolkit.job("sleep 100"), toolkit.folder / "second"
    for folder in (toolkit.runs, second):
        toolkit.ok("submit", job, "--runs", folder)
    running = {folder: RunDirectory(max(folder.glob("work/2*"))) for folder in (toolkit.runs, second)}
    monkeypatch.chdir(toolkit.folder / "third")
    refused = toolkit("cancel", "work")
    assert refused.code == 2 and "work: 2 runs of this name are unfinished" in refused.err
    assert all(run.run_id in refused.err for run in running.values())
    toolkit.ok("cancel", running[toolkit.runs].run_id)
    toolkit("wait", running[toolkit.runs].run_id)
    for command in "status", "cancel":
        refused = toolkit(command, "work")
        assert refused.code == 2 and "work: runs in 2 folders match. Fix: choose one by its path: " in refused.err
        assert all(str(run.path) in refused.err for run in running.values())
    # RUNS comes first.
    monkeypatch.chdir(toolkit.folder)
    assert path_of(toolkit, "work") == str(running[toolkit.runs].path)
    toolkit.ok("cancel", running[second].run_id)


@pytest.mark.parametrize(
    "command", ["stop work", "cancel work", "requeue work", "save work", "resume work", "rehearse work kill-rank 0", "ckpt prune work",
     "alerts ack slow work", "alerts silence slow work --for 2h"]
)  # fmt: skip
def test_what_changes_a_run_refuses_several_unfinished_ones(toolkit, two_runs, command: str) -> None:
    job = toolkit.job("sleep 600")
    running = [toolkit.submit(job), toolkit.submit(job)]
    said = toolkit(*command.split())
    assert said.code == 2 and "work: 2 runs of this name are unfinished. Fix: choose one by its run id: " in said.err
    assert all(run.run_id in said.err for run in running) and two_runs[0].run_id not in said.err
    assert toolkit("status", "work").code == 0


def test_one_unfinished_run_is_cancelled_by_its_name(toolkit, two_runs) -> None:
    running = toolkit.submit(toolkit.job("sleep 600"))
    assert f"run {running.run_id} " in toolkit.ok("cancel", "work")


def test_tab_offers_the_names_of_jobs(toolkit, two_runs) -> None:
    import click

    context = click.Context(click.Command("status"))
    assert [item.value for item in completers.runs(context, "wo")] == ["work"]
