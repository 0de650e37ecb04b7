"""The dev cluster of a test session, and that cluster as a site."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from clusters import ACCOUNTING, running_cluster, shared_folder
from on_slurm import Site, make_site

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, Layout


@dataclass
class RunningCluster:
    """The cluster of this test session."""

    layout: Layout
    slurm_conf: Path = field(init=False)
    folder: Path = field(init=False)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.slurm_conf = self.layout.slurm_conf
        self.folder = self.layout.folder
        outside_a_job = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env = {**outside_a_job, "SLURM_CONF": str(self.slurm_conf)}

    def run(self, *argv: str, timeout_s: float = 60) -> str:
        """Run a command on this machine, the cluster's login node; its stdout. It must end with code 0."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def exec(self, node: str, argv: Sequence[str], *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node."""
        command = devcluster.command_in_node(self.layout, node, argv)
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    """4 nodes with 4 pretended GPUs each, without accounting unless TOOLKIT_TEST_ACCOUNTING=1."""
    with running_cluster("", _spec(accounting=ACCOUNTING)) as layout:
        yield RunningCluster(layout)


@pytest.fixture(scope="session")
def accounting_cluster(request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """The same with slurmdbd, so that sacct works."""
    if ACCOUNTING:
        yield request.getfixturevalue("cluster")
        return
    with running_cluster("-accounting", _spec(accounting=True)) as layout:
        yield RunningCluster(layout)


def _spec(*, accounting: bool) -> ClusterSpec:
    return ClusterSpec(nodes=4, gpus=4, link="", accounting=accounting, subnet="")


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A fresh folder that this machine and every node see."""
    with shared_folder("shared-") as path:
        yield path


@pytest.fixture
def here(cluster: RunningCluster, shared_path: Path) -> Iterator[Site]:
    """The cluster as a site, with a folder for job files and runs."""
    yield make_site(cluster, shared_path)
    subprocess.run(["scancel", "--user=root"], env=cluster.env, check=True)  # what a test left in the queue
