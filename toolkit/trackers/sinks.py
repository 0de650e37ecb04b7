"""The trackers: each accepts rows of scalars, and learns how the run ended. Their packages are imported on first use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say_beside
from toolkit.trackers.rows import Row

__all__ = ["TRACKERS", "Described", "TensorBoard", "Tracker"]

_MOST_METRICS = 1000  # in one request of MLflow
_LONGEST_PARAM = 6000  # characters of a parameter's value in MLflow


@dataclass(frozen=True)
class Described:
    """The run: its names, its parameters, a folder for files of the tracker, and what the tracker kept of it so far.

    `keep` writes `kept` to its file. `is_live` is whether the run is active, so that a tracker may record offline.
    `reason_of` returns what an error says, without secrets of the job.
    """

    run_id: str
    job_name: str
    parameters: Mapping[str, Any]
    folder: Path
    kept: dict[str, Any]
    keep: Callable[[], None]
    is_live: bool
    reason_of: Callable[[Exception], str]


class Tracker(Protocol):
    def send(self, rows: list[Row]) -> None:
        """Record rows. Any error means that they must be sent again."""

    def close(self, state: str) -> None:
        """Finish; `state` is that of the run, "" if it is not known to have ended."""


class TensorBoard:
    """Event files in `folder`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ToolkitError("tensorboard is not installed", fix='pip install "toolkit[tensorboard]"') from error
        self._event, self._summary, self._writer = Event, Summary, EventFileWriter(str(folder))

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
                self._writer.add_event(self._event(wall_time=row.time_s, step=row.step, summary=summary))
        self._writer.flush()

    def close(self, state: str) -> None:
        del state  # event files have no end
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with the id of the run. Without a server or a key, it is recorded offline."""

    def __init__(self, run: Described) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ToolkitError("wandb is not installed", fix='pip install "toolkit[wandb]"') from error
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_PROJECT", run.job_name)
        run.folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "id": run.run_id.replace("/", "-"), "name": run.run_id, "config": dict(run.parameters), "dir": str(run.folder),
            "settings": wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off"),
        }  # fmt: skip
        resume: Any = None if os.environ.get("WANDB_MODE") == "offline" else "allow"
        try:
            self._run = wandb.init(**options, resume=resume)
        except wandb.errors.Error as error:
            if not run.is_live:
                raise
            say_beside(
                f"wandb: recording offline, since its server cannot be used: {run.reason_of(error)}; send it with `wandb sync {run.folder}/wandb/offline-*`"
            )
            self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.values})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("", "completed") else 1)


class MLflow:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME, or that of the job."""

    def __init__(self, run: Described) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the rows are sent again later
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise ToolkitError("mlflow is not installed", fix='pip install "toolkit[mlflow]"') from error
        self._metric = Metric
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            fix = 'set it in [env.vars] of the job, such as MLFLOW_TRACKING_URI = "http://SERVER:5000"'
            raise ToolkitError("expected the URI of a server or database in MLFLOW_TRACKING_URI, got none", fix=fix)
        self._client = MlflowClient()
        if "run" not in run.kept:
            self._create(run, Param)
        self._id = run.kept["run"]
        self._client.update_run(self._id, status="RUNNING")

    def _create(self, run: Described, make: Callable[[str, str], Any]) -> None:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job_name
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=run.run_id, tags={"toolkit.run_id": run.run_id})
        run.kept["run"] = str(created.info.run_id)
        run.keep()  # before what may fail, since another trial must not create another run
        values = [make(_accepted(name), str(value)[:_LONGEST_PARAM]) for name, value in run.parameters.items()]
        for at in range(0, len(values), 100):  # the most in one request
            try:
                self._client.log_batch(created.info.run_id, params=values[at : at + 100])
            except MlflowException as error:  # metrics do not depend on parameters
                say_beside(f"mlflow does not accept parameters: {run.reason_of(error)}")

    def send(self, rows: list[Row]) -> None:
        metrics = [
            self._metric(_accepted(name), value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for at in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _MOST_METRICS])

    def close(self, state: str) -> None:
        ends = {"": None, "completed": "FINISHED", "cancelled": "KILLED", "stopped": "KILLED"}
        if (status := ends.get(state, "FAILED")) is not None:
            self._client.set_terminated(self._id, status=status)


def _accepted(name: str) -> str:
    """Return a name with characters that MLflow accepts."""
    return re.sub(r"[^\w./: -]", "_", name)


TRACKERS: dict[str, Callable[[Described], Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "tensorboard": lambda run: TensorBoard(run.folder),
}
