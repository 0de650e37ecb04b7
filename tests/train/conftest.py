"""A training that is small enough for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import TinyTraining


@pytest.fixture
def tiny_training(tmp_path: Path) -> TinyTraining:
    """Trainings of a tiny model, with `tmp_path` as their run directory."""
    return TinyTraining(tmp_path)
