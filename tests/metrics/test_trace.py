"""The trace: JSON of the Trace Event Format, a process for each rank, a row for each thread, phases within phases."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from toolkit.metrics.phases import Profile, Span
from toolkit.metrics.trace import MOST_SPANS, ThreadTrace, spans_of_a_rank, traces_of, write_trace


def test_what_is_written_follows_the_format(tmp_path: Path) -> None:
    threads = []
    for rank in (0, 1):
        profile = Profile()
        profile.begin_step(1)
        with profile.phase("backward"), profile.phase('a "quoted" name'):
            pass
        profile.end_step()
        threads += traces_of(profile, rank, "node-1", epoch_ns=10**18)
    write_trace(tmp_path / "trace.json", threads)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["lost_phases"] == 0
    events = trace["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    assert {event["args"].get("name") for event in named} == {"rank 0 on node-1", "rank 1 on node-1", "training", None}
    for process in (1, 2):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert [span["name"] for span in spans] == ["step", "backward", 'a "quoted" name']
        assert all({"cat", "ts", "dur", "tid"} <= set(span) and span["dur"] >= 0 for span in spans)
        for outer, inner in pairwise(spans):
            assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0.0


def test_hosts_are_brought_to_one_time_and_rows_do_not_mix(tmp_path: Path) -> None:
    """Each host's own clock begins anywhere."""
    threads = [
        ThreadTrace(0, "a", "training", 1000, (Span("step", 5000, 9000),), 2),
        ThreadTrace(0, "a", "loader", 1000, (Span("read", 6000, 7000),), 0),
        ThreadTrace(1, "b", "training", 5000, (Span("step", 1000, 5000),), 1),
    ]
    write_trace(tmp_path / "trace.json", threads)
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans == [(1, 1, 0.0, 4.0), (1, 2, 1.0, 1.0), (2, 1, 0.0, 4.0)]
    assert trace["otherData"]["lost_phases"] == 3


def test_the_file_stays_as_small_as_a_browser_needs() -> None:
    assert spans_of_a_rank(1) == 20_000
    for ranks in (10, 1000, 2000):
        assert spans_of_a_rank(ranks) * ranks <= MOST_SPANS
    profile = Profile(most_spans=3)
    profile.begin_step(1)
    for _ in range(5):
        with profile.phase("small"):
            pass
    profile.end_step()
    (thread,) = traces_of(profile, 0, "a", 0)
    assert (len(thread.spans), thread.lost) == (3, 3)
