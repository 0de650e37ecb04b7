"""docs/bench.md: its commands run as written, with smaller sizes, and its tables name every key, option and operation."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.comm.bench.request import BenchRequest
from toolkit.metrics import collectives
from toolkit.metrics.collectives import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
SMALL = " --sizes 64..512 --factor 8 --iterations 1 --warmup 0"


def run(line: str, folder: Path) -> str:
    bin_folder = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "SLURM_"))}
    environment = {**kept, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


@pytest.mark.timeout(400)
def test_the_commands_work_as_written(tmp_path: Path) -> None:
    """Those that measure with sizes of the test's own; what is submitted goes to this machine, which is one node."""
    assert len(COMMANDS) == 6
    ran = []
    for line in COMMANDS:
        if " submit " in line:
            line = line.replace("-N 4", "--site local --wait --set args.sizes=256..256 --set args.iterations=1")
        elif "bench" in line and "--result" not in line:
            command, into, file = line.partition(" > ")
            line = command + SMALL + into + file
        ran.append(run(line, tmp_path))
    assert 'collective: "all_reduce_perf"' in ran[1]
    assert "# Collective test starting: sendrecv_perf" in ran[3]
    assert "# Collective test starting: sendrecv_perf" in ran[5], "what was submitted before"
    assert {"all_reduce.svg", "picture.svg"} <= {path.name for path in tmp_path.iterdir()}


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


@pytest.mark.parametrize("kind", ["Measurement", "RankPlace", "Limit", "Series", "Row", "Timing"])
def test_every_key_is_on_the_page(kind: str) -> None:
    section = PAGE[PAGE.index("## JSON") :]
    assert {field.name for field in dataclasses.fields(getattr(collectives, kind))} <= words(section)


def test_no_key_is_on_the_page_that_is_none() -> None:
    section = PAGE[PAGE.index("## JSON") :]
    named = words("".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    kinds = (getattr(collectives, name) for name in ("Measurement", "Series"))
    assert named == {field.name for kind in kinds for field in dataclasses.fields(kind)}


def test_every_argument_and_operation_is_on_the_page() -> None:
    table = PAGE[PAGE.index("| option |") : PAGE.index("## The columns")]
    arguments = {field.name for field in dataclasses.fields(BenchRequest)}
    cells = words("".join(row.split("|")[2] for row in table.splitlines() if row.startswith("| `--")))
    assert cells == arguments and set(OPERATIONS) <= words(table)


def test_the_factors_of_the_page_are_those_that_are_used() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| `([^`]+)` \|$", PAGE, re.MULTILINE)
    factors = {name: formula for names, formula in rows for name in words(names)}
    assert set(factors) == set(OPERATIONS)
    for name, formula in factors.items():
        assert OPERATIONS[name].bus_factor(7) == pytest.approx(eval(formula, {"n": 7}))
