"""The tally of a torture test, and a folder in memory for the many small files of its cases."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torture_scale import FULL, SCALE
from torture_tally import Tally


def pytest_report_header() -> str:
    return f"torture of checkpoints: {SCALE} (TOOLKIT_CHECKPOINT_TORTURE)"


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts what a test sees; written down when the whole count was run."""
    counts = Tally(request.node.originalname.removeprefix("test_").replace("_", " "))
    yield counts
    if FULL:
        counts.write()


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: waiting for a disk is most of a case's time, and proves nothing here."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
