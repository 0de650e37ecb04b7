"""Dev clusters for the tests that need a real Slurm, each under a name of its own that tells whose it is.

Without root, the packages or the release these tests are skipped; TOOLKIT_REQUIRE_CLUSTER=1 makes that a failure.
TOOLKIT_TEST_ACCOUNTING=1 gives every cluster accounting, TOOLKIT_TEST_SLURM=24.11 that release of Slurm; `make evidence`
runs everything with each.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, Layout, make_layout
from toolkit.devcluster.releases import install
from toolkit.errors import ToolkitError

HOME = Path.home() / ".toolkit"  # not /tmp: every node has one of its own
ACCOUNTING = os.environ.get("TOOLKIT_TEST_ACCOUNTING") == "1"
RELEASE = os.environ.get("TOOLKIT_TEST_SLURM", "")


@contextmanager
def running_cluster(suffix: str, spec: ClusterSpec) -> Iterator[Layout]:
    """A cluster of this test session, up until the block is left, with the programs of its release on PATH."""
    spec = replace(spec, slurm=spec.slurm or RELEASE)
    try:
        devcluster.require_machine(accounting=spec.accounting)
        install(spec.slurm)
    except ToolkitError as error:
        if os.environ.get("TOOLKIT_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"TOOLKIT_REQUIRE_CLUSTER=1, but {error}")
        pytest.skip(str(error))
    _take_down_orphans()
    name = f"test-{os.getpid()}{suffix}"
    layout = make_layout(name, HOME / name)
    devcluster.up(layout, spec)
    path = os.environ["PATH"]
    if programs := layout.read_spec().programs:
        os.environ["PATH"] = f"{programs}:{path}"
    yield layout
    os.environ["PATH"] = path
    devcluster.down(layout)


def _take_down_orphans() -> None:
    """Clusters of test sessions that were killed before they could take theirs down."""
    for folder in HOME.glob("test-*"):
        match = re.fullmatch(r"test-(\d+)(-\w+)?", folder.name)
        if match and not Path(f"/proc/{match[1]}").exists() and (folder / "cluster.json").exists():
            devcluster.down(make_layout(folder.name, folder))


@contextmanager
def shared_folder(prefix: str) -> Iterator[Path]:
    """A fresh folder that this machine and every node see; TOOLKIT_TEST_KEEP=1 leaves it there."""
    HOME.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=HOME))
    yield path
    if "TOOLKIT_TEST_KEEP" not in os.environ:
        shutil.rmtree(path, ignore_errors=True)
