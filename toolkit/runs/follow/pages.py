"""What the page of `toolkit dash` shows: runs by id, and a list of runs."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.metrics.own import as_number
from toolkit.observe.readings import RunReadings
from toolkit.observe.view import view_of
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.follow.watch import Watch
from toolkit.runs.history.listing import list_runs
from toolkit.runs.status.state import run_statuses
from toolkit.runs.status.state_table import RunStatus
from toolkit.runs.verdicts import are_past, verdict_lines

__all__ = ["Pages"]

LIST_PERIOD_S, MOST_RUNS = 10.0, 200


class Pages:
    """Reads each open run once for all browsers. Only `runs`, or those that it has listed in `folders`, can be opened."""

    def __init__(self, runs: Sequence[RunDirectory], folders: Sequence[Path] = ()) -> None:
        self._runs, self._folders = {run.run_id: run for run in runs}, folders
        self._open: dict[str, tuple[Watch, RunReadings]] = {}
        self._rows: list[dict[str, Any]] = []
        self._listed_at, self._lock = float("-inf"), threading.Lock()

    def look(self, run_id: str, metrics: Sequence[str] = ()) -> tuple[dict[str, Any], bool] | None:
        """Return the events of a run, or of the list for the id "", and whether they are final; None if it is unknown."""
        with self._lock:
            try:
                if run_id not in self._runs and time.monotonic() - self._listed_at >= LIST_PERIOD_S:
                    self._list()
                if not run_id:
                    return {"overview": self._rows}, False
                return self.events(run_id, metrics) if run_id in self._runs else None
            except (ToolkitError, OSError) as error:
                return {"problem": str(error)}, False

    def events(self, run_id: str, metrics: Sequence[str]) -> tuple[dict[str, Any], bool]:
        """Return progress and view of a run, and whether they are final."""
        run = self._runs[run_id]
        watch, readings = self._open.setdefault(run_id, (Watch([run]), RunReadings(run, grid=WindowGrid())))
        found = watch.look()
        readings.update()
        progress = json.loads(found[0].as_json())
        del progress["time"]  # every event would differ from the previous one
        view, is_past = view_of(readings, metrics), are_past(run, found[0].status.state)
        view["verdicts"] = [one | {"is_past": is_past} for one in view["verdicts"]]
        return {"run": progress, "view": view}, watch.are_over(found)

    def _list(self) -> None:
        found = (
            list_runs(self._folders, limit=MOST_RUNS) if self._folders else run_statuses(self._runs.values()).values()
        )
        statuses = [one for one in found if isinstance(one, RunStatus)]
        self._runs |= {one.run_id: RunDirectory(Path(one.path)) for one in statuses}
        self._rows, self._listed_at = [_row(one, self._runs[one.run_id]) for one in statuses], time.monotonic()


def _row(status: RunStatus, run: RunDirectory) -> dict[str, Any]:
    loss = status.metrics.get("loss")
    return {name: getattr(status, name) for name in ("run_id", "job_name", "state", "reason", "step")} | {
        "loss": None if loss is None else as_number(loss),
        "verdicts": verdict_lines(run, status.state),
    }
