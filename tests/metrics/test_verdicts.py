"""Verdicts: the lines of the file, what a reader sees of a damaged one, and the line for a terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_windows import NOW_S

from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import (
    Severity,
    Verdict,
    VerdictKind,
    VerdictLog,
    clear_verdict,
    line_of_verdict,
    open_verdicts,
    raise_verdict,
    read_verdicts,
    severity_of,
)

SLOW = raise_verdict(
    VerdictKind.STRAGGLER, Severity.WARNING, "rank 3 on node n2 computes 21 % longer than the others (4 of 5 windows)",
    "check its clock with nvidia-smi -q -d PERFORMANCE, or exclude it with --exclude n2", ranks=[3], host="n2",
    cause="own_work", evidence={"excess": 0.21}, cost_s_per_hour=660, time_s=NOW_S, steps=(1, 250),
)  # fmt: skip

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
verdicts = st.builds(
    Verdict, kind=st.sampled_from(VerdictKind), severity=st.sampled_from(Severity),
    ranks=st.lists(st.integers(0, 5000)).map(tuple), host=st.text(), device=st.text(), cause=st.text(),
    message=st.text(), change=st.text(), evidence=st.dictionaries(st.text(), numbers), cost_s_per_hour=numbers,
    first_step=st.integers(0), last_step=st.integers(0), time=st.text(), attempt=st.integers(0),
    state=st.sampled_from(["raised", "cleared"]),
)  # fmt: skip


@given(verdicts)
def test_a_line_is_one_line_and_reads_back_as_it_was_written(verdict: Verdict) -> None:
    line = verdict.to_line()
    assert "\n" not in line
    back = Verdict.from_line(line)
    assert back.evidence == pytest.approx(verdict.evidence, rel=1e-5)
    assert dataclasses.replace(back, evidence={}, cost_s_per_hour=0) == dataclasses.replace(
        verdict, evidence={}, cost_s_per_hour=0
    )
    assert Verdict.from_line(back.to_line()) == back


def test_numbers_that_json_cannot_express_are_not_written() -> None:
    verdict = dataclasses.replace(SLOW, evidence={"z": float("inf"), "loss": float("nan"), "excess": 0.2})
    assert Verdict.from_line(verdict.to_line()).evidence == {"excess": 0.2}


def test_a_torn_last_line_is_skipped_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "verdicts.jsonl"
    with VerdictLog(path) as log:
        log.write(SLOW)
    with path.open("a") as stream:
        stream.write(SLOW.to_line()[:40])
    assert read_verdicts(path) == [SLOW]
    with VerdictLog(path) as log:
        log.write(clear_verdict(SLOW, NOW_S + 60))
    assert [one.state for one in read_verdicts(path)] == ["raised", "cleared"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"ranks": [3]', '"ranks": ["3"]', "expected a list of ranks, got ['3']"),
        ('"severity": "warning"', '"severity": "bad"', "'bad' is not a valid Severity"),
        ('"attempt": 0', '"attempt": "0"', "expected int as attempt, got '0'"),
        ('"state": "raised"', '"state": "open"', 'expected "raised" or "cleared" as state, got "\'open\'"'),
        ('"excess": 0.21', '"excess": null', "expected numbers as evidence"),
        (', "host": "n2"', "", "host"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    line = SLOW.to_line()
    assert old in line
    path = tmp_path / "verdicts.jsonl"
    path.write_text(f"{line}\n{line.replace(old, new)}\n{line}\n")
    with pytest.raises(ToolkitError) as caught:
        read_verdicts(path)
    assert caught.value.where == f"{path}:2"
    assert (
        "not a verdict record" in caught.value.message
        and reason.replace("\"'open'\"", "'open'") in caught.value.message
    )


def test_only_raised_verdicts_of_the_attempt_are_open_and_the_worst_is_first() -> None:
    cheap = dataclasses.replace(SLOW, ranks=(5,), cost_s_per_hour=1.0)
    stall = dataclasses.replace(SLOW, kind=VerdictKind.STALL, ranks=(), severity=Severity.CRITICAL)
    earlier = dataclasses.replace(SLOW, kind=VerdictKind.DIVERGENCE, attempt=1)
    gone = dataclasses.replace(SLOW, ranks=(7,))
    lines = [dataclasses.replace(one, attempt=2) for one in (cheap, SLOW, gone, stall, clear_verdict(gone, NOW_S + 9))]
    assert [one.ranks for one in open_verdicts([earlier, *lines], attempt=2)] == [(), (3,), (5,)]
    assert open_verdicts([*lines, dataclasses.replace(earlier, attempt=3)], attempt=4) == []


def test_the_line_for_a_terminal_names_fault_cost_and_command() -> None:
    assert line_of_verdict(SLOW) == (
        "warning: rank 3 on node n2 computes 21 % longer than the others (4 of 5 windows): costs 11 min per hour; "
        "check its clock with nvidia-smi -q -d PERFORMANCE, or exclude it with --exclude n2"
    )
    free = dataclasses.replace(SLOW, cost_s_per_hour=0.0)
    assert "costs" not in line_of_verdict(free)
    assert line_of_verdict(clear_verdict(SLOW, NOW_S)).startswith("cleared: rank 3 on node n2")


def test_severity_rises_with_the_share_of_time_lost() -> None:
    orders = [severity_of(share / 100).order for share in range(60)]
    assert orders == sorted(orders) and set(orders) == {0, 1, 2}
