"""Write phases as a trace for Perfetto and chrome://tracing. Standard library only.

The file has Chromium's "Trace Event Format", with one process per rank and one row per thread: complete events ("X") in
microseconds, and metadata events ("M") that name the rows.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.metrics.phases import Profile, Span
from toolkit.rundir.files import write_text

__all__ = ["ThreadTrace", "spans_of_a_rank", "traces_of", "write_trace"]

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
    head = json.dumps({"lost_phases": lost, "clocks": "of each host; they differ as far as the hosts' clocks do"})
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
