"""The profile of real ranks' steps: it adds up, sees who waits for whom, and changes nothing of the training."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import job, launch, said_by
from torch.distributed import _functional_collectives

from toolkit.jobs import train_lm
from toolkit.metrics.step_advice import advise
from toolkit.metrics.step_profile import StepProfile, read_profile
from toolkit.metrics.training import read_train_log

WINDOW = {"steps": 9, "profile_from": 3, "profile_steps": 5, "log_every": 100}
LATE_S = 0.1


def profile_of(run_dir: Path) -> StepProfile:
    return read_profile(run_dir / "metrics" / "profile.json")


def mean_of(profile: StepProfile, phase: str) -> float:
    found = profile.phase(phase)
    return found.mean_s if found else 0.0


def train(world: Any, config: Any) -> None:
    train_lm.main(world, config)
    # Nothing is left of the profile in torch.
    assert dist.Work.wait.__name__ == "wait" and _functional_collectives.wait_tensor.__name__ == "wait_tensor"


def train_with_a_slow_loader(world: Any, config: Any, rank: int | None) -> None:
    take = train_lm.Windows.take

    def slow(self: Any, *given: Any) -> Any:
        if rank in (None, world.rank):
            time.sleep(LATE_S)
        return take(self, *given)

    train_lm.Windows.take = slow
    train(world, config)


def test_the_phases_add_up_to_the_step_and_a_slow_loader_is_told(tmp_path: Path) -> None:
    launch(train_with_a_slow_loader, 2, tmp_path, job(**WINDOW, micro_batch=4), None)
    profile = profile_of(tmp_path)
    assert (profile.first_step, profile.steps, profile.tokens_per_step) == (3, 5, 8 * 16)
    named = {phase.name: phase for phase in profile.phases}
    assert list(named) == ["data", "forward", "backward", "communication", "optimizer", "checkpoint", "rest"]
    assert sum(phase.mean_s for phase in profile.phases) == pytest.approx(profile.step.mean_s)
    assert named["rest"].share < 0.05, "what is in no phase"
    assert named["data"].mean_s >= LATE_S and named["forward"].calls == named["data"].calls == 5
    assert advise(profile)[0].rule == "data"
    assert profile.overlap_s is not None and profile.overlap_s >= 0
    assert 2**24 < profile.peak_resident_bytes.min < 2**34 and profile.peak_device_bytes is None
    trace = json.loads((tmp_path / "metrics" / "trace.json").read_text())
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert [event["pid"] for event in steps] == [1] * 5 + [2] * 5
    assert steps[0]["ts"] == pytest.approx(steps[5]["ts"], abs=1e6), "the ranks' clocks are brought together"


@pytest.mark.parametrize("layout", [{}, {"shard": 2}], ids=["replicated", "sharded"])
def test_a_late_rank_is_named_and_the_other_ones_wait_for_it_in_communication(tmp_path: Path, layout: dict) -> None:
    launch(train_with_a_slow_loader, 2, tmp_path, job(parallel=layout, **WINDOW), 1)
    profile = profile_of(tmp_path)
    communication = profile.phase("communication")
    assert communication is not None and profile.work.max_rank == communication.ranks.min_rank == 1
    passes = profile.settings.passes
    # Both wait for the link; where ranks share cores, that takes its time.
    assert communication.ranks.max - communication.ranks.min >= 0.5 * LATE_S * passes
    late = {advice.rule: advice for advice in advise(profile)}["late rank"]
    assert late.said.startswith("rank 1 works") and late.said.endswith("most of it in data")


def _delayed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The exchange of a bucket, behind a link that takes LATE_S."""
    gradients, future = bucket.buffer().div_(2), torch.futures.Future()
    work = dist.all_reduce(gradients, async_op=True)

    def arrive() -> None:
        work.wait()
        time.sleep(LATE_S)
        future.set_result(gradients)

    threading.Thread(target=arrive, name="link").start()
    return future


def train_over_a_slow_link(world: Any, config: Any) -> None:
    import toolkit.parallel.replicated as replicated
    from toolkit.comm.gradient import Reduction
    from toolkit.parallel.overlap import OverlapMeter

    def slow_hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _delayed(bucket)

    slow_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    replicated.find_reduction = lambda *given, **named: Reduction(slow_hook, "")
    theirs: list[float] = []
    seconds = OverlapMeter.seconds

    def compared(self: Any) -> float | None:
        told = self._parallel._get_ddp_logging_data()
        theirs.append((told["backward_comm_time"] - told["backward_compute_comm_overlap_time"]) / 1e9)
        return seconds(self)

    OverlapMeter.seconds = compared
    train(world, config)
    (world.run_dir / f"ddp-{world.rank}.json").write_text(json.dumps(theirs))


def test_a_slow_link_is_exposed_communication_on_all_ranks_as_ddp_itself_has_it(tmp_path: Path) -> None:
    launch(train_over_a_slow_link, 2, tmp_path, job(**WINDOW, micro_batch=4))
    profile = profile_of(tmp_path)
    communication = profile.phase("communication")
    assert communication is not None and communication.ranks.min >= 0.9 * LATE_S, (
        "the rest of the backward pass hides little"
    )
    told = json.loads((tmp_path / "ddp-0.json").read_text())
    assert len(told) >= 4 and statistics.median(told[1:]) >= 0.9 * LATE_S
    # DDP tells of each step one later; its steps and ours differ by the sum of the loss alone.
    assert statistics.median(told[1:]) == pytest.approx(communication.p50_s, rel=0.3)
    assert {phase.thread for phase in profile.beside} == {"link"}


def test_a_profile_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    losses = []
    for name, changes in (("with", {"profile_from": 1, "profile_steps": 6}), ("without", {})):
        launch(train, 3, tmp_path / name, job(steps=6, **changes))
        losses.append([record.loss_hex for record in read_train_log(tmp_path / name / "metrics" / "train.jsonl")])
        assert (tmp_path / name / "metrics" / "profile.json").exists() == (name == "with")
    assert losses[0] == losses[1] and len(losses[0]) == 6


def train_and_stop(world: Any, config: Any) -> None:
    import toolkit.train.trainer as trainer

    steps = trainer.training_steps

    def stopped(*given: Any) -> Any:
        for record in steps(*given):
            world.stop_watch.asked = record.step == 3
            yield record

    trainer.training_steps = stopped
    train(world, config)


def test_a_run_that_is_stopped_writes_the_steps_that_it_took(tmp_path: Path) -> None:
    launch(train_and_stop, 2, tmp_path, job(steps=30, profile_from=2, profile_steps=20))
    profile = profile_of(tmp_path)
    assert (profile.first_step, profile.steps) == (2, 3)
    assert mean_of(profile, "checkpoint") > 1e-4, "the save at the end is a phase"


def train_where_nothing_can_be_written(world: Any, config: Any) -> None:
    import toolkit.train.loop.profiling as profiling

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    profiling.write_trace = full
    train(world, config)


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    launch(train_where_nothing_can_be_written, 2, tmp_path, job(**WINDOW))
    assert "cannot write the step profile: [Errno 28]" in said_by(tmp_path, 0)


def wait_in_every_way(world: Any, config: Any) -> None:
    """Each kind of call that waits for another rank is communication, and only while a profile looks."""
    from toolkit.metrics.phases import Profile
    from toolkit.world.waits import waits_noted

    profile, tensor = Profile(), torch.ones(4)
    calls = (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.barrier(),
        lambda: dist.all_gather([torch.empty(4), torch.empty(4)], tensor),
        lambda: _functional_collectives.all_reduce(tensor, "sum", dist.group.WORLD) + 1,
        lambda: dist.send(tensor, 1) if world.rank == 0 else dist.recv(tensor, 0),
    )
    for number, call in enumerate(calls):
        with waits_noted(profile):
            profile.begin_step(number)
            call()
            profile.end_step()
        found = profile.steps[-1].phases
        assert list(found) == ["communication"], (number, found)
    profile.begin_step(99)
    calls[0]()
    profile.end_step()
    assert profile.steps[-1].phases == {}


def test_whatever_waits_is_communication(tmp_path: Path) -> None:
    launch(wait_in_every_way, 2, tmp_path, job())
