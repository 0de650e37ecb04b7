"""The command line on the tests' own cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import Layout
from toolkit.devcluster.nodes import process_in_node
from toolkit.devcluster.releases import release_of
from toolkit.rundir.layout import RunDirectory

TOOLKIT = [str(Path(sys.executable).with_name("toolkit"))]
PATIENCE_S = 120.0

# Steps until the test says enough, and saves nothing: only starts and attempts are counted.
STEPPING = """
import sys, time
from pathlib import Path

def main(world, config):
    for step in range(6000):
        if world.should_stop(step):
            print(f"stopped at {step}, {world.time_left():.0f} s left", flush=True)
            return
        if Path(config.args["enough"]).exists():
            return
        time.sleep(0.05)
    sys.exit("nobody said enough")
"""


@dataclass
class Site:
    """The test's cluster as a site, and the command line on it."""

    cluster: Any
    folder: Path
    file: Path

    def toolkit(
        self, *argv: object, timeout_s: float = PATIENCE_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return self.command([*TOOLKIT, *map(str, argv)], timeout_s=timeout_s, **variables)

    def command(
        self, argv: list[str], *, timeout_s: float = PATIENCE_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **self.cluster.env,
            "TOOLKIT_SITE": str(self.file),
            "TOOLKIT_RUNS": str(self.folder / "runs"),
            **variables,
        }
        return subprocess.run(
            argv, cwd=self.folder, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip

    def ok(self, *argv: object, **variables: str) -> str:
        done = self.toolkit(*argv, **variables)
        assert done.returncode == 0, done
        return done.stdout

    def job(self, command: str, tables: str = "") -> Path:
        path = self.folder / "work.toml"
        path.write_text(f"[job]\nentry = ['bash', '-c', '''{command}''']\ntime = '5'\n{tables}")
        return path

    def stepping(
        self, keys: str = "", *, name: str = "stepping", time: str = "0:02:30", tables: str = ""
    ) -> tuple[Path, Path]:
        """A job that steps for five minutes, and the file that says enough. `keys` are of its [job] table."""
        (self.folder / "stepping.py").write_text(STEPPING)
        job, enough = self.folder / f"{name}.toml", self.folder / f"{name}.enough"
        table = f'[job]\nentry = "stepping.py:main"\ntime = "{time}"\n{keys}\n'
        job.write_text(f'{table}{tables}\n[args]\nenough = "{enough}"\n')
        return job, enough

    def submit(self, job: object, *argv: object, **variables: str) -> tuple[str, RunDirectory]:
        job_id, _, run_id = self.ok("submit", job, "--parsable", *argv, **variables).strip().partition(";")
        return job_id, self.run(run_id)

    def run(self, run_id: str) -> RunDirectory:
        (path,) = (self.folder / "runs").glob(f"*/{run_id}")
        return RunDirectory(path)

    def status(self, run: RunDirectory) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ok("status", run.run_id, "--json"))
        return status

    def await_empty(self) -> None:
        """For a test that needs every node: an earlier one's job may still be ending, within KillWait."""
        wait_for(lambda: not self.command(["squeue", "--noheader"]).stdout)

    def describe(self) -> str:
        """The queue, the nodes, and the last lines of slurmctld and of every run."""
        asked = (["sinfo", "-N", "-l"], ["squeue", "--states=all"], ["scontrol", "--oneliner", "show", "jobs"])
        parts = [f"$ {' '.join(argv)}\n{self.command(argv).stdout}" for argv in asked]
        logs = [self.cluster.layout.logs / "slurmctld.log", *self.folder.glob("runs/*/*/slurm-*.out")]
        parts += [f"{log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs]
        return "\n\n".join(parts)

    def wait(self, run: RunDirectory) -> subprocess.CompletedProcess[str]:
        return self.toolkit("wait", run.run_id)


def make_site(cluster: Any, folder: Path) -> Site:
    file, base = folder / "here.toml", "devcluster"
    mpi, library = mpi_of(cluster.layout)
    if mpi != "pmix":
        base = str(folder / "without_pmix.toml")
        Path(base).write_text(
            f'name = "without_pmix"\nextends = "devcluster"\n[launcher]\nmpi = "{mpi}"\nlibmpi = "{library}"\n'
        )
    file.write_text(
        f'name = "here"\nextends = "{base}"\n[scheduler]\nconf = "{cluster.slurm_conf}"\n', encoding="utf-8"
    )
    return Site(cluster, folder, file)


def mpi_of(layout: Layout) -> tuple[str, str]:
    """What srun --mpi is on this cluster, and an MPI library that speaks it: Debian's Open MPI, or our MPICH."""
    mpi = release_of(layout.read_spec().slurm).mpi
    return mpi, f"{sys.prefix}/lib/libmpi.so.12" if mpi == "pmi2" else "/usr/lib/x86_64-linux-gnu/libmpi.so.40"


def is_stepping(run: RunDirectory, attempt: int) -> Callable[[], bool]:
    return lambda: run.attempt(attempt).heartbeat.exists()


def wait_for(condition: Callable[[], object], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def await_idle_nodes(cluster: Any, timeout_s: float = 180) -> None:
    """Until every node is free: an earlier test's job may still be ending, and a node that was away be coming back."""
    try:
        wait_for(lambda: set(devcluster.node_states(cluster.layout).values()) == {"idle"}, timeout_s)
    except AssertionError:
        said = [cluster.run(*argv) for argv in (["sinfo", "-N", "-l"], ["sinfo", "-R"], ["squeue"])]
        pytest.fail(f"not every node is idle after {timeout_s:.0f} s:\n" + "\n".join(said))


@contextmanager
def stopped_slurmctld(cluster: Any) -> Iterator[None]:
    """slurmctld takes connections and answers none; what it was asked meanwhile it does afterwards."""
    pid = process_in_node(cluster.layout, "controller", "slurmctld")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
