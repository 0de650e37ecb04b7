"""Where the tortured runs live: a site, the command line on it, and what can be read of a run from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from process_table import Process, processes_of

from toolkit.devcluster.layout import Layout
from toolkit.devcluster.nodes import first_process
from toolkit.metrics.training import read_train_log
from toolkit.rundir.files import read_json, read_lines
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
JOB = Path(__file__).with_name("paced_lm.toml")
PATIENCE_S = 100.0  # no scenario may be silent for longer, Slurm's own waits apart


@dataclass
class Place:
    """A site in a folder that all nodes see. `environment` is that of the user's shell."""

    folder: Path
    site_file: Path
    environment: Mapping[str, str]
    layout: Layout | None = None
    started: list[RunDirectory] = field(default_factory=list)

    def command(self, *argv: object, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Run a program as the user of this place."""
        return subprocess.run(
            [str(word) for word in argv], cwd=self.folder, env=self.shell, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    @property
    def shell(self) -> dict[str, str]:
        return {**self.environment, "TOOLKIT_SITE": str(self.site_file), "TOOLKIT_RUNS": str(self.folder / "runs")}

    def ok(self, *argv: object, timeout_s: float = PATIENCE_S) -> str:
        """A `toolkit` command that must succeed; its stdout."""
        done = self.command(TOOLKIT, *argv, timeout_s=timeout_s)
        assert done.returncode == 0, done
        return done.stdout

    def submit(self, *options: object, steps: int, pace_s: float = 0.1, **variables: object) -> RunDirectory:
        """Submit the paced job. `variables` reach the ranks."""
        settings = settings_of(steps, pace_s, **variables)
        return self.run(self.ok("submit", JOB, "--parsable", *settings, *options).strip().partition(";")[2])

    def resume(self, run: RunDirectory, *options: object) -> None:
        self.ok("resume", run.run_id, *options)

    def run(self, run_id: str) -> RunDirectory:
        (path,) = (self.folder / "runs").glob(f"*/{run_id}")
        self.started.append(RunDirectory(path))
        return self.started[-1]

    def status(self, run: RunDirectory) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ok("status", run.run_id, "--json"))
        return status

    def wait(self, run: RunDirectory, *, timeout_s: float = PATIENCE_S) -> str:
        """Wait for the run's end; its state."""
        self.command(TOOLKIT, "wait", run.run_id, timeout_s=timeout_s)
        return str(self.status(run)["state"])

    def node_of(self, process: Process) -> str:
        """The node that a process runs on, "" for this machine."""
        if self.layout is None:
            return ""
        for node in self.layout.read_spec().node_names:
            first = first_process(self.layout, node)
            if first and str(Path(f"/proc/{first}/ns/pid").readlink()) == process.namespace:
                return node
        return ""

    def sweep(self) -> None:
        """Kill what is left of the runs of a test that failed."""
        for run in self.started:
            for process in processes_of(run):
                process.kill()


def settings_of(steps: int, pace_s: float = 0.1, **variables: object) -> list[str]:
    """Options for the paced job."""
    told = {"PACE_S": pace_s, **variables}
    values = ", ".join(f'{name} = "{value}"' for name, value in told.items())
    return ["--set", f"train.steps={steps}", "--set", f"env.vars={{ {values} }}"]


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, poll_s: float = 0.1) -> float:
    """Wait for a condition; the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + timeout_s, f"waited {timeout_s:.0f} s in vain"
        time.sleep(poll_s)
    return time.monotonic() - begin


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Every line of the run's metrics, also of steps that were taken twice."""
    path = run.metrics / "train.jsonl"
    return list(read_lines(path)) if path.exists() else []


def stepped(run: RunDirectory, attempt: int, steps: int = 1) -> Callable[[], bool]:
    """Whether an attempt has taken so many steps."""
    return lambda: sum(line["attempt"] == attempt for line in lines_of(run)) >= steps


def losses(run: RunDirectory) -> dict[int, str]:
    """Loss by step as hexadecimal floats; of a step that was taken twice, the later one."""
    return {record.step: record.loss_hex for record in read_train_log(run.metrics / "train.jsonl")}


def steps_lost(run: RunDirectory) -> int:
    """Steps that were taken more than once."""
    lines = lines_of(run)
    return len(lines) - len({line["step"] for line in lines})


def end_of(run: RunDirectory, attempt: int) -> dict[str, Any]:
    end: dict[str, Any] = read_json(run.attempt(attempt).exit_file)
    return end


def attempts_of(run: RunDirectory) -> list[AttemptDirectory]:
    return [run.attempt(number) for number in run.attempt_numbers()]


def longest_silence_s(run: RunDirectory) -> float:
    """The longest time between two signs of life that the run left: claims, events, steps and ends."""
    moments = [line["time"] for line in lines_of(run)]
    for attempt in attempts_of(run):
        moments += [event["time"] for event in read_lines(attempt.events)]
    for path in [*run.path.glob("submitted-*.json"), *run.starts.glob("*/end.json")]:
        moments.append(read_json(path)["time"])
    moments += [read_json(path)["claimed"] for path in run.starts.glob("*/claim.json")]
    seconds = sorted(datetime.fromisoformat(moment).timestamp() for moment in moments)
    return round(max((after - before for before, after in pairwise(seconds)), default=0.0), 1)
