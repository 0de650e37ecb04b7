"""The trace: JSON of the Trace Event Format, a process for each rank, a row for each thread, phases within phases."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from toolkit.metrics.phases import Profile, Span
from toolkit.metrics.trace import MOST_SPANS, ThreadTrace, merge_traces, spans_of_a_rank, traces_of, write_trace


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


def slices_of(path: Path) -> dict[tuple[int, int], list[tuple[str, int, int, int]]]:
    """Name, depth, begin and end in ns of each slice of a row, as Perfetto's importer finds them.

    It takes times for microseconds, with three decimals at most for the nanoseconds; it wants numbers for `pid` and `tid`;
    and of two complete events of a row one must hold the other, or it drops the second.
    """
    texts = json.loads(path.read_text(), parse_float=str, parse_int=str)["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    names: dict[tuple[str, int, int], str] = {}
    for event in texts:
        process, row = int(event["pid"]), int(event["tid"])
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"} and len(event["args"]) == 1
            names[event["name"], process, row] = next(iter(event["args"].values()))
            continue
        assert event["ph"] == "X" and isinstance(event["name"], str) and isinstance(event["cat"], str)
        assert ("process_name", process, 1) in names and ("thread_name", process, row) in names, (
            "named before it is used"
        )
        begin_ns, length_ns = (_nanoseconds(event[key]) for key in ("ts", "dur"))
        rows.setdefault((process, row), []).append((event["name"], 0, begin_ns, begin_ns + length_ns))
    return {row: _stacked(slices) for row, slices in rows.items()}


def _nanoseconds(text: str) -> int:
    whole, _, decimals = text.partition(".")
    assert len(decimals) <= 3 and "e" not in text, f"{text} us is no number of nanoseconds"
    return int(whole) * 1000 + int(decimals.ljust(3, "0"))


def _stacked(slices: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    open_until: list[int] = []
    stacked = []
    for before, (name, _, begin, end) in zip([slices[0], *slices], slices, strict=False):
        assert before[2] <= begin, "sorted by their begin"
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{name} would be dropped"
        stacked.append((name, len(open_until), begin, end))
        open_until.append(end)
    return stacked


def test_perfetto_would_find_every_phase_in_its_place_to_the_nanosecond(tmp_path: Path) -> None:
    day_ns = 86_400 * 10**9
    spans = [
        Span("forward", day_ns + 1, day_ns + 700_001),
        Span("communication", day_ns + 699_999, day_ns + 700_001),  # ends with what it is in
        Span("step", day_ns, day_ns + 999_999),
        Span("backward", day_ns + 700_001, day_ns + 999_999),  # begins with the end of the one before
        Span("step", day_ns + 999_999, day_ns + 1_000_002),
    ]
    epoch_ns = 1_790_000_000 * 10**9 + 7
    threads = [
        ThreadTrace(0, "a", "training", epoch_ns - day_ns, tuple(spans), 0),
        ThreadTrace(1, "b", "training", epoch_ns, (Span("step", 3, 12_345_678),), 0),
    ]
    write_trace(tmp_path / "trace.json", threads)
    assert slices_of(tmp_path / "trace.json") == {
        (1, 1): [
            ("step", 0, 0, 999_999),
            ("forward", 1, 1, 700_001),
            ("communication", 2, 699_999, 700_001),
            ("backward", 1, 700_001, 999_999),
            ("step", 0, 999_999, 1_000_002),
        ],
        (2, 1): [("step", 0, 3, 12_345_678)],
    }


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


def of_hosts(tmp_path: Path, ahead_ns: int, *, name: str = "communication", jitter_ns: int = 0) -> dict:
    """A trace of two hosts whose ranks leave five collectives together; the clock of host b is ahead."""
    threads = [
        ThreadTrace(0, "a", "training", 10**18, tuple(Span(name, k * 10**7, k * 10**7 + 10**6) for k in range(5)), 0),
        ThreadTrace(
            1, "b", "training", 10**18 + ahead_ns,
            tuple(Span(name, k * 10**7 + 5 * 10**5, k * 10**7 + 10**6 + jitter_ns * (k % 2)) for k in range(5)), 0,
        ),
    ]  # fmt: skip
    write_trace(tmp_path / "trace.json", threads)
    return json.loads((tmp_path / "trace.json").read_text())


def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    phases = of_hosts(tmp_path, 3_700_000_000, jitter_ns=1000)
    merged = merge_traces({"": phases}, {"b": (99.0, 1.0)})
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    ends = {pid: [e["ts"] + e["dur"] for e in spans if e["pid"] == pid] for pid in {e["pid"] for e in spans}}
    assert all(abs(a - b) <= 1.01 for a, b in zip(*ends.values(), strict=True)), "within the microsecond of jitter"
    clocks = merged["otherData"]["clocks"]
    assert abs(clocks["b"]["offset_s"] - clocks["a"]["offset_s"] - 3.7) < 1e-5
    assert all(one["uncertainty_s"] <= 1e-6 for one in clocks.values())
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans) and spans[0]["ts"] == 0


def test_without_collectives_only_offsets_above_their_error_count(tmp_path: Path) -> None:
    for ahead_s, is_known in ((7.0, True), (0.4, False)):
        phases = of_hosts(tmp_path, round(ahead_s * 1e9), name="forward")
        merged = merge_traces({"": phases}, {"a": (0.0, 1.0), "b": (ahead_s, 1.0)})
        clocks = merged["otherData"]["clocks"]
        found = clocks["b"]["offset_s"] - clocks["a"]["offset_s"]
        assert (abs(found - ahead_s) < 1e-9) if is_known else found == 0
        assert clocks["b"]["uncertainty_s"] == 1.0


def test_kernels_get_processes_of_their_own_with_names(tmp_path: Path) -> None:
    phases = of_hosts(tmp_path, 0)
    began = phases["otherData"]["began_ns"]
    kernels = {
        "baseTimeNanoseconds": began - 1000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "ts": 0, "args": {"name": "thread 7"}},
            {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 1.0, "dur": 2.0},
            {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
            {"ph": "s", "name": "ac2g", "pid": 1, "tid": 7, "ts": 1.0, "id": 1},
        ],
    }
    events = merge_traces({"": phases, "rank 1 on b": kernels}, {})["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0 on a", "rank 1 on b", "rank 1 on b: python"]
    (mm,) = [event for event in events if event["name"] == "aten::mm"]
    assert names[mm["pid"]] == "rank 1 on b: python" and mm["ts"] == 0.0
    assert {event["ph"] for event in events} == {"M", "X"}
    rows = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert rows <= {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
