"""Runs that toolkit ad6182e left: the same states, keys and checkpoints, and they resume.

README.md says how they were made. Slurm has forgotten their jobs, as it had when ad6182e printed what is expected here.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from samples import environment_of, unpack
from sampling import sampled

from toolkit.metrics.training import read_train_log
from toolkit.rundir.layout import RunDirectory

PACKED = Path(__file__).with_name("runs_of_ad6182e.tar.gz")
with tarfile.open(PACKED) as packed:
    ANSWERS: dict[str, Any] = json.loads(packed.extractfile("answers.json").read())
NAMES: dict[str, str] = ANSWERS["names"]
# The wording of a reason may change, and the samples are unpacked into another folder.
FREE = {"reason", "path", "tasks"}


@pytest.fixture
def old(toolkit, monkeypatch: pytest.MonkeyPatch):
    """The command line on the unpacked runs."""
    unpack(PACKED, toolkit.folder)
    for name, value in environment_of(toolkit.folder, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{toolkit.folder / 'bin'}:{os.environ['PATH']}")
    return toolkit


def keys_of(value: Any, place: str = "") -> set[str]:
    """The keys of a JSON document, each with its place; the elements of a list share theirs."""
    if isinstance(value, dict):
        return {f"{place}.{key}" for key in value}.union(
            *(keys_of(one, f"{place}.{key}") for key, one in value.items())
        )
    if isinstance(value, list):
        return set().union(*(keys_of(one, f"{place}[]") for one in value))
    return set()


def assert_same_keys(new: Any, old: Any) -> None:
    """New keys may join; none of the old ones may be gone."""
    assert keys_of(old) - keys_of(new) == set()


def fixed_values(answer: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return values(answer, *(key for key in expected if key not in FREE))


def values(status: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: status[key] for key in keys}


@pytest.mark.parametrize("name", NAMES)
def test_status_has_the_old_state_and_keys(old, name: str) -> None:
    expected = ANSWERS["status"][name]
    status = json.loads(old.ok("status", NAMES[name], "--json"))
    assert_same_keys(status, expected)
    assert fixed_values(status, expected) == fixed_values(expected, expected)
    for task, expected_task in zip(status["tasks"] or [], expected["tasks"] or [], strict=True):
        assert fixed_values(task, expected_task) == fixed_values(expected_task, expected_task)


@pytest.mark.parametrize("name", NAMES)
def test_explain_finds_the_old_cause(old, name: str) -> None:
    expected = ANSWERS["explain"][name]
    explanation = json.loads(old("explain", NAMES[name], "--json").out)
    assert_same_keys(explanation, expected)
    assert values(explanation, "run_id", "state", "symptom") == values(expected, "run_id", "state", "symptom")
    evidence = [(one["source"], len(explanation["evidence"])) for one in explanation["evidence"]]
    assert evidence == [(one["source"], len(expected["evidence"])) for one in expected["evidence"]]


def test_history_lists_every_run_with_its_state(old) -> None:
    history = json.loads(old.ok("history", "-n", 0, "--json"))
    assert_same_keys(history, ANSWERS["history"])
    states = [(run["run_id"], run["state"]) for run in history]
    assert states == [(run["run_id"], run["state"]) for run in ANSWERS["history"]]


def test_a_session_is_listed_with_its_state(old) -> None:
    sessions = json.loads(old.ok("session", "ls", "--json"))
    assert_same_keys(sessions, ANSWERS["session"])
    same = ("name", "job_id", "state", "site", "created")
    assert [values(one, *same) for one in sessions] == [values(one, *same) for one in ANSWERS["session"]]


@pytest.mark.parametrize("name", ANSWERS["ckpt show"])
def test_checkpoints_are_shown_verified_and_loaded(old, name: str) -> None:
    shown = json.loads(old.ok("ckpt", "show", NAMES[name], "--json"))
    assert_same_keys(shown, ANSWERS["ckpt show"][name])
    assert values(shown, *ANSWERS["ckpt show"][name]) == ANSWERS["ckpt show"][name]
    old.ok("ckpt", "show", NAMES[name], "--norms")  # reads every tensor
    verified = json.loads(old.ok("ckpt", "verify", NAMES[name], "--full", "--json"))
    expected = ANSWERS["ckpt verify"][name]
    assert_same_keys(verified, expected)
    assert [Path(one["path"]).name for one in verified] == [Path(one["path"]).name for one in expected]
    assert all(one["good"] for one in verified)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sampled(["completed", "resumed", "stopped"], lambda case: case[0] == "stopped"))
def test_a_trained_run_resumes_with_the_code_of_its_submission(old, name: str) -> None:
    """The job's folder has other code by now, which `--same-code` leaves alone."""
    (old.folder / "project" / "train_lm.py").write_text("raise SystemExit('this code was not submitted')\n")
    run = RunDirectory(next(old.runs.glob(f"*/{NAMES[name]}")))
    (newest, *_) = sorted((int(path.name[5:]) for path in run.checkpoints.glob("step-????????")), reverse=True)
    resumed = old("resume", run.run_id, "--same-code", "--set", f"train.steps={newest + 3}", "--wait")
    assert resumed.code == 0, resumed
    assert f"step-{newest:08}" in resumed.err + old.ok("logs", run.run_id, "--rank", 0)
    records = read_train_log(run.path / "metrics" / "train.jsonl")
    assert records[-1].step == newest + 3
    assert (run.checkpoints / f"step-{newest + 3:08}").is_dir()
