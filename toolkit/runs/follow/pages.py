"""What the page of `toolkit dash` and the report show: runs by id, and a list of runs."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.training import last_record
from toolkit.metrics.verdicts import line_of_verdict
from toolkit.observe.readings import RunReadings
from toolkit.observe.view import HEAT, view_of
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.follow.watch import Watch
from toolkit.runs.history.listing import list_runs
from toolkit.runs.status.state import run_statuses
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.verdicts import raised_verdicts

__all__ = ["Pages"]

LIST_PERIOD_S = 10.0
MOST_RUNS = 200


class Pages:
    """Reads the files of each open run once for all browsers. It opens only `runs`, or those that it lists of `folders`."""

    def __init__(self, runs: Sequence[RunDirectory], folders: Sequence[Path] = ()) -> None:
        self._runs, self._folders = {run.run_id: run for run in runs}, folders
        self._open: dict[str, tuple[Watch, RunReadings]] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._listed_at = float("-inf")
        self._lock = threading.Lock()

    def look(self, run_id: str, metrics: Sequence[str] = ()) -> tuple[dict[str, Any], bool] | None:
        """Return the events of a run, or of the list for the run id "", and whether they are final; None if unknown."""
        with self._lock:
            try:
                if not run_id:
                    return {"overview": {"runs": self._list()}}, False
                return self._events(run_id, metrics) if run_id in self._runs or self._list_has(run_id) else None
            except (ToolkitError, OSError) as error:
                return {"problem": {"message": str(error)}}, False

    def report(self, run_id: str) -> dict[str, Any]:
        """Return everything that a report contains."""
        events, _ = self._events(run_id, tuple(HEAT))
        return events | {"made_s": time.time()}

    def _events(self, run_id: str, metrics: Sequence[str]) -> tuple[dict[str, Any], bool]:
        run = self._runs[run_id]
        watch, readings = self._open.setdefault(run_id, (Watch([run]), RunReadings(run, grid=WindowGrid())))
        found = watch.look()
        readings.update()
        readings.update_attempts()
        progress = json.loads(found[0].as_json())
        del progress["time"]  # it would make each event differ from the last one
        return {"run": progress, "view": view_of(readings, metrics)}, watch.are_over(found)

    def _list_has(self, run_id: str) -> bool:
        return any(row["run_id"] == run_id for row in self._list())

    def _list(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._listed_at >= LIST_PERIOD_S:
            if self._folders:
                found = list_runs(self._folders, limit=MOST_RUNS)
            else:
                found = [one for one in run_statuses(self._runs.values()).values() if isinstance(one, RunStatus)]
            self._rows = {status.run_id: self._row(status) for status in found}
            self._runs |= {status.run_id: RunDirectory(Path(status.path)) for status in found}
            self._listed_at = time.monotonic()
        return list(self._rows.values())

    def _row(self, status: RunStatus) -> dict[str, Any]:
        known = self._rows.get(status.run_id)
        if known is not None and known["state"] == status.state and status.state.final:
            return known
        run = RunDirectory(Path(status.path))
        last = last_record(run.metrics / "train.jsonl")
        return {
            "run_id": status.run_id, "job_name": status.job_name, "state": status.state, "reason": status.reason,
            "step": status.step, "steps": last.steps if last else None, "loss": last.loss if last else None,
            "verdicts": [] if status.state.final else [line_of_verdict(one) for one in raised_verdicts(run)],
        }  # fmt: skip
