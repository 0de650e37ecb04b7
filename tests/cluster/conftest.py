"""A dev cluster for the tests that need a real Slurm: made once a session, under a name of its own.

Without root or the packages these tests are skipped; TOOLKIT_REQUIRE_CLUSTER=1 makes that a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from on_slurm import Site, make_site

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, Layout, make_layout
from toolkit.errors import ToolkitError

# Not /tmp: every node has a /tmp of its own.
HOME = Path.home() / ".toolkit"


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
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def exec(
        self, node: str, argv: Sequence[str], *, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node."""
        command = devcluster.command_in_node(self.layout, node, argv)
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )


def _bring_up(suffix: str, *, accounting: bool) -> Iterator[RunningCluster]:
    try:
        devcluster.require_machine(accounting=accounting)
    except ToolkitError as error:
        if os.environ.get("TOOLKIT_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"TOOLKIT_REQUIRE_CLUSTER=1, but {error}")
        pytest.skip(str(error))
    _take_down_orphans()
    name = f"test-{os.getpid()}{suffix}"
    layout = make_layout(name, HOME / name)
    devcluster.up(layout, ClusterSpec(nodes=4, gpus=4, link="", accounting=accounting, subnet=""))
    yield RunningCluster(layout)
    devcluster.down(layout)


def _take_down_orphans() -> None:
    """Clusters of test sessions that were killed before they could take theirs down."""
    for folder in HOME.glob("test-*"):
        match = re.fullmatch(r"test-(\d+)(-\w+)?", folder.name)
        if match and not Path(f"/proc/{match[1]}").exists() and (folder / "cluster.json").exists():
            devcluster.down(make_layout(folder.name, folder))


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    """4 nodes with 4 pretended GPUs each, without accounting."""
    yield from _bring_up("", accounting=False)


@pytest.fixture(scope="session")
def accounting_cluster() -> Iterator[RunningCluster]:
    """The same with slurmdbd, so that sacct works."""
    yield from _bring_up("-accounting", accounting=True)


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A fresh folder that this machine and every node see."""
    HOME.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="shared-", dir=HOME))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def here(cluster: RunningCluster, shared_path: Path) -> Iterator[Site]:
    """The cluster as a site, with a folder for job files and runs."""
    yield make_site(cluster, shared_path)
    subprocess.run(["scancel", "--user=root"], env=cluster.env, check=True)  # what a test left in the queue
