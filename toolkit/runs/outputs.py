"""Pass the records of a run to a Pushgateway, and write them as CSV or for TensorBoard."""

import csv
import http.client
import json
import urllib.error
import urllib.request
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.metrics.run_metrics import scalars_of, with_own
from toolkit.metrics.training import read_train_log
from toolkit.metrics.validation import read_validations
from toolkit.metrics.window_file import read_windows
from toolkit.observe.series import text_of
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.status.state import run_status
from toolkit.runs.timeline.life import moment
from toolkit.runs.verdicts import all_verdicts
from toolkit.trackers.rows import Row
from toolkit.trackers.sinks import TensorBoard

__all__ = ["push_end", "write_csv", "write_events"]


def push_end(run: RunDirectory, gateway: str, *, is_deletion: bool) -> str:
    """Replace or delete the group of a run's job and site; return its path on the gateway. ToolkitError if it fails."""
    status = run_status(run)
    if not (is_deletion or status.state.final):
        raise ToolkitError(f"the run is {status.state}", where=status.run_id, fix="push after `toolkit wait`")
    ends = [AttemptRecord.read(run.attempt(number)) for number in run.attempt_numbers()]
    result = {**vars(status), "seconds": sum(end.seconds or 0 for end in ends if end is not None)}
    text = text_of([({"run_id": status.run_id}, {"result": [result], "steps": [vars(status)]})])
    path = "/metrics/job/toolkit"
    for name, value in (("job_name", status.job_name), ("site", status.site)):  # coded, as a name may contain "/"
        path += f"/{name}@base64/{urlsafe_b64encode(value.encode()).decode()}"
    send("DELETE" if is_deletion else "PUT", gateway.rstrip("/") + path, "" if is_deletion else text)
    return path


def send(method: str, url: str, text: str, kind: str = "text/plain") -> None:
    """Send a request; ToolkitError if the server cannot be reached, or rejects it."""
    try:
        request = urllib.request.Request(url, text.encode() or None, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=10):
            return
    except urllib.error.HTTPError as error:
        why = f"HTTP {error.code} {error.read(200).decode(errors='replace').strip()}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = str(getattr(error, "reason", error))
    raise ToolkitError(f"the request failed: {why}", where=url, fix="check the URL and the log of the server")


def rows_of(run: RunDirectory, what: str) -> Iterator[dict[str, Any]]:
    """Yield the "training", "verdicts" or "windows" of a run; of windows one row for each metric."""
    if what == "training":
        path = run.metrics / "train.jsonl"
        yield from with_own(path.parent, [vars(one) for one in read_train_log(path)] if path.exists() else [])
    for verdict in all_verdicts(run) if what == "verdicts" else ():
        ranks, evidence = " ".join(map(str, verdict.ranks)), json.dumps(verdict.evidence)
        yield {**vars(verdict), "ranks": ranks, "evidence": evidence}
    for path in sorted(run.attempts.glob("*/windows/rank-*.bin")) if what == "windows" else ():
        for window in read_windows(path):
            row = {"attempt": int(path.parts[-3]), **vars(window)}
            for name, statistics in row.pop("metrics").items():
                yield {**row, "metric": name, **vars(statistics)}


def write_csv(run: RunDirectory, what: str, stream: TextIO) -> None:
    """Write the `rows_of` a run and its tasks; NotFoundError if there are none."""
    rows = ({"run_id": one.run_id, **row} for one in run.with_tasks() for row in rows_of(one, what))
    if (first := next(rows, None)) is None:
        raise NotFoundError(f"the run has no {what} records", where=str(run.path), fix="choose others with --what")
    found: Iterable[dict[str, Any]] = chain([first], rows)
    if what == "training":  # rows differ in the metrics of the program itself; the others are many, and alike
        found = list(found)
        first = dict.fromkeys(name for row in found for name in row)
    writer = csv.DictWriter(stream, list(first), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    stream.flush()


def write_events(run: RunDirectory, folder: Path) -> None:
    """Write training and validations into FOLDER/JOB/RUN, instead of an earlier export. ToolkitError without tensorboard."""
    for one in run.with_tasks():
        own, path = folder / one.job_name / one.run_id, one.metrics / "validation.jsonl"
        found = [(row, {f"train/{name}": row[name] for name in scalars_of(row)}) for row in rows_of(one, "training")]
        for record in read_validations(path) if path.exists() else ():
            found.append((vars(record), {f"validation/{name}": mean for name, mean in record.means.items()}))
        earlier = list(own.glob("events.out.tfevents.*"))
        events = TensorBoard(own)
        events.send([Row(row["step"], moment(row["time"]), values) for row, values in found])
        events.close("")
        for each in earlier:
            each.unlink()
