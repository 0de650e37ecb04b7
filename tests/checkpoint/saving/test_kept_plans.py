"""A plan that was kept serves only the state it was made for, and what is loaded fits what was stored, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_runs import ALONE
from real_ranks import run_ranks
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World


def save_a_part_that_shrank(folder: Path, world: World) -> list[str]:
    """What each way to save says of a local part that is not any more what its placement says."""
    mesh = init_device_mesh("cpu", (world.size,))

    def state(rows: int) -> dict[str, torch.Tensor]:
        part = DTensor.from_local(torch.ones(rows), mesh, [Shard(0)], run_check=False, shape=(8,), stride=(1,))
        return {"t": part, "z": torch.arange(3.0)}

    def in_background(checkpoints: Checkpointer, *given) -> None:
        checkpoints.save_in_background(*given)
        checkpoints.wait()

    said = []
    for save in (Checkpointer.save, in_background):
        checkpoints = Checkpointer(folder / save.__name__, world)
        save(checkpoints, 1, state(4), {})
        try:
            save(checkpoints, 2, state(2 if world.rank else 4), {})
        except ToolkitError as error:
            said.append(str(error))
        assert checkpoints.latest() == 1
    return said


def test_a_local_part_that_shrank_is_refused_on_all_ranks_at_once(tmp_path):
    first, second = run_ranks(2, save_a_part_that_shrank, tmp_path)
    assert first == second and len(first) == 2
    for line in first:
        assert "\n" not in line and "checkpoint of step 2 was not saved: rank 1: t: " in line


def test_a_tensor_under_another_path_of_the_same_name_is_stored_under_it(tmp_path):
    checkpoints, tensor = Checkpointer(tmp_path, ALONE), torch.ones(2)
    flat = checkpoints.save(1, {"model.weight": tensor}, {})
    nested = checkpoints.save(2, {"model": {"weight": tensor}}, {})
    assert read_manifest(flat).tensors["model.weight"].path == ("model.weight",)
    assert read_manifest(nested).tensors["model.weight"].path == ("model", "weight")


@pytest.mark.parametrize("save", [Checkpointer.save, Checkpointer.save_in_background])
def test_a_step_below_zero_is_refused(tmp_path, save):
    checkpoints = Checkpointer(tmp_path, ALONE)
    with pytest.raises(ToolkitError, match="-1"):
        save(checkpoints, -1, {"x": torch.ones(2)}, {})
        checkpoints.wait()
    assert list(tmp_path.glob("step-*")) == []


def test_values_come_back_under_their_own_int_keys(tmp_path):
    state = {"optimizer": {"w": {"calls": {0: 5, 12: [6, {3: 7}]}, 1: 8}, "t": torch.ones(1)}}
    Checkpointer(tmp_path, ALONE).save(1, state, {})
    wanted = {"optimizer": {"w": {"calls": {0: 0, 12: [0, {3: 0}]}, 1: 0}, "t": torch.zeros(1)}}
    checkpoints = Checkpointer(tmp_path, ALONE)
    checkpoints.load(wanted)
    assert wanted == state
    checkpoints.save(2, wanted, {})  # each key is there once


@pytest.mark.parametrize(("stored", "wanted"), [(5, torch.zeros(())), (torch.ones(()), 0)])
def test_a_tensor_and_a_value_do_not_take_each_others_place(tmp_path, stored, wanted):
    Checkpointer(tmp_path, ALONE).save(1, {"a": {"step": stored, "w": torch.ones(2)}}, {})
    tensors = {"a": {"step": wanted, "w": torch.zeros(2)}}
    with pytest.raises(ToolkitError, match=r"a\.step \(saved: .*, this job: .*\)") as refused:
        Checkpointer(tmp_path, ALONE).load(tensors)
    assert "\n" not in str(refused.value)
    assert tensors["a"]["step"] is wanted and float(wanted) == 0
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
