"""Damaged job files, site files and flags: a message or a job that says what the file says, never a traceback."""

from __future__ import annotations

import json
import os
import tomllib
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from fuzz_cases import fuzz
from hypothesis import given
from hypothesis import strategies as st
from mutations import TOKENS, mutated

JOB = """[job]
name = "a.job"
entry = ["true", "b"]
nodes = "1-2"
ranks_per_node = 2
cpus_per_rank = 1
gpus_per_node = 0
time = "1:00:00"
requeue = true
partition = "main"
account = "x"
sbatch = ["--mail-type=END"]
mem_gb_per_node = 4
array = "0-3"
[env]
vars = { A = "1", B = "two words" }
pass = ["HF_HOME"]
[restart]
crashes = 1
warn_s = 60
[checkpoint]
every_steps = 10
source = ""
[data]
paths = ["*.txt"]
[train]
steps = 10
batch = 8
lr = 1e-3
schedule = "constant"
deterministic = false
[parallel]
shard = 2
zero = 3
[args]
depth = 2
name = "a"
when = 1979-05-27
nested.list = [1, [2.5, "x"], { a = true }]
"""
SITE = """name = "site"
contact = "me"
[detect]
hostnames = ["x*"]
environment = { A = "b*" }
[scheduler]
kind = "slurm"
options = ["--hint=nomultithread"]
[launcher]
kind = "srun"
mpi = "pmix"
[gpu]
request = "--gpus-per-node={count}"
[env]
modules = ["gcc/12"]
setup = ["ulimit -s unlimited"]
vars = { C = "3" }
[network]
interface = "eth0"
vars = { D = "4" }
[paths]
runs = "/scratch/runs"
access = "user"
[partitions.main]
default = true
max_nodes = 4
max_time = "1-00:00:00"
cpus_per_node = 64
gpus_per_node = 4
[partitions.low]
qos = "low"
"""
WHOLE = "".join(f'[job]\nentry = ["true"]\n[args]\n{line}\n' for line in ("a = 1",))
FLAGS = ("-N", "-n", "-c", "-t", "-p", "-A", "-q", "-a", "-J", "-C", "-w", "-x", "-o", "-e", "-d", "--ntasks-per-node",
         "--gpus-per-node", "--set", "--site", "--runs")  # fmt: skip
# What a command line and an environment can hold: texts, and bytes that are none.
ANY_TEXT = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    st.binary(max_size=12).map(lambda value: os.fsdecode(value.replace(b"\0", b""))),
)


def told_well(said: Any, *files: Path) -> None:
    """A refusal is a line for each mistake, and names the file and a fix."""
    assert said.code in (0, 1, 2, 3, 4), said
    assert "Traceback" not in said.err and "\x1b" not in said.err, said
    if said.code:
        lines = said.err.splitlines()
        assert lines and all(line.startswith("toolkit: ") for line in lines), said
        assert "Fix: " in said.err, said
        assert not files or any(str(file) in said.err for file in files), said


def as_json(value: Any) -> Any:
    """TOML's values as JSON has them: dates are texts."""
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, date | datetime | time) else value


def job_in(script: str) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(script.rpartition("<<'TOOLKIT_JOB'\n")[2].rpartition("\nTOOLKIT_JOB")[0])
    return job


@fuzz(0.15)
@given(text=mutated((JOB, WHOLE)))
def test_a_job_file_is_refused_or_shown_as_it_is(toolkit, text: str) -> None:
    job = toolkit.folder / "job.toml"
    job.write_text(text, encoding="utf-8", newline="")
    said = toolkit("config", "show", job, "--site", "devcluster", "--json")
    told_well(said, job)
    if said.code:
        return
    shown = json.loads(said.out)
    for table, keys in tomllib.loads(text.removeprefix("\ufeff")).items():  # as editors on Windows write
        for key, value in keys.items():
            assert shown[table][key] == as_json(value), (table, key)


@fuzz(0.1)
@given(text=mutated((SITE,)))
def test_a_site_file_is_refused_or_taken_as_it_is(toolkit, text: str) -> None:
    job, site = toolkit.folder / "job.toml", toolkit.folder / "site.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    site.write_text(text, encoding="utf-8", newline="")
    said = toolkit("render", job, "--site", site, "--runs", toolkit.runs)
    told_well(said, site, job)
    if said.code:
        return
    values = tomllib.loads(text.removeprefix("\ufeff"))
    resolved = job_in(said.out)
    for table in ("scheduler", "launcher", "gpu", "network", "env"):
        for key, value in values.get(table, {}).items():
            assert resolved["site_env" if table == "env" else table][key] == as_json(value), (table, key)
    directives = [line for line in said.out.splitlines() if line.startswith("#SBATCH ")]
    assert len(directives) == said.out.count("\n#SBATCH ")
    for option in values.get("scheduler", {}).get("options", []):
        assert any(option.partition("=")[2].partition('"')[0] in line for line in directives)


@fuzz(0.05)
@given(flags=st.lists(st.tuples(st.sampled_from(FLAGS), st.one_of(st.sampled_from(TOKENS), ANY_TEXT)), max_size=4))
def test_flags_are_refused_or_taken(toolkit, monkeypatch, flags: list[tuple[str, str]]) -> None:
    monkeypatch.chdir(toolkit.folder)  # --runs may name a folder here, but not one anywhere else
    flags = [(name, value.replace("/", "_").replace("~", "_") if name == "--runs" else value) for name, value in flags]
    job = toolkit.folder / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    words = [word for name, value in flags if "\0" not in value for word in (name, value)]
    said = toolkit("render", job, "--site", "devcluster", "--runs", toolkit.runs, *words)
    if "click" in said.err or "--help" in said.err:  # click's own refusals point to the help
        assert said.code == 2
        return
    told_well(said)
    if said.code == 0:
        assert job_in(said.out)["job"]["entry"] == ["true"]


@fuzz(0.05)
@given(key=st.sampled_from(("args.x", "args.a.b", "train.lr", "job.nodes", "env.vars", "env.pass", "nothing.x")), value=st.one_of(st.sampled_from(TOKENS), ANY_TEXT))  # fmt: skip
def test_settings_and_variables_mean_the_same(toolkit, monkeypatch, key: str, value: str) -> None:
    """--set and TOOLKIT_<TABLE>_<KEY> are read in the same way, and both are refused or both are taken."""
    if "\0" in value or key == "args.a.b" or key == "nothing.x":
        return
    job = toolkit.folder / "job.toml"
    job.write_text('[job]\nentry = ["true"]\n')
    by_flag = toolkit("config", "show", job, "--set", f"{key}={value}", "--json")
    with monkeypatch.context() as patch:
        patch.setenv("TOOLKIT_" + key.replace(".", "_").upper(), value)
        by_variable = toolkit("config", "show", job, "--json")
    for said in (by_flag, by_variable):
        told_well(said)
    assert by_flag.code == by_variable.code
    if by_flag.code == 0:
        one, other = json.loads(by_flag.out), json.loads(by_variable.out)
        assert {**one, "origins": 0} == {**other, "origins": 0}
