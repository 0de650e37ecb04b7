"""Kernels of requested steps: each rank writes a file that merges into one trace, and a bad request ends nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import job, launch, said_by

from toolkit.jobs import train_lm
from toolkit.metrics.trace import merge_traces
from toolkit.rundir.layout import RunDirectory


def train(world: Any, config: Any) -> None:
    from toolkit.train.loop import kernels

    kernels._PERIOD_S = 0.0
    train_lm.main(world, config)


def ask(tmp_path: Path, request: dict[str, Any]) -> Path:
    folder = RunDirectory(tmp_path).attempt(0).kernels
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps(request))
    return folder


@pytest.mark.parametrize("first", [4, 29])  # also if the run ends within the requested steps
def test_two_ranks_record_the_requested_steps_and_their_traces_merge(tmp_path: Path, first: int) -> None:
    folder = ask(tmp_path, {"first_step": first, "steps": 3})
    launch(train, 2, tmp_path, job(profile_steps=3, profile_from=10))
    traces = {f"rank {rank} on n0": json.loads((folder / f"rank-0000{rank}.json").read_text()) for rank in (0, 1)}
    for trace in traces.values():
        calls = [event for event in trace["traceEvents"] if event["name"].startswith("Optimizer.step")]
        assert len(calls) == min(3, 30 - first + 1)
    phases = json.loads((tmp_path / "metrics" / "trace.json").read_text())
    events = merge_traces({"": phases, **traces}, {})["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    names = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in spans} <= names and all(type(event["tid"]) is int for event in spans)
    began = {event["name"]: event["ts"] for event in reversed(spans)}
    order = (began["step"], began["aten::mm"])  # the phases of step 10, and the kernels
    assert order == (tuple(sorted(order)) if first > 10 else tuple(sorted(order, reverse=True)))


def test_a_bad_request_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = ask(tmp_path, {"first_step": 3})
    launch(train, 2, tmp_path, job())
    assert "cannot record kernels" in said_by(tmp_path, 1) and not list(folder.glob("rank-*"))
