"""Write phases as a trace for Perfetto and chrome://tracing. Standard library only.

The file has Chromium's "Trace Event Format", with one process per rank and one row per thread: complete events ("X") in
microseconds, and metadata events ("M") that name the rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.metrics.phases import Profile, Span
from toolkit.rundir.files import write_text

__all__ = ["ThreadTrace", "merge_traces", "spans_of_a_rank", "traces_of", "write_trace"]

MOST_SPANS = 200_000  # spans over all ranks: about 20 MB, which a browser can still open


def spans_of_a_rank(ranks: int) -> int:
    """Return the number of phase calls that each thread of a rank may keep."""
    return max(100, min(20_000, MOST_SPANS // ranks))


@dataclass(frozen=True)
class ThreadTrace:
    """The phases of a thread. `epoch_ns` is the epoch time at which the rank's clock shows 0."""

    rank: int
    host: str
    thread: str
    epoch_ns: int
    spans: tuple[Span, ...]
    lost: int


def traces_of(profile: Profile, rank: int, host: str, epoch_ns: int) -> list[ThreadTrace]:
    """Return the threads of a rank, the training thread first. The limit of spans applies to all of them together."""
    left, traces = profile.most_spans, []
    for lane in profile.lanes:
        kept = lane.spans[:left]
        left -= len(kept)
        lost = lane.lost + len(lane.spans) - len(kept)
        traces.append(ThreadTrace(rank, host, lane.name, epoch_ns, tuple(kept), lost))
    return traces


def write_trace(path: Path, threads: Sequence[ThreadTrace]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spans = [span.began_ns + thread.epoch_ns for thread in threads for span in thread.spans]
    lost = sum(thread.lost for thread in threads)
    clocks = "of each host; they differ as far as the hosts' clocks do"
    head = json.dumps({"lost_phases": lost, "clocks": clocks, "began_ns": min(spans, default=0)})
    events = ",\n".join(json.dumps(event) for event in _events(threads, min(spans, default=0)))
    write_text(path, f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n{events}\n]}}\n')


def _events(threads: Sequence[ThreadTrace], first_ns: int) -> Iterator[dict[str, Any]]:
    rows: dict[int, int] = {}
    for thread in threads:
        # Numbers start at 1: Perfetto reserves process 0.
        process, row = thread.rank + 1, rows.get(thread.rank, 0) + 1
        if row == 1:
            yield _metadata("process_name", process, row, name=f"rank {thread.rank} on {thread.host}")
            yield _metadata("process_sort_index", process, row, sort_index=thread.rank)
        rows[thread.rank] = row
        yield _metadata("thread_name", process, row, name=thread.thread)
        for span in sorted(thread.spans, key=lambda span: (span.began_ns, -span.ended_ns)):
            begin_us = (span.began_ns + thread.epoch_ns - first_ns) / 1e3
            duration_us = (span.ended_ns - span.began_ns) / 1e3
            yield {
                "name": span.name, "cat": "phase", "ph": "X", "pid": process, "tid": row,
                "ts": begin_us, "dur": duration_us,
            }  # fmt: skip


def _metadata(kind: str, process: int, row: int, **named: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": named}


def merge_traces(traces: Mapping[str, Mapping[str, Any]], clocks: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return one trace on one clock.

    Args:
        traces: what `write_trace` wrote, with the name "", and what torch.profiler exported, such as "rank 0 on n1".
        clocks: by host, the offset of its clock and the error of that, in seconds.
    """
    began = {name: one.get("baseTimeNanoseconds") or one["otherData"]["began_ns"] for name, one in traces.items()}
    spans, names, host_of = list[dict[str, Any]](), list[dict[str, Any]](), dict[int, str]()
    numbers: dict[tuple[str, int], int] = {}
    for name, trace in traces.items():
        for event in trace["traceEvents"]:
            if event["ph"] in "XM" and type(event["pid"]) is int:  # not torch's arrows and spans of itself
                number = numbers.setdefault((name, event["pid"]), len(numbers) + 1)
                moved_us = event.get("ts", 0) + (began[name] - min(began.values())) / 1e3
                (spans if event["ph"] == "X" else names).append({**event, "pid": number, "ts": moved_us})
                if event["name"] == "process_name":
                    label = f"{name}: {event['args']['name']}" if name else event["args"]["name"]
                    names[-1]["args"], host_of[number] = {"name": label}, label.split(" on ", 1)[1].split(": ")[0]
    offsets = _offsets(spans, host_of, clocks)
    for event in spans:
        event["ts"] -= offsets[host_of[event["pid"]]][0] * 1e6
    first_us = min((event["ts"] for event in spans), default=0.0)
    spans = [{**event, "ts": round(event["ts"] - first_us, 3)} for event in spans]
    ordered = [{**event, "ts": 0} for event in names] + sorted(spans, key=lambda event: (event["ts"], -event["dur"]))
    aligned = {host: {"offset_s": offset_s, "uncertainty_s": error_s} for host, (offset_s, error_s) in offsets.items()}
    return {"displayTimeUnit": "ms", "otherData": {"clocks": aligned}, "traceEvents": ordered}


def _offsets(
    spans: Sequence[Mapping[str, Any]], host_of: Mapping[int, str], clocks: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return for each host what to subtract from its times, and the remaining uncertainty, in seconds.

    All ranks leave a collective together, so the ends of their waits show the offsets of the clocks. Without them, the
    time stamps of the file system do; smaller offsets than their error do not count.
    """
    hosts, ends = set(host_of.values()), dict[int, list[float]]()
    for span in (span for span in spans if span["name"] == "communication"):
        ends.setdefault(span["pid"], []).append((span["ts"] + span["dur"]) / 1e6)
    if len(hosts) == 1:
        return dict.fromkeys(hosts, (0.0, 0.0))
    if {host_of[pid] for pid in ends} == hosts and len(set(map(len, ends.values()))) == 1:
        middle, ahead = [median(moment) for moment in zip(*ends.values(), strict=True)], dict[str, list[float]]()
        for pid, own in ends.items():
            ahead.setdefault(host_of[pid], []).extend(at - mid for at, mid in zip(own, middle, strict=True))
        return {host: (median(one), median(abs(value - median(one)) for value in one)) for host, one in ahead.items()}
    known = {host: clocks.get(host, (0.0, 1.0)) for host in hosts}
    mid = median(offset for offset, _ in known.values())
    return {host: (at - mid if abs(at - mid) > error else 0.0, error) for host, (at, error) in known.items()}
