"""`toolkit.AutoExecutor` on the site `local`: functions as jobs, by submitit's names."""

from __future__ import annotations

import functools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import toolkit as api
from toolkit.submission.executor import AutoExecutor, _calls_of, _sbatch_word

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())

SCRIPT = """
import sys
import toolkit

def add(a, b, *, scale=1):
    print("adding", a, b)
    return (a + b) * scale

def fail(word):
    raise ValueError(f"no {word}")

def leave():
    sys.exit(3)

def unstored():
    return object()

if __name__ == "__main__":
    executor = toolkit.AutoExecutor(folder="runs")
    executor.update_parameters(timeout_min=5, slurm_partition="", name="sums")
    runs = [executor.submit(add, 5, 7), executor.submit(add, 1, b=2, scale=3), executor.submit(fail, "way"),
            executor.submit(leave), executor.submit(unstored)]
    runs += executor.map_array(add, [1, 2], [3, 4])
    print(*(run.path for run in runs))
"""


@pytest.fixture
def executor(toolkit) -> AutoExecutor:
    return AutoExecutor(folder=toolkit.runs)


@pytest.mark.timeout(240)
def test_functions_of_the_calling_script(toolkit) -> None:
    script = toolkit.folder / "sums.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], cwd=toolkit.folder, capture_output=True, text=True, check=True)
    runs = [api.Run(Path(path)) for path in done.stdout.split()]
    added, scaled, failed, left, unstored, *mapped = runs
    assert added.result() == 12 and added.stdout() == "adding 5 7\n"
    assert scaled.result() == 9 and [run.result() for run in mapped] == [4, 6]
    error = failed.exception()
    assert error is not None and "ValueError: no way" in error.message and "ValueError: no way" in failed.stderr()
    assert left.exception() is not None
    assert unstored.result() is None and "the result was not stored: expected a JSON value" in unstored.stdout()
    calls = added.directory.calls
    assert stat.S_IMODE(calls.stat().st_mode) == 0o600
    jsonschema.validate(json.loads(calls.read_text()), {**SCHEMA, "$ref": "#/$defs/calls"})
    assert not [path for path in added.path.rglob("*") if path.suffix == ".pkl"]
    record = json.loads(added.directory.record.read_text())
    assert record["job"]["job"]["name"] == "sums" and record["job"]["job"]["time"] == "5"
    again = api.Run(toolkit.run(toolkit.ok("rerun", added.path, "--parsable").strip().partition(";")[2]).path)
    assert again.result() == 12, "a rerun has the calls of its run"


def test_a_function_of_a_module(executor: AutoExecutor) -> None:
    assert executor.submit(json.dumps, [1, {"a": None}]).result() == '[1, {"a": null}]'
    assert executor.map_array(json.dumps, []) == []


UNGUARDED = """
import toolkit

def add(a, b):
    return a + b

run = toolkit.AutoExecutor(folder="runs", site="local").submit(add, 1, 2)
print(run.path)
"""


def test_a_job_of_a_script_without_a_guard_submits_no_other_one(toolkit) -> None:
    script = toolkit.folder / "unguarded.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], cwd=toolkit.folder, capture_output=True, text=True, check=True)
    error = api.Run(Path(done.stdout.strip())).exception()
    assert error is not None and "this submission runs again in each job" in error.message
    assert "__main__" in error.fix and len(list((toolkit.folder / "runs" / "add").iterdir())) == 1


async def asynchronous() -> None: ...


def generating():
    yield 1


def outer():
    def inner() -> None: ...

    return inner


@functools.lru_cache
def cached() -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1, "got a lambda"),
        (outer(), "got one inside another function"),
        (functools.partial(os.getcwd), "expected a function, got partial"),
        (os.getcwd, "expected a function, got builtin_function_or_method"),
        (Path, "expected a function, got type"),
        (asynchronous, "got a generator or coroutine"),
        (generating, "got a generator or coroutine"),
        (cached, "expected a function, got _lru_cache_wrapper"),
        (cached.__wrapped__, "a different object with this name"),
    ],
)
def test_what_no_other_process_finds_is_refused(executor: AutoExecutor, toolkit, function, message: str) -> None:
    with pytest.raises(api.ToolkitError, match=message) as refused:
        executor.submit(function)
    assert refused.value.fix and not toolkit.runs.exists()


def test_arguments_that_are_not_json_are_refused_by_name(executor: AutoExecutor) -> None:
    with pytest.raises(api.ToolkitError, match="outer, task 0, argument 1: expected a JSON value, got PosixPath"):
        executor.submit(outer, 1, Path("x"))
    with pytest.raises(api.ToolkitError, match="outer, task 1, argument 0: expected a JSON value, got object"):
        executor.map_array(outer, [1, object()])
    with pytest.raises(api.ToolkitError, match="expected argument lists of equal length, got lengths 2, 1"):
        executor.map_array(outer, [1, 2], [3])


def test_parameters_become_options(executor: AutoExecutor) -> None:
    executor.update_parameters(
        timeout_min=60, nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_node=1, mem_gb=8, slurm_partition="gpu",
        slurm_account="a", slurm_qos="q", slurm_constraint="c", slurm_array_parallelism=2,
        slurm_additional_parameters={"mail_type": "END", "exclusive": True},
    )  # fmt: skip
    assert executor._options() == {
        "time": 60, "nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 3, "gpus_per_node": 1, "partition": "gpu",
        "account": "a", "qos": "q", "constraint": "c",
        "set": {"job.mem_gb_per_node": 8, "job.sbatch": ["--mail-type=END", "--exclusive"]},
    }  # fmt: skip
    assert _sbatch_word("reservation", "r1") == "--reservation=r1"


def test_part_of_a_gigabyte_is_rounded_up(executor: AutoExecutor) -> None:
    executor.update_parameters(mem_gb=0.5)
    assert executor._options()["set"] == {"job.mem_gb_per_node": 1}


def test_unknown_parameters_are_refused(executor: AutoExecutor) -> None:
    with pytest.raises(api.ToolkitError, match=r"unknown parameter 'timeout_mins'.*did you mean timeout_min"):
        executor.update_parameters(timeout_mins=60)
    with pytest.raises(api.ToolkitError, match="nodes: expected a whole number of at least 0, got 'two'"):
        executor.update_parameters(nodes="two")
    for wrong in (
        {"timeout_min": 0.5},
        {"nodes": 1.9},
        {"timeout_min": -1},
        {"slurm_array_parallelism": "two"},
        {"mem_gb": -2},
    ):
        with pytest.raises(api.ToolkitError, match=r"expected a .*number of at least 0, got|expected whole minutes"):
            executor.update_parameters(**wrong)
    with pytest.raises(api.ToolkitError, match="slurm_partition: expected a string, got 5"):
        executor.update_parameters(slurm_partition=5)
    with pytest.raises(api.ToolkitError, match=r"expected a dictionary of sbatch options, got \['x'\]"):
        executor.update_parameters(slurm_additional_parameters=["x"])
    assert executor.parameters == {}


def test_the_calls_of_a_module_name_it() -> None:
    calls = _calls_of(outer, [((1,), {})])
    assert (calls["module"], calls["script"], calls["function"]) == (outer.__module__, "", "outer")


def test_the_current_folder_of_an_interpreter_is_part_of_the_path(monkeypatch, tmp_path: Path) -> None:
    """`python -c` and a REPL have "" in sys.path; a later start of the job has another current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", "/elsewhere"])
    assert _calls_of(outer, [((1,), {})])["path"] == [str(tmp_path), "/elsewhere"]
