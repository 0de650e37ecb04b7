"""Faults of a real run on two nodes, as in `benchmarks/real_faults.py`: verdicts name the right rank, node and cause."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from on_slurm import Site

pytestmark = pytest.mark.cluster

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "real_faults.py"


def test_a_stall_is_found_with_the_rank_that_is_stuck_on_another_node_and_its_line(here: Site) -> None:
    here.await_empty()
    argv = [sys.executable, str(BENCHMARK), "--only", "stuck", "--clean", "5", "--folder", str(here.folder)]
    done = here.command(argv, timeout_s=600)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["passed"]
