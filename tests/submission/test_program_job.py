"""A program is submitted without a job file, and the job file that it would have is shown or written."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from toolkit.config.request import JobRequest, resolve
from toolkit.config.resolved import ResolvedJob
from toolkit.rundir.layout import RunDirectory

SHOWS = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"


@pytest.fixture
def train(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    path = toolkit.folder / "train.py"
    path.write_text(SHOWS)
    return path


def newest(toolkit) -> RunDirectory:
    return RunDirectory(Path(json.loads(toolkit.ok("status", "last", "--json"))["path"]))


def values_of(job: ResolvedJob) -> dict:
    """Everything that a job does; the origin of its values differs, and arguments after `--` follow those of the file."""
    values = job.model_dump(exclude={"origins", "job_file", "argv"})
    return values | {"job": values["job"] | {"argv": job.arguments}}


def test_ranks_run_a_python_script_and_its_job_file_is_shown(toolkit, train: Path) -> None:
    said = toolkit("run", "train.py", "-n", "2", "--", "--lr", "0.1")
    assert said.code == 0
    for rank in (0, 1):
        assert f"[{rank}] {rank} 2 ['--lr', '0.1']\n" in said.out
    shown = said.err.partition("--save-as FILE writes:\n")[2].partition("\nrun ")[0]
    table = {"name": "train", "entry": "train.py", "ranks_per_node": 2, "argv": ["--lr", "0.1"]}
    assert tomllib.loads(shown) == tomllib.loads(newest(toolkit).job_file.read_text()) == {"job": table}


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_the_written_job_file_submits_the_same_job(toolkit, train: Path, folder: str) -> None:
    (toolkit.folder / folder).mkdir(exist_ok=True)
    written = str(Path(folder) / "mine.toml")
    options = ("-n", "2", "-t", "1:00:00", "-J", "gpt", "-C", "fast", "--set", "restart.progress=out/*.pt")
    settings = ("--set", 'env.vars={A = "1"}', "--", "--lr", "0.1")
    said = toolkit("submit", "train.py", *options, "--dry-run", "--save-as", written, *settings)
    assert said.code == 0 and f"wrote {written}; the same job: toolkit submit {written}\n" in said.err
    flags = {"--time": "1:00:00", "--job-name": "gpt"}
    once = resolve(JobRequest(written), None, environ={})
    assert once.job.entry == ("train.py" if folder == "." else "../train.py")
    from toolkit.config.document import Flag

    typed = resolve(
        JobRequest(
            "train.py", settings=("restart.progress=out/*.pt", 'env.vars={A = "1"}'), argv=("--lr", "0.1"), ranks=2,
            flags={"job.time": Flag(flags["--time"], "-t"), "job.name": Flag("gpt", "-J"), "job.constraint": Flag("fast", "-C")},
        ), None, environ={},
    )  # fmt: skip
    same = values_of(once) | ({"job_directory": typed.job_directory} if folder != "." else {})
    same["job"] |= {"entry": "train.py"}
    assert same == values_of(typed)


def test_it_continues_and_is_repeated_like_any_run(toolkit, train: Path) -> None:
    toolkit.ok("submit", "train.py", "--wait", "--", "--lr", "1")
    first = newest(toolkit)
    shutil.move(train, toolkit.folder / "gone.py")
    toolkit.ok("rerun", "last", "--set", "job.ranks_per_node=2", "--wait")
    again = newest(toolkit)
    assert again.run_id != first.run_id
    assert "1 2 ['--lr', '1']" in toolkit.ok("logs", "last", "--rank", "1")
    assert "job.ranks_per_node" in toolkit.ok("diff", first.run_id, again.run_id)
    shutil.move(toolkit.folder / "gone.py", train)
    toolkit.ok("resume", first.run_id, "-n", "2", "--wait", "--", "--lr", "2")
    assert "1 2 ['--lr', '2']" in toolkit.ok("logs", first.run_id, "--rank", "1")
    assert "completed" in toolkit.ok("explain", first.run_id)


def test_a_function_of_a_file_is_a_job(toolkit, train: Path) -> None:
    train.write_text("def main(world, config):\n    print(config.args['width'])\n")
    refused = toolkit("submit", "train.py")
    assert refused.code == 2
    assert (
        "train.py:1: the file defines main(world, config) but does not call it. Fix: write train.py:main" in refused.err
    )
    assert toolkit.ok("run", "train.py:main", "--set", "args.width=4").endswith("4\n")
    assert 'entry = "train.py:main"' in newest(toolkit).job_file.read_text()
    assert 'Fix: write "train.py:main"' in toolkit("submit", "train.py:mian").err


@pytest.mark.parametrize(
    "call",
    ["if __name__ == '__main__':\n    print('x')\n", "main(None, None)\n", "import cli\ncli.run(main)\n"],
)  # fmt: skip
def test_a_file_that_calls_its_function_is_a_script(toolkit, train: Path, call: str) -> None:
    train.write_text(f"def main(world, config):\n    pass\n{call}")
    assert resolve(JobRequest("train.py"), None, environ={}).job.entry == "train.py"


def test_programs_of_other_languages(toolkit, train: Path) -> None:
    shutil.copy("/bin/true", "solve")
    assert toolkit("run", "solve", "-n", "2").code == 0
    assert newest(toolkit).job_name == "solve"
    (toolkit.folder / "sub").mkdir()
    (toolkit.folder / "sub" / "fit model.R").write_text("1\n")
    job = resolve(JobRequest("sub/fit model.R"), None, environ={}).job
    assert (job.name, job.entry) == ("fit_model", ["Rscript", "sub/fit model.R"])


@pytest.mark.parametrize(
    ("job", "error"),
    [
        ("trian.py", "trian.py: file not found. Fix: use train.py"),
        ("trian.py:main", "trian.py:main: file not found. Fix: use train.py"),
        ("folder", "folder: expected a job file, got a folder"),
        ("a.ipynb", "or a script that starts with `#!`. Fix: `jupyter nbconvert --to script` makes a .py of it"),
        ("a.txt", "expected a job file (.toml), a program (.py, .R, .jl or an executable) or a script"),
        ("broken.py", "broken.py:2: invalid Python"),
    ],
)
def test_what_is_not_a_program(toolkit, train: Path, job: str, error: str) -> None:
    (toolkit.folder / "folder").mkdir()
    (toolkit.folder / "a.ipynb").write_text('{"cells": []}')
    (toolkit.folder / "a.txt").write_text("hello world\n")
    (toolkit.folder / "broken.py").write_text("x = 1\ndef\n")
    said = toolkit("submit", job)
    assert said.code in (2, 4) and error in said.err
    assert not toolkit.runs.exists()


def test_no_file_is_overwritten_and_only_a_program_is_written(toolkit, train: Path) -> None:
    (toolkit.folder / "mine.toml").write_text("precious")
    assert (
        "mine.toml: the file exists. Fix: choose the name of a new file with --save-as"
        in toolkit("submit", "train.py", "--save-as", "mine.toml").err
    )
    assert (toolkit.folder / "mine.toml").read_text() == "precious"
    assert toolkit("submit", "train.py", "-t", "1", "--save-as", "new.toml").code == 2  # too short for warn_s
    assert "--save-as expects a program as JOB" in toolkit("run", toolkit.job("true"), "--save-as", "new.toml").err
    assert not toolkit.runs.exists() and not (toolkit.folder / "new.toml").exists()


@pytest.mark.parametrize(
    ("entry", "written"), [("json:dumps", "json:dumps"), ("train.py:main", "../train.py:main"), ("./train.py", "../train.py")]
)  # fmt: skip
def test_only_an_entry_that_is_a_file_is_written_relative_to_the_job_file(
    toolkit, train: Path, entry: str, written: str
) -> None:  # fmt: skip
    (toolkit.folder / "sub").mkdir()
    train.write_text("def main(world, config):\n    pass\nprint(main)\n")
    toolkit.ok("submit", "train.py", "--set", f"job.entry={entry}", "--dry-run", "--save-as", "sub/m.toml")
    assert tomllib.loads((toolkit.folder / "sub" / "m.toml").read_text())["job"]["entry"] == written


def test_options_that_are_not_keys_are_named(toolkit, train: Path) -> None:
    said = toolkit("submit", "train.py", "--dry-run", "--site", "local", "--runs", "my runs", "--save-as", "m.toml")
    assert "the same job: toolkit submit m.toml --site=local '--runs=my runs'\n" in said.err


def test_a_python_script_that_starts_like_a_batch_script_remains_one_and_is_explained(toolkit, train: Path) -> None:
    train.write_text(f"#!/usr/bin/env python3\n{SHOWS}")
    said = toolkit("submit", "train.py", "-N", "1", "--ntasks-per-node", "2", "--dry-run")
    assert (
        "train.py starts with `#!`, so it runs once, as with sbatch. Fix: remove that line, or add --set job.once=false"
        in (said.err)
    )
    assert "1 2 []" in toolkit.ok("run", "train.py", "-n", "2", "--set", "job.once=false")
    assert "starts with `#!`" not in toolkit("submit", "train.py", "--dry-run").err


@pytest.mark.parametrize(
    ("job", "setting", "table"),
    [
        ("train.py:main", "args.lr=0.1", {"job": {"name": "train", "entry": "train.py:main"}, "args": {"lr": 0.1}}),
        ("train.py", "job.once=false", {"job": {"name": "train.py", "entry": "train.py", "once": False}}),
    ],
)
def test_ranks_run_a_file_that_starts_like_a_batch_script(
    toolkit, train: Path, job: str, setting: str, table: dict
) -> None:  # fmt: skip
    train.write_text("#!/usr/bin/env python3\ndef main(world, config):\n    print(config.args['lr'])\nprint('ran')\n")
    assert "ran\n" in toolkit.ok("run", job, "--set", setting)
    run = newest(toolkit)
    assert tomllib.loads(run.job_file.read_text()) == table
    toolkit.ok("rerun", run.run_id, "--set", "job.ranks_per_node=2", "--wait")


@pytest.mark.parametrize("tables", ["nodes = 2", "nodes = 3\nranks_per_node = 4", "nodes = '2-3'\nranks_per_node = 2"])
def test_the_ranks_of_several_nodes_run_here(toolkit, tables: str) -> None:
    path = toolkit.folder / "two.toml"
    path.write_text(f"[job]\nentry = ['bash', '-c', 'echo $SLURM_NTASKS-$TOOLKIT_WORLD_SIZE here']\n{tables}\n")
    said = toolkit("run", path, "-n", "2")
    assert said.code == 0 and said.out.count(" here\n") == 2
    assert "starting 2 ranks on this machine in place of" in said.err


def test_a_job_of_two_nodes_needs_no_number_of_ranks_if_they_fit(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toolkit.folder / "two.toml"
    path.write_text("[job]\nentry = ['echo', 'here']\nnodes = 2\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert toolkit.ok("run", path).count("here\n") == 2
    refused = toolkit("run", path, "--ntasks-per-node", "4")
    assert (
        "two.toml:3:job.nodes: the job has 8 ranks on 2 nodes, but this machine has 2 CPUs. Fix: add -n 2"
        in refused.err
    )
    assert "the job needs 2 nodes, but site 'local' is a single machine" in toolkit("run", path, "-N", "2").err
