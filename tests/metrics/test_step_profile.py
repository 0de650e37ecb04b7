"""A profile of steps: sums and comparison of ranks, its file, its table, and each rule of the advice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.metrics.phases import PhaseSum, StepTimes
from toolkit.metrics.step_advice import advise
from toolkit.metrics.step_profile import (
    RankProfile,
    Spread,
    StepProfile,
    StepSettings,
    compare,
    read_profile,
    summarise,
    write_profile,
)
from toolkit.metrics.step_table import lines_of

MS = 10**6
USUAL = {"data": 2, "forward": 45, "backward": 45, "communication": 4, "optimizer": 2, "checkpoint": 0}


def times(number: int, phases: dict[str, int], total: int = 100) -> StepTimes:
    return StepTimes(number, total * MS, {name: PhaseSum(1, own * MS) for name, own in phases.items()})


def profile_of(*ranks: list[StepTimes], **changes: object) -> StepProfile:
    """A profile of ranks that took these steps."""
    known = [RankProfile("a", *summarise(steps), 0.003, 2**20, None) for steps in ranks]
    step, phases, work = compare(known)
    made = StepProfile(
        schema_version=1, time="", toolkit="", torch="2.13", device="cpu", ranks=len(ranks), nodes=1,
        mesh={"replicate": len(ranks), "shard": 1, "tp": 1}, settings=StepSettings(32, 2, 4, False), first_step=10,
        steps=len(ranks[0]), tokens_per_step=4096, tokens_per_s=4096 / step.mean_s, step=step, phases=phases, work=work,
        overlap_s=0.003, beside=(), peak_resident_bytes=Spread.of([2**20] * len(ranks)), peak_device_bytes=None,
        left_out=(),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def usual(**changes: int) -> list[StepTimes]:
    phases = USUAL | changes
    return [times(number, phases, max(100, sum(phases.values()))) for number in range(20)]


def test_a_ranks_phases_add_up_to_its_steps() -> None:
    steps = [times(number, {"forward": 40 + number, "own": 5}, 100 + number) for number in range(21)]
    step, phases = summarise(steps)
    assert [phase.name for phase in phases] == ["forward", "own", "rest"]
    forward = phases[0]
    assert (forward.calls, forward.p50_s, forward.p95_s) == (21, 0.05, 0.059)
    assert forward.total_s == pytest.approx(21 * 0.05) and forward.mean_s == pytest.approx(0.05)
    assert sum(phase.total_s for phase in phases) == pytest.approx(step.total_s)
    assert sum(phase.share for phase in phases) == pytest.approx(1.0)


def test_ranks_are_compared_and_one_without_a_phase_counts_as_zero() -> None:
    late = [times(1, {"forward": 80}), times(2, {"forward": 80})]
    early = [times(1, {"forward": 20, "communication": 60}), times(2, {"forward": 20, "communication": 60})]
    _, phases, work = compare([RankProfile("a", *summarise(steps), None, 1, None) for steps in (early, late, early)])
    named = {phase.name: phase for phase in phases}
    assert named["communication"].ranks == Spread(0.0, 0.06, 0.06, 1, 0)
    assert named["communication"].share == pytest.approx(0.4) and named["communication"].mean_s == pytest.approx(0.04)
    assert (work.min, work.median, work.max) == pytest.approx((0.04, 0.04, 0.1)) and work.max_rank == 1
    assert sum(phase.share for phase in phases) == pytest.approx(1.0)


def test_the_file_is_read_back_and_another_one_is_refused_by_key(tmp_path: Path) -> None:
    path, profile = tmp_path / "metrics" / "profile.json", profile_of(usual(), usual())
    with pytest.raises(NotFoundError, match=r"no step profile found.*Fix: set train\.profile_steps"):
        read_profile(path)
    write_profile(path, profile)
    assert read_profile(path) == profile
    path.write_text(path.read_text().replace('"nodes": 1', '"nodes": "1"'))
    with pytest.raises(
        ToolkitError, match=r"profile\.json:nodes: '1' is not a valid value at this position of a step profile"
    ):
        read_profile(path)


RULES = {
    "data": ({"data": 15, "forward": 32}, "data", "15.0 % of the step (limit 10.0 %): raise data.workers"),
    "communication": (
        {"communication": 50},
        "communication",
        "exposed communication takes 34.7 % of the step (limit 20.0 %)",
    ),
    "bubble": ({"bubble": 20}, "bubble", "larger train.batch or a smaller train.micro_batch"),
    "optimizer": ({"optimizer": 40}, "optimizer", "fused=True"),
    "checkpoint": ({"checkpoint": 12}, "checkpoint", "raise checkpoint.every_steps"),
    "rest": ({"forward": 30}, "rest", "17.0 % of the step (limit 10.0 %): raise train.log_every"),
}


@pytest.mark.parametrize(("changes", "rule", "said"), RULES.values(), ids=RULES)
def test_a_phase_above_its_limit_is_told_and_no_other(changes: dict[str, int], rule: str, said: str) -> None:
    (advice,) = advise(profile_of(usual(**changes), usual(**changes)))
    assert advice.rule == rule and said in advice.line and advice.value > advice.limit


def test_below_the_limits_nothing_is_told() -> None:
    profile = profile_of(usual(), usual())
    assert advise(profile) == ()
    assert list(lines_of(profile))[-1] == "what to change: nothing; no phase is above its limit"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_late_rank_is_named_with_the_phase_that_makes_it_late(ranks: int) -> None:
    late, early = usual(data=32, forward=15), usual(communication=34, forward=15)
    advice = advise(profile_of(*[early] * (ranks - 1), late))
    (told,) = [one for one in advice if one.rule == "late rank"]
    assert f"rank {ranks - 1} works 30.00 ms per step longer than the others, 30.0 % of the step" in told.said
    assert told.said.endswith("most of it in data")


@pytest.mark.parametrize(
    ("mesh", "nodes", "said"),
    [
        ({"replicate": 4}, 2, 'parallel.reduction = "hierarchical"'),
        ({"replicate": 1, "shard": 4}, 1, "a smaller parallel.zero"),
        ({"replicate": 2, "tp": 2}, 1, "fewer parallel.tp ranks"),
    ],
)
def test_what_to_do_about_communication_depends_on_the_mesh(mesh: dict[str, int], nodes: int, said: str) -> None:
    ranks = [usual(communication=50)] * 4
    (advice,) = advise(profile_of(*ranks, mesh=mesh, nodes=nodes))
    assert said in advice.change and "a larger train.batch" in advice.change


def test_waiting_for_the_first_stage_at_the_end_of_a_step_is_the_bubble_too() -> None:
    early, late = usual(communication=4, forward=85), usual(communication=64, forward=25)
    for mesh, rule in (({"replicate": 2}, "communication"), ({"replicate": 1, "pp": 2}, "bubble")):
        rules = [one.rule for one in advise(profile_of(late, early, late, early, mesh=mesh)) if one.rule != "late rank"]
        assert rules == [rule]


def test_no_advice_enlarges_the_bubble_of_a_pipeline() -> None:
    """Larger micro-batches are fewer, so that stages idle longer."""
    for mesh in ({"replicate": 2}, {"replicate": 2, "pp": 2}):
        ranks = [usual(communication=50, bubble=20)] * 4
        lines = [one.line for one in advise(profile_of(*ranks, mesh=mesh, tokens_per_step=1024))]
        enlarging = [
            line for line in lines if "a larger train.micro_batch" in line or "raise train.micro_batch" in line
        ]
        assert bool(enlarging) is ("pp" not in mesh)


def test_small_passes_are_told_where_they_can_grow_on_the_cpu_alone() -> None:
    small = profile_of(usual(), usual(), tokens_per_step=1024)  # 4 passes on each of 2 ranks
    (advice,) = advise(small)
    assert advice.rule == "small passes" and "a micro-batch has 128 tokens (limit 256)" in advice.said
    assert advise(dataclasses.replace(small, device="cuda")) == ()
    assert advise(dataclasses.replace(small, settings=StepSettings(8, 0, 1, False))) == ()


def test_unsteady_steps_are_told() -> None:
    disturbed = [*usual()[:17], *(times(number, USUAL, 300) for number in range(3))]
    told = {advice.rule: advice for advice in advise(profile_of(disturbed, disturbed))}
    assert "3.0 times as long as the median step (limit 2)" in told["unsteady"].said


def test_the_table_shows_every_phase_and_what_was_left_out() -> None:
    lines = list(lines_of(profile_of(usual(), usual(), left_out=("something",))))
    assert "on 2 x cpu, replicate 2" in lines[0]
    (forward,) = [line for line in lines if line.startswith("forward")]
    assert forward.split() == ["forward", "45.00", "45.0", "%", "45.00", "45.00", "45.00", "(0)", "45.00", "(0)"]
    assert any(line.startswith("communication, exposed") for line in lines)
    assert "40,960 tokens/s of all ranks, 4,096 tokens a step" in lines and "skipped: something" in lines
