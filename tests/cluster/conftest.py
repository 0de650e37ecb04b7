"""The dev cluster of a test session, and that cluster as a site."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from clusters import ACCOUNTING, running_cluster, shared_folder
from on_slurm import Site, make_site
from session_cluster import RunningCluster

from toolkit.devcluster.layout import ClusterSpec


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what Slurm and the runs say beside a failure: the cluster is gone when someone reads of it."""
    report = yield
    site = getattr(item, "funcargs", {}).get("here")
    if report.failed and call.when == "call" and site is not None:
        report.sections.append(("the cluster when the test failed", site.describe()))
    return report


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
