"""Export the phases of a run as spans of OpenTelemetry: run > queue, attempt > starting, save, lost, verdict, step."""

import json
import re
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import IO, Any
from urllib.parse import urlsplit

from toolkit.metrics.run_metrics import scalars_of
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.outputs import rows_of, send
from toolkit.runs.status.state import run_status
from toolkit.runs.timeline.life import Piece, What, life_of, moment
from toolkit.runs.verdicts import all_verdicts

__all__ = ["export_spans"]

_MOST_STEPS = 200  # of an attempt
_NAMES = {What.WAITING: "queue", What.STARTING: "starting", What.SAVING: "save", What.LOST: "lost"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def export_spans(run: RunDirectory, to: str | IO[Any]) -> int:
    """Send the spans of a run and its tasks to a URL, or write them, as OTLP JSON; return their number.

    A repeated export has the same ids. Raises the errors of `send`.
    """
    spans = [span for one in run.with_tasks() for span in _spans(one)]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "toolkit"}}]}
    text = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]})
    if isinstance(to, str):
        send("POST", to if urlsplit(to).path.strip("/") else f"{to.rstrip('/')}/v1/traces", text, "application/json")
    else:
        to.write(text)
        to.flush()
    return len(spans)


def _spans(run: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the periods that have ended."""
    recorded = (read_json_or_none(run.record) or {}).get("environment", {}).get("TRACEPARENT", "")
    caller = _TRACEPARENT.fullmatch(recorded)
    until, state = time.time(), run_status(run).state
    found = [period for piece in life_of(run, state) for period in _periods(run, piece)]
    times = [at for _, _, *both, _ in found for at in both]
    found += [("", "run", min(times), max(times), {"state": state.value})] if times else []
    for parent, name, began, ended, facts in found:
        key = name if parent in ("", "run") and name != "queue" else f"{name} {began} {facts}"
        facts = {"toolkit.run_id": run.run_id, "toolkit.job_name": run.job_name, **facts}
        if state.final or ended < until:
            yield {
                "traceId": caller[1] if caller else _id(run.whole, ""), "spanId": _id(run, key)[:16],
                "parentSpanId": _id(run, parent)[:16] if parent else caller[2] if caller else "", "name": name, "kind": 1,
                "startTimeUnixNano": str(int(began * 1e9)), "endTimeUnixNano": str(int(ended * 1e9)),
                "attributes": [{"key": key, "value": {"stringValue": str(value)}} for key, value in facts.items()],
            }  # fmt: skip


def _id(run: RunDirectory, key: str) -> str:
    return sha256(f"{run.run_id} {key}".encode()).hexdigest()[:32]


def _periods(run: RunDirectory, piece: Piece) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Yield the parent, name, start, end and attributes of each span in an attempt and the wait before it."""
    own = f"attempt {piece.number}"
    for span in piece.spans:
        if span.what in _NAMES:
            yield "run" if span.what is What.WAITING else own, _NAMES[span.what], span.began, span.ended, {}
    times = [at for span in piece.spans if span.what is not What.WAITING for at in (span.began, span.ended)]
    if piece.number is None or not times:
        return
    yield "run", own, min(times), max(times), {"cause": piece.end}
    raised: dict[Any, tuple[float, dict[str, Any]]] = {}
    for one in (verdict for verdict in all_verdicts(run) if verdict.attempt == piece.number):
        facts = {"severity": one.severity.value, "host": one.host, "message": one.message}
        began, facts = raised.setdefault(one.key, (moment(one.time), facts))
        if one.state == "cleared":
            yield own, one.kind.value, began, moment(one.time), raised.pop(one.key)[1]
    for (kind, *_), (began, facts) in raised.items():
        yield own, kind.value, began, max(began, *times), facts
    steps = [row for row in rows_of(run, "training") if row["attempt"] == piece.number]
    before = None
    for row in steps[:: 1 + len(steps) // _MOST_STEPS]:
        at, is_loop = moment(row["time"]), "loss_hex" in row  # else of the program itself
        mean_s = (at - moment(before["time"])) / (row["step"] - before["step"]) if before else 0.0
        seconds, names, before = row["seconds"] if is_loop else mean_s, ["loss"] if is_loop else scalars_of(row), row
        yield own, f"step {row['step']}", at - seconds, at, {name: row[name] for name in names}
