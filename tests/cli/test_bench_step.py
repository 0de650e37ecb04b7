"""`toolkit bench step` as it is typed: it runs a job's steps, prints where their time went, and prints stored profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.metrics.step_profile import read_profile

SMALL = (
    "--set", "train.batch=8", "--set", "train.micro_batch=2", "--set", "args.layers=1", "--set", "args.width=32",
    "--set", "args.context=16", "--set", "args.max_bytes=100000",
)  # fmt: skip


@pytest.fixture
def here(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return toolkit.folder


@pytest.mark.timeout(240)
def test_it_runs_steps_and_says_where_their_time_went(toolkit, here) -> None:
    said = toolkit("bench", "step", "-n", 2, "--steps", 4, "--warmup", 2, *SMALL)
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert lines[0].startswith("steps 3 to 6 on 2 x cpu, replicate 2; torch ")
    rows = [line.split("  ")[0] for line in lines]
    for name in ("data", "forward", "backward", "communication, exposed", "optimizer", "checkpoint", "rest", "step"):
        assert name in rows, said.out
    assert any("tokens/s of all ranks, 128 tokens a step" in line for line in lines)
    assert any(line.startswith("memory, at most: ") and line.endswith(" resident") for line in lines)
    assert any(line.startswith("what to change:") for line in lines)
    assert "- a micro-batch has 32 tokens (limit 256)" in said.out

    assert toolkit.ok("bench", "step", "--result", "last") == said.out
    (path,) = toolkit.runs.glob("*/*/metrics/profile.json")
    found = json.loads(toolkit.ok("bench", "step", "--result", path, "--json"))
    advice = found.pop("advice")
    assert found == json.loads(path.read_text()) and (found["first_step"], found["steps"]) == (3, 4)
    assert "small passes" in [one["rule"] for one in advice]
    # Every rank saves, so the fastest rank's mean would hold the save; another rank's may hold a wait for a core.
    assert read_profile(path).phase("checkpoint").ranks.min < 1e-3, "the save at the end belongs to no profiled step"
    assert path.with_name("trace.json").exists()


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--steps", 0], 2, "--steps: expected at least 1, got 0. Fix: choose 1 or more"),
        (["--warmup", -1], 2, "--warmup: expected at least 0, got -1. Fix: choose 0 or more"),
        (["no_such_job"], 4, "no_such_job"),
        (["--result", "last"], 4, ""),
        (["--set", "train.stepz=3"], 2, "train.stepz"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(toolkit, here, argv, code, said) -> None:
    told = toolkit("bench", "step", *argv)
    assert told.code == code and said in told.err and "Traceback" not in told.err and not toolkit.runs.exists()


def test_a_job_that_ends_without_a_profile_is_told_how_to_make_one(toolkit, here) -> None:
    told = toolkit("bench", "step", toolkit.job("true"), "-n", 1)
    assert told.code == 4 and "no step profile found" in told.err
    assert "Fix: set train.profile_steps in a job that uses `training_steps`" in told.err


def test_a_file_that_is_no_profile_is_refused_with_the_key(toolkit, here) -> None:
    Path("other.json").write_text('{"schema_version": 1}')
    told = toolkit("bench", "step", "--result", "other.json")
    assert told.code == 2 and "other.json" in told.err and "Traceback" not in told.err


@pytest.mark.parametrize("words", [[], ["--site", "devcluster"], ["-N", 1]])
def test_a_job_of_several_shapes_is_refused_with_what_profiles_it(toolkit, here, words) -> None:
    job = here / "two.toml"
    job.write_text('[job]\nentry = ["true"]\n[[component]]\nranks_per_node = 1\n[[component]]\nranks_per_node = 2\n')
    told = toolkit("bench", "step", job, *words)
    assert told.code == 2 and "two.toml:3:component: a foreground run has one component, but the job has 2" in told.err
    submits = f"Fix: `toolkit submit {job} --set train.profile_from=6 --set train.profile_steps=20`"
    assert f"{submits}, then `toolkit bench step --result last`" in told.err
    assert "Fix: `toolkit submit ...`" in toolkit("run", job, *words).err
