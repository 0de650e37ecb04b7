"""Run directories that a full disk, another version or an editor has damaged: a message, and never a wrong success."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fuzz_cases import fuzz
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged

FILES = (
    "record.json", "submitted-000.json", "starts/000/claim.json", "starts/000/end.json", "starts/000/job.json",
    "attempts/000/start.json", "attempts/000/exit.json", "attempts/000/heartbeat", "attempts/000/ranks/rank-00000.json",
    "attempts/000/errors/rank-00000.json", "attempts/000/events.jsonl", "metrics/train.jsonl",
    "metrics/own.jsonl", "metrics/means.jsonl",
)  # fmt: skip
COMMANDS = (
    ("status",), ("status", "--json"), ("history",), ("history", "--json"), ("explain",), ("explain", "--json"),
    ("logs",), ("logs", "--rank", "all"), ("resume", "--set", "no.key=1"), ("wait",),
)  # fmt: skip
OWN = '{"first": 1, "step": 3, "time": "2026-11-21T00:00:00.000Z", "attempt": 0, "values": {"acc": {"$float": "nan"}}, "at": {"acc": 2}}\n'
STEP = '{"step": 3, "steps": 9, "loss": 1.5, "attempt": 0}\n'


@pytest.fixture
def failed(toolkit) -> Path:
    """A run whose rank has failed; its copies are damaged."""
    job = toolkit.job("echo words; exit 3", more="[restart]\ncrashes = 0\n")
    run = toolkit.submit(job)
    assert toolkit("wait", run.run_id).code == 3
    (run.path / "attempts/000/heartbeat").write_text('{"step": 3, "time": "2026-11-21T00:00:00.000Z"}\n')
    (run.path / "metrics/train.jsonl").write_text(STEP)
    for name in ("own", "means"):
        (run.path / f"metrics/{name}.jsonl").write_text(OWN)
    return run.path


@st.composite
def accidents(draw: st.DrawFn) -> tuple[str, str, object]:
    """A file, what happens to it, and how."""
    kind = draw(st.sampled_from(("damage", "damage", "damage", "cut", "binary", "gone", "folder", "empty")))
    how = {"cut": st.integers(0, 200), "binary": st.binary(max_size=40), "damage": st.randoms(use_true_random=False)}
    return draw(st.sampled_from(FILES)), kind, draw(how.get(kind, st.none()))


def strike(run: Path, data: st.DataObject, name: str, kind: str, how: object) -> None:
    path = run / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    if kind == "gone":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "damage":
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        lines[-1] = json.dumps(data.draw(damaged(json.loads(lines[-1]))))
        path.write_text("\n".join(lines) + "\n")
    else:
        content = path.read_bytes()
        path.write_bytes({"cut": content[: how if isinstance(how, int) else 0], "binary": how, "empty": b""}[kind])


@fuzz(0.1)
@given(accident=accidents(), command=st.sampled_from(COMMANDS), data=st.data())
def test_no_damage_makes_a_failed_run_a_success(
    toolkit, failed: Path, accident: tuple[str, str, object], command: tuple[str, ...], data: st.DataObject
) -> None:
    runs = toolkit.folder / "damaged"
    shutil.rmtree(runs, ignore_errors=True)
    shutil.copytree(failed, runs / "work" / failed.name)
    strike(runs / "work" / failed.name, data, *accident)
    named = [command[0], *([] if command[0] == "history" else [failed.name]), *command[1:]]
    said = toolkit(*named, "--runs", runs)
    assert said.code in (0, 1, 2, 3, 4, 125), said
    assert "Traceback" not in said.err and "Traceback" not in said.out, said
    assert "\x1b" not in said.err, said
    assert "completed" not in said.out, said
    if command[0] == "wait":
        assert said.code, said
    if said.code and said.err:
        assert said.err.startswith(("toolkit: ", "work ", "run ")), said
