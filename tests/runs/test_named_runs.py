"""Runs are found from every folder: in RUNS first, and then in the known folders."""

from __future__ import annotations

import json

import click
import pytest

from toolkit.cli import completers
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory


@pytest.fixture
def create(toolkit, monkeypatch: pytest.MonkeyPatch):
    """Create a run below `toolkit.folder / name / "runs"` that was submitted as a job; without TOOLKIT_RUNS."""
    monkeypatch.delenv("TOOLKIT_RUNS")
    job = toolkit.job("true")

    def submitted(name: str, job_id: str) -> RunDirectory:
        work_in(toolkit, monkeypatch, name)
        toolkit.ok("render", job)
        run = RunDirectory(max((toolkit.folder / name).glob("runs/work/*")))
        write_json(run.path / "submitted-000.json", {"job_id": job_id})
        return run

    return submitted


def work_in(toolkit, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = toolkit.folder / name
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)


def path_of(toolkit, *names: str) -> str:
    return json.loads(toolkit.ok("status", "--json", *names))["path"]


def test_the_present_folder_takes_precedence(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = create("one", "local-7"), create("two", "local-7")
    work_in(toolkit, monkeypatch, "one")
    assert path_of(toolkit) == path_of(toolkit, "last") == path_of(toolkit, "local-7") == str(first.path)
    assert path_of(toolkit, second.run_id) == path_of(toolkit, f"work/{second.run_id}") == str(second.path)


def test_another_folder_finds_the_newest_run_and_says_where(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    create("one", "local-7"), create("two", "local-8")
    newest = create("one", "local-9")
    work_in(toolkit, monkeypatch, "elsewhere")
    shown = toolkit("status", "last", "--json")
    assert json.loads(shown.out)["run_id"] == newest.run_id
    assert f"last is {newest.run_id} of work in {toolkit.folder}/one/runs" in shown.err
    assert path_of(toolkit, "local-8").startswith(f"{toolkit.folder}/two/runs/")
    assert not (toolkit.folder / "elsewhere" / "runs").exists()


def test_what_no_folder_has_is_not_found_and_the_error_counts_them(toolkit, create) -> None:
    create("one", "local-7"), create("two", "local-8")
    refused = toolkit("status", "local-6")
    assert refused.code == 4 and "no run of job local-6 found; also searched 1 known folder." in refused.err


def test_a_name_in_two_known_folders_is_ambiguous(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = create("one", "local-7"), create("two", "local-7")
    work_in(toolkit, monkeypatch, "elsewhere")
    refused = toolkit("status", "local-7")
    assert refused.code == 2 and "runs in 2 folders match" in refused.err
    assert str(first.path) in refused.err and str(second.path) in refused.err


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_chosen_folder_is_the_only_one(toolkit, create, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    create("one", "local-7")
    only = create("two", "local-8").path.parents[1]
    work_in(toolkit, monkeypatch, "one")
    if by_variable:
        monkeypatch.setenv("TOOLKIT_RUNS", str(only))
    chosen = () if by_variable else ("--runs", str(only))
    assert toolkit("status", "local-7", *chosen).code == 4
    listed = toolkit("history", "--json", *chosen)
    assert [one["job_id"] for one in json.loads(listed.out)] == ["local-8"] and listed.err == ""


def test_history_lists_all_known_folders(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [create("one", "local-7"), create("two", "local-8"), create("one", "local-9")]
    work_in(toolkit, monkeypatch, "two")
    listed = toolkit("history", "--json")
    assert [one["run_id"] for one in json.loads(listed.out)] == [run.run_id for run in reversed(runs)]
    assert f"runs in {toolkit.folder}/two/runs, {toolkit.folder}/one/runs; --runs selects one folder" in listed.err
    assert [one["run_id"] for one in json.loads(toolkit.ok("history", "--json", "-n", "2"))] == [
        run.run_id for run in reversed(runs[1:])
    ]


def test_tab_completes_runs_of_known_folders(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = create("one", "local-7"), create("two", "local-8")
    work_in(toolkit, monkeypatch, "elsewhere")
    context = click.Context(click.Command("status"))
    assert [item.value for item in completers.runs(context, "")] == ["last", first.run_id, second.run_id]


def test_a_run_that_is_only_rendered_hides_no_error(toolkit, create, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel last` must not cancel a run of another folder if RUNS has one that was never submitted."""
    create("one", "local-7")
    rendered = create("two", "local-8")
    (rendered.path / "submitted-000.json").unlink()
    work_in(toolkit, monkeypatch, "two")
    refused = toolkit("cancel", "last")
    assert refused.code == 4 and "only rendered" in refused.err


def test_submissions_record_their_folder(toolkit, monkeypatch: pytest.MonkeyPatch, index_of_folders) -> None:
    monkeypatch.delenv("TOOLKIT_RUNS")
    work_in(toolkit, monkeypatch, "here")
    (toolkit.folder / "here" / "job.toml").write_text('[job]\nname = "work"\nentry = ["true"]\nranks_per_node = 1\n')
    toolkit.ok("render", "job.toml")
    (file,) = index_of_folders.iterdir()
    record = json.loads(file.read_text())
    assert record == {"path": f"{toolkit.folder}/here/runs", "parent_inode": record["parent_inode"]}
