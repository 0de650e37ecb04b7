"""Advice: from what a run recorded, kept in its folder, applied to the next attempt only, and measured afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import pytest
from sampling import sampled
from step_windows import NOW_S, same, window

from toolkit.metrics.limits import limit
from toolkit.metrics.verdicts import Severity, VerdictKind, VerdictLog, clear_verdict, raise_verdict
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import BACKWARD, DATA, EXPOSED, FORWARD, OPTIMIZER, STEP
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.advise import mann_whitney, measured_gains

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "run-directory.schema.json").read_text())
DATA_KEYS = "[data]\nworkers = 2\n"


def write_windows(run: RunDirectory, attempt: int, times_s: list[float], **metrics: float) -> None:
    shares = {FORWARD: 0.3, BACKWARD: 0.3, EXPOSED: 0.05, OPTIMIZER: 0.05, DATA: 0.25} | metrics
    file = WindowFile(run.attempt(attempt).windows_file(0), "n0")
    for number, step_s in enumerate(times_s):
        values = {STEP: same(step_s), **{name: same(share * step_s) for name, share in shares.items()}}
        file.append([window(rank, number, host="n0", **values) for rank in (0, 1)])


@pytest.fixture
def run(toolkit) -> RunDirectory:
    run = toolkit.submit(toolkit.job("true", more=DATA_KEYS), "-n", "2")
    toolkit.ok("wait", "last")
    return run


def advice_of(toolkit) -> dict[str, dict]:
    return {one["rule"]: one for one in json.loads(toolkit.ok("advise", "last", "--json"))["advice"]}


def test_p_is_that_of_scipy_with_ties_and_without() -> None:
    """scipy.stats.mannwhitneyu(..., method="asymptotic") of scipy 1.17.1, rounded."""
    assert mann_whitney([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]) == pytest.approx(0.005075, abs=1e-6)
    assert mann_whitney([1, 2, 2, 3], [2, 3, 4, 4, 5]) == pytest.approx(0.0785459, abs=1e-6)
    assert mann_whitney([5, 5, 5], [5, 5]) == 1.0 and mann_whitney([1, 4], [2, 3]) == 1.0


def test_waiting_for_data_gets_a_setting_with_evidence_and_formula(toolkit, run) -> None:
    write_windows(run, 0, [0.2] * 3)
    one = advice_of(toolkit)["data"]
    assert one["settings"] == ["data.workers=4"] and one["is_neutral"] and one["effort"] == "low"
    assert one["evidence"] == pytest.approx({"data_share": 0.25, "step_s": 0.2}) and one["source"] == "windows"
    assert one["gain"] == pytest.approx(0.25) and one["formula"] == "min(share, 1 - 2/4)"
    out = toolkit.ok("advise", "last")
    assert "waiting for samples takes 25.0 % of the step (limit 10.0 %)" in out and "--set data.workers=4" in out


def test_a_script_that_sets_no_workers_gets_no_setting_for_them(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"), "-n", "2")
    toolkit.ok("wait", "last")
    write_windows(run, 0, [0.2] * 3)
    one = advice_of(toolkit)["data"]
    assert one["settings"] == [] and not one["is_neutral"] and one["gain"] == pytest.approx(0.25)
    assert "data.workers" not in toolkit.ok("advise", "last", "--apply")


def test_only_the_slowest_ranks_wait_counts_as_communication(toolkit, run) -> None:
    file = WindowFile(run.attempt(0).windows_file(0), "n0")
    file.append([window(0, **{EXPOSED: same(0.1)}), window(1, **{EXPOSED: same(0.001)})])
    assert "communication" not in advice_of(toolkit)


@pytest.mark.parametrize(("algorithm", "is_proposed"), [("none", True), ("int8", False)])
def test_compression_is_proposed_to_runs_that_do_not_compress(toolkit, algorithm, is_proposed) -> None:
    keys = ("--set=parallel.replicate=2", f"--set=gradient_compression.algorithm={algorithm}")
    run = toolkit.submit(toolkit.job("true"), "-n", "2", *keys)
    toolkit.ok("wait", "last")
    for node in (0, 1):
        file = WindowFile(run.attempt(0).windows_file(node), f"n{node}")
        file.append([window(node, host=f"n{node}", **{EXPOSED: same(0.1)})])
    change = advice_of(toolkit)["communication"]["change"]
    assert ('algorithm = "auto"' in change) == ("hierarchical" in change) == is_proposed


def test_raised_verdicts_come_first_and_cleared_ones_gain_nothing(toolkit, run) -> None:
    write_windows(run, 0, [0.2] * 3, **{DATA: 0.15})
    slow = raise_verdict(
        VerdictKind.STRAGGLER, Severity.CRITICAL, "rank 1 works 95 % longer", "exclude n0", time_s=NOW_S,
        ranks=[1], evidence={"excess": 0.95}, cost_s_per_hour=1000,
    )  # fmt: skip
    leak = raise_verdict(VerdictKind.GPU_HOT, Severity.WARNING, "hot", "cool it", time_s=NOW_S, cost_s_per_hour=3000)
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        for verdict in (leak, slow, clear_verdict(leak, NOW_S + 60)):
            log.write(verdict)
    found = advice_of(toolkit)
    assert next(iter(found)) == "straggler" and found["straggler"]["gain"] == pytest.approx(1000 / 3600)
    assert found["gpu_hot"]["gain"] == 0 and found["gpu_hot"]["said"] == "hot (over now)"
    assert len(found) <= 5


def test_apply_prints_a_resume_with_neutral_settings_only_and_stores_each_advice_once(toolkit, run) -> None:
    write_windows(run, 0, [0.2] * 3, **{OPTIMIZER: 0.2})
    lines = toolkit.ok("advise", "last", "--apply").splitlines()
    assert lines[-1] == f"toolkit resume {run.run_id} --set data.workers=4"
    toolkit.ok("advise", "last")
    toolkit.ok("advise", "last", "--apply")
    kept = [json.loads(line) for line in (run.metrics / "advice.jsonl").read_text().splitlines()]
    assert [one["advice"]["rule"] for one in kept if one["is_applied"]] == ["data"]
    assert len(kept) == len({json.dumps([one["is_applied"], one["advice"]["rule"]]) for one in kept})
    for one in kept:
        jsonschema.validate(one, {**SCHEMA, "$ref": "#/$defs/advice"})


@pytest.mark.parametrize(
    ("after", "outcome"),
    sampled(
        [
            ([0.2 - 0.04 + 0.001 * (n % 3) for n in range(9)], "measured 20 % (p ="),
            ([0.2 + 0.001 * (n % 3) for n in range(9)], "no measurable change (p = 1)"),
            ([0.2 + 0.04 + 0.001 * (n % 3) for n in range(9)], "measured -20 % (p ="),
            ([0.2] * 4, "not measured yet: 8 blocks of steps before, 3 after"),
        ],
        lambda case: case[1].startswith(("measured 20", "not")),
    ),
)
def test_what_a_change_gained_is_beside_its_prediction(toolkit, run, after: list[float], outcome: str) -> None:
    write_windows(run, 0, [0.2 + 0.001 * (n % 3) for n in range(9)])
    toolkit.ok("advise", "last", "--apply")
    assert measured_gains(run) == []
    toolkit.ok("resume", run.run_id, "--set", "data.workers=4", "--wait")
    write_windows(run, 1, after, **{DATA: 0.01})
    out = toolkit.ok("advise", "last")
    assert f"data.workers=4 since attempt 0: predicted 25 %, {outcome}" in out


def test_another_number_of_ranks_and_other_changes_are_named(toolkit, run) -> None:
    write_windows(run, 0, [0.2] * 9)
    toolkit.ok("advise", "last")
    toolkit.ok("resume", run.run_id, "--set", "data.workers=4", "-n", "1", "--wait")
    write_windows(run, 1, [0.1] * 9)
    (row,) = measured_gains(run)
    assert row["outcome"].startswith("not comparable: 2 ranks before, 1 after, together with job.")


def test_what_cannot_be_advised_is_refused_with_the_reason(toolkit, run) -> None:
    said = toolkit("advise", "last")
    assert said.code == 1 and "has recorded no windows of steps" in said.err and "observe.record" in said.err
    write_windows(run, 0, [0.2] * 3)
    (run.metrics / "advice.jsonl").write_text('{"time": "x", "attempt": "0"}\n')
    said = toolkit("advise", "last")
    assert (
        said.code == 2 and "advice.jsonl:1: not a stored advice record" in said.err and "delete this line" in said.err
    )
    assert toolkit("stacks", "last").code == 1 and toolkit("advise", "nothing").code == 4
    said = toolkit("trace", "last", "-o", toolkit.folder / "t.json")
    assert said.code == 4 and "has no trace" in said.err
    said = toolkit("trace", "last", "-o", toolkit.folder / "t.json", "--kernels", "2")
    assert said.code == 1 and "cannot record kernels" in said.err
    assert toolkit("trace", "last", "-o", toolkit.folder / "no" / "t.json").code == 2


@pytest.mark.evidence
@pytest.mark.timeout(900)
def test_fewer_saves_of_real_ranks_are_measurably_faster(toolkit) -> None:
    settings = [
        f"--set={setting}"
        for setting in (
            "train.steps=1000000", "args.width=32", "args.layers=1", "args.context=16", "checkpoint.every_steps=3",
            "args.max_bytes=100000", "data.workers=0", "train.micro_batch=0",
        )
    ]  # fmt: skip
    run = toolkit.submit(Path("train_lm"), "-n", "2", *settings)
    blocks = int(limit("advice.blocks")) + 3
    for attempt in (0, 1):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and _blocks(run, attempt) < blocks:
            time.sleep(2)
        toolkit.ok("stop", run.run_id)
        toolkit("wait", run.run_id)
        if attempt == 0:
            command = toolkit.ok("advise", run.run_id, "--apply").splitlines()[-1]
            assert "checkpoint.every_s=" in command or "checkpoint.background=true" in command
            toolkit.ok(*command.split()[1:])
    rows = [row for row in measured_gains(run) if row["settings"][0].startswith("checkpoint.")]
    # How much it is depends on the other load of this machine, during minutes.
    assert rows and all(row["outcome"].startswith("measured ") and row["measured"] > 0 for row in rows), rows


def _blocks(run: RunDirectory, attempt: int) -> int:
    from toolkit.runs.advise import _block_times

    return len(_block_times(run.attempt(attempt))) if run.attempt(attempt).windows.exists() else 0
