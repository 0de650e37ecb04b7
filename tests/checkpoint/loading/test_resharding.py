"""Four real ranks save; one, two and eight load, bit by bit. One rank's error is every rank's error."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from real_ranks import SHAPES, assert_is_step, reference, run_ranks, state

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World


def save_three_and_fail_once(folder: Path, world: World) -> dict:
    checkpoints = Checkpointer(folder / "checkpoints", world, keep_last=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step, world.rank, world.size), {"step": step, "rank": world.rank})
    broken = state(4, world.rank, world.size)
    if world.rank == 2:
        broken["random"]["rank-00002"] = torch.eye(3).to_sparse()
    with pytest.raises(ToolkitError) as caught:
        checkpoints.save(4, broken, {})
    return {"error": str(caught.value), "latest": checkpoints.latest()}


def die_while_saving(folder: Path, world: World) -> dict:
    """Rank 1 is killed when its tensors are written and its digests are not."""
    checkpoints = Checkpointer(folder / "cut", world)
    checkpoints.save(1, {"x": torch.ones(4)}, {})

    def before(event: str, arguments: tuple) -> None:
        if event == "open" and "00001-of-00002.digest" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        sys.addaudithook(before)
    checkpoints.save(2, {"own": {f"rank-{world.rank:05d}": torch.zeros(1000)}}, {})
    return {}


def load_newest(folder: Path, world: World) -> dict:
    tensors = state(None, world.rank, world.size)
    loaded = Checkpointer(folder / "checkpoints", world).load(tensors, optional=("random",))
    assert_is_step(tensors, loaded.step)
    random = int(tensors["random"][f"rank-{world.rank:05d}"][0])
    return {"step": loaded.step, "state": loaded.state, "ranks": loaded.world_size, "random": random}


def load_what_cannot_be(folder: Path, world: World) -> dict:
    """A key that is not there, a wrong shape and a damaged source: the same error on both ranks."""
    checkpoints = Checkpointer(folder / "checkpoints", world)
    newest = folder / "checkpoints" / "step-00000002"
    answers = {}
    for what, tensors in {
        "key": {"nothing": torch.zeros(1)} if world.rank == 0 else {"plain": {"even": torch.zeros(16, 8).double()}},
        "shape": {"plain": {"even": torch.zeros(16, 9)}},
        "type": {"plain": {"even": torch.zeros(16, 8, dtype=torch.int64)}},
    }.items():
        with pytest.raises(ToolkitError) as caught:
            checkpoints.load(tensors, source=newest)
        answers[what] = str(caught.value)
    # Each rank asks for a part of its own, and one part is damaged: all ranks hear of it.
    columns = state(None, world.rank, 2)["columns"]
    with pytest.raises(CorruptCheckpointError) as damaged:
        checkpoints.load({"columns": columns}, source=folder / "damaged")
    return {**answers, "damaged": str(damaged.value)}


def flip_last_data_bit(folder: Path) -> str:
    """Flip one bit in the last piece of a tensor and return the file."""
    manifest = read_manifest(folder)
    piece = manifest.tensors["columns.deep"].pieces[-1]
    path = folder / piece.file
    data = bytearray(path.read_bytes())
    data[piece.byte_offset] ^= 1
    path.write_bytes(data)
    return piece.file


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("resharding")
    return folder, run_ranks(4, save_three_and_fail_once, folder)


def test_one_rank_that_cannot_save_fails_all_and_keeps_the_last(saved):
    folder, answers = saved
    assert len({answer["error"] for answer in answers}) == 1
    assert "rank 2" in answers[0]["error"] and "random.rank-00002" in answers[0]["error"]
    assert "step 3 is the last good checkpoint" in answers[0]["error"]
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000003"]


def test_replicated_tensors_are_stored_once_and_rank_keys_by_their_rank(saved):
    manifest, problems = verify_fully(saved[0] / "checkpoints" / "step-00000003")
    assert not problems and manifest.world_size == 4
    assert manifest.state == {"step": 3, "rank": 0}
    assert {"dims": ["replicate", "shard"], "shape": [2, 2]} in manifest.mesh
    assert len(manifest.tensors["plain.even"].pieces) == 1
    assert len(manifest.tensors["hybrid.even"].pieces) == 2
    for rank in range(4):
        (piece,) = manifest.tensors[f"random.rank-{rank:05d}"].pieces
        assert piece.file == f"shard-{rank:05d}-of-00004.h5"


@pytest.mark.parametrize("size", [2, 8])
def test_another_number_of_ranks_loads_the_same_bits(saved, size):
    answers = run_ranks(size, load_newest, saved[0])
    for rank, answer in enumerate(answers):
        assert (answer["step"], answer["ranks"], answer["state"]["step"]) == (3, 4, 3)
        # A rank that was not there when it was saved keeps what it had.
        assert answer["random"] == (rank if rank < 4 else 255)


def test_one_process_without_a_group_loads_what_four_ranks_saved(saved, capfd):
    """Last, because it damages the newest checkpoint: the load falls back to the one before."""
    directory = saved[0] / "checkpoints"
    file = flip_last_data_bit(directory / "step-00000003")
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=2)
    tensors = {
        layout: {
            name: torch.zeros(shape, dtype=torch.bfloat16 if layout == "rows" else torch.float32)
            for name, shape in SHAPES.items()
        }
        for layout in ("rows", "columns", "both")
    }
    loaded = Checkpointer(directory, world).load(tensors)
    assert loaded.step == 2
    for layout in tensors.values():
        for name, tensor in layout.items():
            assert torch.equal(tensor, reference(name, tensor.dtype, 2))
    said = capfd.readouterr().err
    assert "step-00000003" in said and file in said and "block 0" in said
    assert (directory / "step-00000003.bad-2").is_dir()


def test_errors_of_loading_reach_every_rank(saved):
    folder = saved[0]
    (folder / "checkpoints" / "step-00000003.bad-2").rename(folder / "damaged")
    answers = run_ranks(2, load_what_cannot_be, folder)
    assert answers[0] == answers[1]
    assert "step-00000002: the checkpoint lacks nothing. Fix: " in answers[0]["key"]
    assert (
        "the checkpoint has other shapes: plain.even (saved: [16, 8], this job: [16, 9]). Fix: " in answers[0]["shape"]
    )
    assert "is float64 in the checkpoint but int64 in memory" in answers[0]["type"]
    assert "block 0" in answers[0]["damaged"]


def test_a_rank_killed_while_it_saves_leaves_the_last_good_checkpoint(tmp_path):
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(2, die_while_saving, tmp_path)
    (part,) = (tmp_path / "cut").glob("*.part-1-*")
    assert "shard-00001-of-00002.h5" in {path.name for path in part.iterdir()}
    wanted = {"x": torch.zeros(4)}
    world = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone", attempt=2)
    assert Checkpointer(tmp_path / "cut", world).load(wanted).step == 1
    assert wanted["x"].tolist() == [1, 1, 1, 1]
    assert not part.exists()
