"""docs/bench.md: its commands run as written, with smaller sizes, and its tables name every key, option, operation and rule."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.comm.bench.request import BenchRequest
from toolkit.metrics import collectives, step_advice, step_profile
from toolkit.metrics.collectives import OPERATIONS
from toolkit.metrics.limits import limit

PAGE, STEP_PAGE = re.split(
    r"(?=^# Where)", (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
SMALL_STEP = " --set args.layers=1 --set args.width=32 --set args.context=16 --set args.max_bytes=100000 -n 1"
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "2 * (n - 1) / n": lambda n: 2 * (n - 1) / n,
    "(n - 1) / n": lambda n: (n - 1) / n,
    "1": lambda n: 1.0,
}
SMALL = " --sizes 64..512 --factor 8 --iterations 1 --warmup 0"


def commands_of(page: str) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run(line: str, folder: Path) -> str:
    bin_folder = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT_", "SLURM_"))}
    environment = {**kept, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def shortened(line: str) -> str:
    """A command of the page with small sizes, on two ranks or one; a submission goes to this machine, which is one node."""
    if "--result" in line:
        return line
    command, into, file = line.partition(" > ")
    if " submit " in command:
        return command.replace("-N 4", "--site local --wait --set args.sizes=256..256 --set args.iterations=1")
    if "collectives" in command:
        return command.replace("--ranks 4", "--ranks 2") + SMALL + into + file
    return (
        command
        + SMALL_STEP
        + (" --steps 3 --warmup 1" if "bench" in command else " --set train.steps=25")
        + into
        + file
    )


@pytest.mark.evidence
def test_a_table_is_measured_as_written(tmp_path: Path) -> None:
    line = commands_of(PAGE)[1]
    assert line == "toolkit bench collectives --json > table.json"
    run(shortened(line), tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["series"][0]["operation"] == "all_reduce"


@pytest.mark.evidence
def test_a_step_is_measured_as_written(tmp_path: Path) -> None:
    line = commands_of(STEP_PAGE)[0]
    assert line == "toolkit bench step"
    assert run(shortened(line), tmp_path).startswith("steps 2 to 4 on 1 x cpu")


@pytest.mark.evidence  # each command imports torch, most of them on several ranks
@pytest.mark.timeout(400)
def test_all_commands_about_collectives_work_as_written(tmp_path: Path) -> None:
    lines = [line for line in commands_of(PAGE) if "collectives" in line]
    assert len(lines) == 6
    outputs = [run(shortened(line), tmp_path) for line in lines]
    assert json.loads((tmp_path / "table.json").read_text())["series"][0]["operation"] == "all_reduce"
    assert "# Collective test starting: sendrecv_perf" in outputs[3]
    assert "# Collective test starting: sendrecv_perf" in outputs[5], "what the command before submitted"
    assert {"all_reduce.svg", "picture.svg"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.evidence
@pytest.mark.timeout(400)
def test_all_commands_about_steps_work_as_written(tmp_path: Path) -> None:
    """On one rank, because each rank imports torch; tests/cli/test_bench_step.py has two."""
    lines = commands_of(STEP_PAGE)
    assert len(lines) == 5
    outputs = [run(shortened(line), tmp_path) for line in lines]
    assert outputs[0].startswith("steps 2 to 4 on 1 x cpu") and outputs[2].startswith("steps 2 to 4 on 1 x cpu")
    assert outputs[4].startswith("steps 5 to 24 on 1 x cpu")


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_][a-z_0-9]*)`", text))


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
        assert OPERATIONS[name].bus_factor(7) == pytest.approx(BUS_FACTORS[formula](7))


def test_every_key_of_a_step_is_on_the_page_and_no_other() -> None:
    section = STEP_PAGE[STEP_PAGE.index("## JSON of a step") :]
    kinds = (step_profile.StepProfile, step_profile.PhaseOverRanks, step_profile.PhaseBeside, step_profile.Spread)
    kinds += (step_profile.StepSettings, step_advice.Advice)  # type: ignore[assignment]
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= words(section)
    named = words("".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert named == {field.name for field in dataclasses.fields(step_profile.StepProfile)} | {"advice"}


def test_the_limits_of_the_page_are_those_of_the_rules() -> None:
    section = STEP_PAGE[STEP_PAGE.index("## What to change") : STEP_PAGE.index("## What it costs")]
    rows = dict(re.findall(r"^\| `([a-z ]+)` \| ([^|]+) \|", section, re.MULTILINE))
    shares = {
        "data": "starvation.share", "communication": "advice.communication", "optimizer": "advice.optimizer",
        "checkpoint": "save.share", "rest": "advice.rest", "late rank": "advice.late",
    }  # fmt: skip
    for rule, name in shares.items():
        assert f"{100 * limit(name):g} %" in rows.pop(rule), rule
    assert f"under {limit('advice.pass_tokens'):g} tokens" in rows.pop("small passes")
    assert f"p95 of {limit('advice.steady_steps'):g} steps or more above twice" in rows.pop("unsteady")
    assert limit("advice.unsteady") == 2 and not rows


def test_the_phases_of_the_page_are_those_of_the_loop() -> None:
    section = STEP_PAGE[STEP_PAGE.index("## What each phase is") : STEP_PAGE.index("## What communication is")]
    assert {*step_profile.USUAL, step_profile.REST} == words(
        "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    )
