"""`toolkit bench memory`: the parts of real ranks, predicted and measured."""

from __future__ import annotations

import json

import pytest

TINY = ("--set=args.width=64", "--set=args.layers=2", "--set=args.context=64", "--set=args.max_bytes=100000")
LARGER = ("--set=args.width=512", "--set=args.layers=6", "--set=args.context=64", "--set=args.dropout=0.0")
COMMON = ("--site", "local", "--set=train.batch=4", "--set=train.micro_batch=1", "--json")


def test_static_parts_are_predicted_to_the_byte(toolkit):
    result = toolkit("bench", "memory", "train_lm", "-n", "1", *TINY, *COMMON)
    (rank,) = json.loads(result.out)["ranks"]
    parameters, state = rank["parts"]["parameters"], rank["parts"]["optimizer state"]
    assert rank["why_not"] == "" and parameters["predicted"] == parameters["measured"] > 4 * 100_000
    assert 2 * parameters["measured"] <= state["predicted"] == state["measured"]
    assert rank["parts"]["gradients"]["predicted"] == rank["parts"]["gradients"]["measured"] == parameters["measured"]
    assert rank["phases"].keys() == {"forward", "backward", "optimizer"}
    assert rank["peak"]["predicted"] > 4 * parameters["predicted"], "with the activations of the backward pass"
    table = toolkit("bench", "memory", "--result", "last")
    assert "peak in backward" in table.out and "error" in table.out


@pytest.mark.evidence
def test_a_resumed_run_measures_its_second_step_and_one_of_a_single_step_has_only_the_parts(toolkit):
    settings = ("--set=train.measure_memory=true", "--set=train.steps=1", "--set=train.batch=4", *TINY)
    toolkit.ok("run", "train_lm", "-n", "1", "--site", "local", *settings)
    for steps in (1, 3):
        if steps > 1:
            toolkit.ok("resume", "last", "--here", f"--set=train.steps={steps}")
        (rank,) = json.loads(toolkit.ok("bench", "memory", "--result", "last", "--json"))["ranks"]
        assert rank["parts"]["optimizer state"]["measured"] > 0
        assert (rank["peak"]["measured"] is None) == (steps == 1)


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        ("1", ["train.recompute=every"]), ("1", ["train.offload=optimizer"]), ("2", []),
        ("2", ["parallel.shard=2"]), ("2", ["parallel.shard=2", "parallel.zero=1"]), ("2", ["parallel.tp=2"]),
        ("2", ["parallel.pp=2", "parallel.balance=parameters"]),
    ],
)  # fmt: skip
def test_peaks_are_predicted_within_5_percent(toolkit, monkeypatch, ranks, layout):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [f"--set={one}" for one in layout]
    found = json.loads(toolkit("bench", "memory", "train_lm", "-n", ranks, *LARGER, *COMMON, *settings).out)
    for rank in found["ranks"]:
        assert rank["peak"]["predicted"] == pytest.approx(rank["peak"]["measured"], rel=0.05), rank["phases"]
