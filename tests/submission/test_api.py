"""The public Python API on the site `local`: toolkit.submit and its siblings, and what a `Run` returns."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

import toolkit as api
from toolkit.rank.result import MOST_BYTES, reason_not_json, store_result
from toolkit.rundir.layout import RunDirectory
from toolkit.submission.public import request_of
from toolkit.submission.sweep.rows import rows_of_option

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())


@pytest.fixture
def job(toolkit, monkeypatch: pytest.MonkeyPatch):
    """Write a job; the API's runs are those of the command line."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(toolkit.runs))
    return toolkit.job


@pytest.fixture
def returning(toolkit, monkeypatch: pytest.MonkeyPatch):
    """Write a job whose `main` returns an expression."""
    monkeypatch.setenv("TOOLKIT_RUNS", str(toolkit.runs))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(expression: str) -> Path:
        (toolkit.folder / "fit.py").write_text(f"def main(world, config):\n    return {expression}\n")
        path = toolkit.folder / "fit.toml"
        path.write_text('[job]\nentry = "fit.py:main"\n')
        return path

    return write


def test_the_import_is_light_and_has_all_public_names() -> None:
    probe = """
import sys, toolkit
heavy = {"torch", "click", "pydantic", "submitit", "rich", "numpy"} & set(sys.modules)
assert not heavy, heavy
names = [getattr(toolkit, name) for name in toolkit.__all__]
assert set(toolkit.__all__) <= set(dir(toolkit))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", probe], check=True)
    assert (Path(api.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        api.sumbit  # noqa: B018


def test_no_public_name_is_the_name_of_a_package() -> None:
    folder = Path(api.__file__).parent
    assert not [name for name in api.__all__ if (folder / name).exists() or (folder / f"{name}.py").exists()]


def test_a_submitted_run_answers(job) -> None:
    run = api.submit(job("echo $0 $1; test $WORD = seven", more='[env]\nvars = { WORD = "six" }\n'),
                     time=5, set={"env.vars.WORD": "seven"}, args=["--fast"])  # fmt: skip
    assert run.job_id.startswith("local-")
    assert run.wait() == "completed" and run.state is run.status().state
    assert run.done() and run.result() is None and run.exception() is None
    assert run.stdout() == run.stderr() == run.logs(rank=0) == "rank --fast\n"
    assert "supervisor" in run.logs() or run.logs()
    assert run.metrics() == [] and "has completed" in run.explain()
    record = json.loads(run.directory.record.read_text())
    assert record["job"]["job"]["time"] == "5" and record["job"]["job"]["name"] == "work"
    assert repr(run).startswith(f"<Run {run.run_id}: work has completed (job local-")
    assert api.list_runs(state="completed", since="1h") == [run]
    assert api.list_runs(state="failed") == []


def test_a_failed_run_raises_its_error(job) -> None:
    run = api.submit(job("exit 7", more="[restart]\ncrashes = 0\n"))
    error = run.exception()
    assert isinstance(error, api.RunFailedError) and f"run {run.run_id} failed: " in error.message and error.fix
    with pytest.raises(api.RunFailedError, match=run.run_id):
        run.result()
    again = api.resume("last", set={"restart.crashes": 0})
    assert again.run_id == run.run_id and again.wait() == "failed"
    assert len(run.directory.start_numbers()) == 2


def test_values_keep_their_types(job) -> None:
    value = {"text": "7", "list": [{"x": 1}, "ü"], "inner": {"b": {"c": True}}}
    run = api.submit(job("true"), set={"args.a": value, "args.b": [1.5, []], "args.c": {}})
    stored = json.loads(run.directory.record.read_text())["job"]["args"]
    assert stored == {"a": value, "b": [1.5, []], "c": {}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": "ab c"}, "args: expected a list of arguments, got 'ab c'"),
        ({"sbatch": "--comment=a"}, "sbatch: expected a list of sbatch options"),
        ({"set": ["a=1"]}, "set: expected a dictionary of keys and values"),
        ({"set": {1: 1}}, "set: expected a dictionary of keys and values"),
        ({"set": {"args.a": [None]}}, "expected a value that TOML can represent, got None"),
        ({"n": "2"}, "n: expected a number of ranks, got '2'"),
        ({"site": 3}, "site: expected the name or file of a site, got 3"),
        ({"runs": 3}, "runs: expected the path of a folder, got 3"),
        ({"sweep": {"args.a": 5}}, "sweep: expected a dictionary of keys and lists of values"),
        ({"sweep": "values.csv"}, "sweep: expected a dictionary of keys and lists of values"),
        ({"grid": {"args.a": [1]}}, "grid: expected the path of a grid file"),
        ({"after": 7}, "after: expected a run or a list of runs, got 7"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(job, toolkit, options: dict, message: str) -> None:
    with pytest.raises(api.ToolkitError) as refused:
        api.submit(job("true"), **options)
    assert message in str(refused.value) and refused.value.fix and not toolkit.runs.exists()


def test_runs_are_named_by_their_handles(job) -> None:
    first = api.submit(job("exit 3", more="[restart]\ncrashes = 0\n"))
    assert first.wait() == "failed"
    assert api.resume(first).run_id == first.run_id and first.wait() == "failed"
    with pytest.raises(api.ToolkitError, match=first.run_id):  # it has failed, so nothing can follow its success
        api.submit(job("true", name="second"), after=first)
    assert api.list_runs(state=None, since=None) == [first]
    with pytest.raises(api.ToolkitError, match="limit of at least 0"):
        api.list_runs(limit=-1)


def test_a_run_in_the_foreground_needs_the_main_thread(job, toolkit) -> None:
    path, errors = job("true"), []

    def refused() -> None:
        try:
            api.run(path)
        except api.ToolkitError as error:
            errors.append(error)

    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    assert "main thread" in errors[0].message and not toolkit.runs.exists()


def test_damaged_and_removed_files_are_named(job) -> None:
    run = api.submit(job("true"))
    assert run.wait() == "completed"
    run.directory.result.write_text("[]")
    with pytest.raises(api.ToolkitError, match="the stored result is damaged"):
        run.result()
    shutil.rmtree(run.path)
    with pytest.raises(api.ToolkitError, match="no longer exists"):
        run.job_id  # noqa: B018


def test_a_run_is_cancelled_and_a_wait_has_an_end(job) -> None:
    run = api.submit(job("sleep 60"))
    assert not run.wait(timeout_s=0.1).final and not run.done()
    run.cancel()
    assert run.wait() == "cancelled"
    with pytest.raises(api.ToolkitError, match="nothing to cancel"):
        run.cancel()


def test_a_run_in_the_foreground(job, capsys) -> None:
    run = api.run(job("echo rank $TOOLKIT_RANK"), n=2)
    assert run.state == "completed"
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] rank 0", "[1] rank 1"]


@pytest.mark.timeout(240)
def test_the_result_is_what_main_returned(returning) -> None:
    run = api.submit(returning('{"loss": 0.5, "rank": world.rank}'), n=2)
    assert run.result() == {"loss": 0.5, "rank": 0}, run.logs()
    path = run.directory.result
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    jsonschema.validate(json.loads(path.read_text()), {**SCHEMA, "$ref": "#/$defs/result"})


@pytest.mark.timeout(240)
def test_a_result_that_is_not_json_does_not_fail_the_run(returning) -> None:
    run = api.submit(returning("object()"))
    assert run.result() is None and run.state == "completed"
    assert run.stdout() == "toolkit: the result was not stored: expected a JSON value, got object\n"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": [1, 2.5, "b", None, True, (1,)]}, ""),
        (float("nan"), "expected a finite number, got nan"),
        ({1: 2}, "expected strings as the keys of a dictionary, got 1"),
        ([{"a": {1}}], "expected a JSON value, got set"),
    ],
)
def test_what_json_holds(value: object, reason: str) -> None:
    assert reason_not_json(value) == reason


def test_a_value_inside_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    assert "levels" in reason_not_json(value)


def test_a_large_result_is_not_stored_and_an_old_one_is_removed(tmp_path: Path, capsys) -> None:
    run = RunDirectory(tmp_path)
    store_result(run, [1], 0)
    assert json.loads(run.result.read_text())["value"] == [1]
    store_result(run, "x" * MOST_BYTES, 1)
    assert not run.result.exists() and f"expected at most {MOST_BYTES} bytes" in capsys.readouterr().err
    store_result(run, [2], 2)
    store_result(run, None, 3)
    assert not run.result.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": 2}, "unknown option 'node'.*did you mean nodes"),
        ({"nodes": 0}, "nodes 0"),
        ({"time": "never"}, "time never"),
        ({"n": 3, "nodes": 2}, "-n 3"),
        ({"set": {"train.stepz": 3}}, "train.stepz"),
        ({"set": {"args.x": object()}}, "expected a value that TOML can represent, got <object"),
    ],
)
def test_wrong_options_are_refused(job, toolkit, options: dict, message: str) -> None:
    with pytest.raises(api.ToolkitError) as refused:
        api.submit(job("true"), **options)
    import re

    assert re.search(message, str(refused.value)), refused.value
    assert not list(toolkit.runs.glob("*/*"))


def test_wrong_filters_of_runs_are_refused(job) -> None:
    with pytest.raises(api.ToolkitError, match="did you mean failed"):
        api.list_runs(state="fialed")
    with pytest.raises(api.ToolkitError, match="expected an age or a date, got 'yesterday'"):
        api.list_runs(since="yesterday")
    with pytest.raises(api.ToolkitError, match="expected an age or a date, got 5"):
        api.list_runs(since=5)
    for wrong in (5, [5]):
        with pytest.raises(api.ToolkitError, match="state"):
            api.list_runs(wrong)
    with pytest.raises(api.ToolkitError, match="typo: runs folder not found"):
        api.list_runs(runs="typo")


@pytest.mark.parametrize("options", [{"sweep": {"args.x": [1]}}, {"grid": "g.csv"}, {"after": "last"}])
def test_a_foreground_run_refuses_options_that_need_a_scheduler(job, toolkit, options: dict) -> None:
    with pytest.raises(api.ToolkitError, match="unsupported option"):
        api.run(job("true"), **options)
    assert not list(toolkit.runs.glob("*/*"))


def test_a_resume_refuses_options_of_a_new_run(job) -> None:
    ended = api.run(job("true"))
    for options in ({"sweep": {"args.x": [1]}}, {"grid": "g.csv"}):
        with pytest.raises(api.ToolkitError, match="unsupported option"):
            api.resume(ended, **options)


@pytest.mark.parametrize(
    "values", [["a,b", "c"], ["1", "2"], ["true", "x"], ['say "hi"', "[1"], ["", " a "], ["2024-01-01", "1e3"]]
)
def test_a_sweep_keeps_each_string(job, values: list[str]) -> None:
    (option,) = request_of(job("true"), {"sweep": {"args.name": values}}).sweeps
    assert [row["args.name"].value for row in rows_of_option(option)] == values


def test_a_sweep_of_a_variable_takes_strings_as_they_are(job) -> None:
    (option,) = request_of(job("true"), {"sweep": {"env.vars.X": ["1", 'say "hi"', "a b"]}}).sweeps
    assert [row["env.vars.X"].value for row in rows_of_option(option)] == ["1", 'say "hi"', "a b"]
    for value in ("a,b", " a", ""):
        with pytest.raises(api.ToolkitError, match=r"sweep: env\.vars\.X: expected values without commas"):
            request_of(job("true"), {"sweep": {"env.vars.X": [value]}})


def test_a_run_that_nobody_submitted_is_not_waited_for(job, toolkit) -> None:
    toolkit.ok("render", job("true"))
    (rendered,) = api.list_runs(state="created")
    with pytest.raises(api.ToolkitError, match="rendered but not submitted"):
        rendered.wait()


def test_a_notebook_shows_values_as_text(job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.submit(job("true"))
    run.wait()
    status = run.status()
    shown = SimpleNamespace(**{**status.__dict__, "reason": "<script>alert(1)</script>", "full_job_id": "1&2"})
    monkeypatch.setattr(api.Run, "status", lambda self: shown)
    page = run._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "1&amp;2" in page


def test_a_damaged_run_has_a_representation(tmp_path: Path) -> None:
    run = api.Run(tmp_path / "work" / "20260101-000000-0000")
    assert repr(run).startswith("<Run 20260101-000000-0000: ") and "<pre>" in run._repr_html_()


def test_a_sweep_needs_a_scheduler_here_too(job) -> None:
    with pytest.raises(api.ToolkitError):
        api.submit(job("true"), sweep={"env.vars.SEED": [1, 2]})


def test_the_command_line_makes_the_same_request(toolkit, job, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.submission import create

    seen = []

    def keep(request, **_: object) -> None:
        seen.append(request)
        raise api.ToolkitError("seen")

    monkeypatch.setattr(create, "create", keep)
    path = job("true")
    assert toolkit("submit", path, "-N", 2, "-t", 90, "-n", 4, "--set", "train.steps=5").code == 2
    with pytest.raises(api.ToolkitError, match="seen"):
        api.submit(path, nodes=2, time=90, n=4, set={"train.steps": 5})
    typed, called = seen
    assert (typed.job, typed.settings, typed.ranks) == (called.job, called.settings, called.ranks)
    assert {key: str(flag.value) for key, flag in typed.flags.items()} == {
        key: str(flag.value) for key, flag in called.flags.items()
    }
