"""Mistakes at the command line: one line, with the place and the fix, and the documented exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = '[job]\nentry = ["true"]\n'
# name: (job file, command line with JOB for it, exit code, words of place and fix)
MISTAKES = {
    "unknown key": ('[job]\nentry = ["true"]\nndes = 2\n', "submit JOB", 2, ["job.toml:3:job.ndes", "'nodes'"]),
    "wrong type": ('[job]\nentry = ["true"]\nranks_per_node = "two"\n', "submit JOB", 2, ["job.toml:3:", "whole number"]),
    "bad TOML": ("[job\nentry = 1\n", "submit JOB", 2, ["job.toml:1", "]"]),
    "no such file": (JOB, "submit nowhere/jbo.toml", 4, ["nowhere/jbo.toml", "path of a job file"]),
    "no such shipped job": (JOB, "submit mpi_helo", 4, ["'mpi_helo'", "'mpi_hello'"]),
    "nodes on one machine": (JOB, "submit JOB -N 2", 2, ["-N 2:job.nodes", "-N 1"]),
    "no nodes, some ranks": (JOB, "submit JOB -N 0 -n 4", 2, ["-N 0", "from 1"]),
    "ranks that do not fill": (JOB.replace("]\n", "]\nnodes = 2\n", 1).replace("[job]\nnodes = 2", "[job]"), "submit JOB --site devcluster -N 2 -n 3", 2, ["-n 3", "-n 2"]),
    "ranks that fill no whole nodes": (JOB, "submit JOB --site devcluster -n 7 --ntasks-per-node 2", 2, ["-n 7", "-n 6 or 8"]),
    "more nodes than there are": (JOB, "submit JOB -n 8 --ntasks-per-node 2", 2, ["-n 8 --ntasks-per-node 2, so -N 4:job.nodes", "-N 1"]),
    "three numbers that differ": (JOB, "submit JOB --site devcluster -N 2 -n 8 --ntasks-per-node 2", 2, ["-n 8 does not match 2 nodes with 2 ranks each, which is 4 ranks", "-n 4"]),
    "ranks of a range": (JOB, "submit JOB --site devcluster -N 2-4 -n 8", 2, ["-n 8", "--ntasks-per-node 4", "-N 2"]),
    "ranks of the job's range": (JOB + "nodes = '2-4'\n", "submit JOB --site devcluster -n 8", 2, ["got the range 2-4", "-N 2"]),
    "a range that is none": (JOB, "submit JOB --site devcluster -N x-4 -n 8", 2, ["-N x-4:job.nodes"]),
    "no rank": (JOB, "submit JOB -n 0", 2, ["-n 0", "-n 1"]),
    "a mesh that does not divide": (JOB + "[parallel]\nshard = 3\n", "submit JOB -n 4", 2, ["job.toml:4:parallel.shard", "request 3 or 6 ranks"]),
    "sbatch's options without sbatch": (JOB, "run JOB -d afterok:5", 2, ["--dependency=afterok:5", "toolkit submit"]),
    "a log of Slurm's without Slurm": (JOB, "submit JOB -o mine.log", 2, ["--output=mine.log", "omit it"]),
    "bad time": (JOB, "submit JOB -t 2h", 2, ["-t 2h:job.time", "HH:MM:SS"]),
    "too long a time": (JOB, "submit JOB --site devcluster -p debug -t 1:00:00", 2, ["-t 1:00:00", '"30"']),
    "unknown partition": (JOB, "submit JOB --site devcluster -p debgu", 2, ["debgu", "'debug'"]),
    "unknown site": (JOB, "submit JOB --site devclutser", 4, ["devclutser", "'devcluster'"]),
    "no such site file": (JOB, "submit JOB --site ./none.toml", 4, ["none.toml"]),
    "no time to stop within": (JOB, "stop last --within 0m", 2, ["--within", "'0m'", "1:30 (90 s)"]),
    "a number without a unit": (JOB, "stop last --within 10", 2, ["--within", "'10'", "5m"]),
    "unknown run": (JOB, "status 20200101-000000-0000", 4, ["20200101", "history"]),
    "no form of a run": (JOB, "status 123:0", 4, ["123:0", "last", "123_4", "123;cluster"]),
    "cancel a step": (JOB, "cancel 123.0", 2, ["123.0", "one step of a job", "Fix: use 123\n"]),
    "requeue some tasks": (JOB, "requeue 123_[0-3]", 2, ["123_[0-3]", "some tasks", "123_4"]),
    "unknown checkpoint": (JOB, "ckpt show ./step-00000005", 4, ["step-00000005"]),
    "unknown command": (JOB, "submti JOB", 2, ["submti", "Did you mean 'submit'?", "toolkit --help"]),
    "unknown option": (JOB, "submit JOB --nodess 2", 2, ["--nodes", "toolkit submit --help"]),
    "missing argument": (JOB, "submit", 2, ["JOB", "toolkit submit --help"]),
    "no number": (JOB, "submit JOB -n two", 2, ["two", "--help"]),
    "missing entry file": ('[job]\nentry = "trian.py:main"\n', "submit JOB", 2, ["job.toml:2:job.entry", '"train.py"']),
    "control character": (JOB, "submit JOB -J a\x1bb", 2, ["job.name", "A-Z a-z 0-9"]),
    "a name like an option": (JOB, "submit JOB -J -x", 2, ["-J -x:job.name", "a letter or digit first"]),
    "values twice": (JOB, "submit JOB --sweep args.lr=1e-3,0.001", 2, ["--sweep args.lr=1e-3,0.001", "0.001 occurs twice"]),
    "sbatch's memory": (JOB, "submit JOB --mem 999G", 2, ["'--mem'", "`--set job.mem_gb_per_node=GIB`", "toolkit submit --help"]),
    "sbatch's GPUs": (JOB, "submit JOB --gpus 9", 2, ["'--gpus'", "`--gpus-per-node COUNT`, for each node"]),
    "sbatch's script": (JOB, "submit JOB --wrap=date", 2, ["'--wrap'", 'entry = ["bash", "-c", "COMMAND"]']),
    "a session's shell without a terminal": (JOB, "session attach dev", 2, ["`toolkit session exec dev -- COMMAND`"]),
    "unwritable runs": (JOB, "submit JOB --runs /proc/runs", 2, ["/proc/runs", "--runs or TOOLKIT_RUNS"]),
    "runs that are a file": (JOB, "submit JOB --runs JOB", 2, ["--runs or TOOLKIT_RUNS"]),
    "bad --set": (JOB, "submit JOB --set train.stps=3", 2, ["--set train.stps=3", "train.steps"]),
    "set without value": (JOB, "submit JOB --set train.steps", 2, ["--set train.steps", "train.steps=100"]),
    "copy to where one is": (JOB, "jobs copy mpi_hello THERE", 2, ["mpi_hello.toml", "another folder"]),
    "two that exclude each other": (JOB, "logs --rank 0 --failed", 2, ["--node and --failed cannot be combined; choose one. Fix: see"]),
    "one argument too many": (JOB, "logs last more", 2, ["argument (more). Fix: see"]),
    "negative lines": (JOB, "logs -n -1", 2, ["-1", "--help"]),
}  # fmt: skip


# What is not as it should be either, but refuses nothing.
BESIDE = ("toolkit: warning: ", "toolkit: could not check ")


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_with_the_place_and_the_fix(toolkit, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, line, code, words = MISTAKES[name]
    monkeypatch.chdir(toolkit.folder)
    job = toolkit.folder / "job.toml"
    job.write_text(text)
    (toolkit.folder / "train.py").touch()
    (toolkit.folder / "there").mkdir()
    (toolkit.folder / "there" / "mpi_hello.toml").touch()
    said = toolkit(*[{"JOB": str(job), "THERE": "there"}.get(word, word) for word in line.split(" ")])
    assert (said.code, said.out) == (code, ""), said
    lines = [line for line in said.err.splitlines() if not line.startswith(BESIDE)]
    assert len(lines) == 1 and lines[0].startswith("toolkit: "), said.err
    assert "Traceback" not in said.err and "\x1b" not in said.err
    for word in words:
        assert word in said.err, said.err
    assert not list(toolkit.runs.glob("*/*"))


def test_a_line_for_each_mistake(toolkit) -> None:
    job = toolkit.folder / "job.toml"
    job.write_text(JOB + "ndes = 2\ntime = 5\n")
    said = toolkit("submit", job)
    assert said.code == 2
    assert [("job.ndes" in line, "job.time" in line) for line in said.err.splitlines()] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_ninety_colon_zero_is_ninety_minutes(toolkit) -> None:
    job = toolkit.folder / "job.toml"
    job.write_text(JOB)
    script = toolkit.ok("render", job, "-t", "90:00", "--site", "devcluster")
    assert "#SBATCH --time=90:00\n" in script
    # Against a limit of 30 minutes, the message says how it was read.
    said = toolkit("render", job, "-t", "90:00", "--site", "devcluster", "-p", "debug")
    assert "90:00 is 0-01:30:00" in said.err


@pytest.mark.parametrize(
    ("words", "nodes", "ranks_per_node"),
    [
        ("-n 8 --ntasks-per-node 2", 4, 2),  # as sbatch derives the nodes
        ("-N 2 -n 8", 2, 4),
        ("-N 2 -n 8 --ntasks-per-node 4", 2, 4),
        ("-n 8", 1, 8),
        ("-n 8 --set job.nodes=4", 4, 2),
        ("-N 2-2 -n 8", "2-2", 4),
        ("-N 2-4 --ntasks-per-node 4", "2-4", 4),
    ],
)
def test_the_shape_is_what_sbatchs_letters_mean(toolkit, words: str, nodes: int | str, ranks_per_node: int) -> None:
    job = toolkit.folder / "job.toml"
    job.write_text(JOB)
    toolkit.ok("render", job, "--site", "devcluster", *words.split())
    (record,) = toolkit.runs.glob("*/*/record.json")
    table = json.loads(record.read_text())["job"]["job"]
    assert (table["nodes"], table["ranks_per_node"]) == (nodes, ranks_per_node)


def test_the_program_itself_ends_so() -> None:
    """Not only `main()` in this process: the installed command's exit code and streams."""
    toolkit = Path(sys.executable).with_name("toolkit")
    done = subprocess.run(
        [toolkit, "submit", "mpi_helo", "--site", "local"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)


def test_a_folder_that_cannot_be_made_is_one_line(toolkit) -> None:
    folder = toolkit.folder / "file"
    folder.touch()
    said = toolkit("jobs", "copy", "mpi_hello", folder / "below")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("toolkit: ") and said.err.count("\n") == 1 and str(folder) in said.err


def test_output_into_a_closed_pipe_is_quiet() -> None:
    toolkit = Path(sys.executable).with_name("toolkit")
    done = subprocess.run(
        ["bash", "-c", f"{toolkit} config schema job | true"],
        capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("words", [[], ["site"]])
def test_no_command_prints_the_help(toolkit, words: list[str]) -> None:
    assert toolkit(*words).out == toolkit.ok(*words, "--help")
    assert toolkit(*words).code == 0


@pytest.mark.parametrize(
    ("typed", "meant"), [("--gpu", "'--gpus-per-node'"), ("--jobname", "'--job-name'"), ("--nod", "'--nodes'")]
)
def test_the_option_that_goes_on_as_the_typed_one_is_the_nearest(toolkit, typed: str, meant: str) -> None:
    said = toolkit("submit", toolkit.job("true"), typed, "9")
    assert (said.code, meant in said.err, "--runs" in said.err) == (2, True, False), said


def test_a_name_that_is_given_does_for_a_file_without_one(toolkit) -> None:
    job = toolkit.folder / "my job.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    for words in ((), ("-n", 2)):
        assert 'Fix: write name = "my_job" in [job], or use -J my_job' in toolkit("run", job, *words).err
        assert toolkit("run", job, "-J", "mine", *words).code == 0, words
