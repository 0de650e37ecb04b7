"""A damaged checkpoint is found out halfway: what it wrote is put back, or the next attempt begins without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_runs import ALONE, SHARD, flip
from real_ranks import run_ranks
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.checkpoint.loading import falling_back, planned
from toolkit.checkpoint.loading.falling_back import MOST_BYTES, MOST_BYTES_EACH, StartValues
from toolkit.checkpoint.loading.planned import LoadTarget
from toolkit.checkpoint.loading.planner import refuse_differences
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.world.facts import World

SMALL, LARGE = MOST_BYTES_EACH // 4, MOST_BYTES_EACH // 4 + 1  # of four bytes each
LAST = 3_000_000  # read last, in blocks of its own


def full(value: float, **extra: Any) -> dict[str, Any]:
    return {"last": torch.full((LAST,), float(value)), **extra}


def spoil(folder: Path) -> None:
    """Damage that is found when all but the last tensor were read."""
    record = read_manifest(folder).tensors["last"]
    flip(folder / SHARD, record.pieces[0].byte_offset + record.size_bytes - 1)


def two_checkpoints(directory: Path, **only_in_newer: Any) -> None:
    """The newer one is damaged, and the older one lacks what is given."""
    checkpoints = Checkpointer(directory, ALONE)
    checkpoints.save(1, full(1), {})
    spoil(checkpoints.save(2, full(2, **only_in_newer), {}))


@pytest.fixture
def another_writes(monkeypatch):
    """No damaged checkpoint can be renamed, because another process seems to write there."""

    def refuse(*_: object) -> None:
        raise ToolkitError("another process writes here")

    monkeypatch.setattr(falling_back, "refuse_others", refuse)


def test_a_small_tensor_that_the_older_one_lacks_is_put_back(tmp_path):
    two_checkpoints(tmp_path, first=torch.ones(SMALL), steps=5)
    wanted = full(0, first=torch.full((SMALL,), 7.0), steps=3)
    loaded = Checkpointer(tmp_path, ALONE).load(wanted, optional=["first", "steps"])
    assert (loaded.step, loaded.missing) == (1, ("first", "steps"))
    assert (wanted["first"] == 7).all() and (wanted["last"] == 1).all() and wanted["steps"] == 3


def test_a_large_tensor_that_the_older_one_lacks_ends_the_attempt_and_the_next_one_succeeds(tmp_path):
    two_checkpoints(tmp_path, first=torch.ones(LARGE))
    wanted = full(0, first=torch.full((LARGE,), 7.0))
    with pytest.raises(OwnFailureError) as ended:
        Checkpointer(tmp_path, ALONE).load(wanted, optional=["first"])
    assert ended.value.message == (
        "first may be partly overwritten by the damaged checkpoint step-00000002, and step 1 does not contain the original value"
    )
    assert ended.value.where == str(tmp_path / "step-00000001") and ended.value.fix.startswith("start the job again")
    assert (tmp_path / "step-00000002.bad-0").is_dir()
    wanted = full(0, first=torch.full((LARGE,), 7.0))
    loaded = Checkpointer(tmp_path, replace(ALONE, attempt=1)).load(wanted, optional=["first"])
    assert (loaded.step, loaded.missing) == (1, ("first",))
    assert (wanted["first"] == 7).all() and (wanted["last"] == 1).all()


def test_a_large_tensor_that_the_older_one_holds_needs_no_copy(tmp_path):
    two_checkpoints(tmp_path)
    wanted = full(0)
    assert Checkpointer(tmp_path, ALONE).load(wanted, optional=["last"]).step == 1
    assert (wanted["last"] == 1).all()


def test_a_reader_that_cannot_put_the_damaged_one_away_is_told_to(tmp_path, another_writes):
    two_checkpoints(tmp_path, first=torch.ones(LARGE))
    with pytest.raises(OwnFailureError) as ended:
        Checkpointer(tmp_path, ALONE).load(full(0, first=torch.ones(LARGE)), optional=["first"])
    assert ended.value.fix.startswith("rename step-00000002 by hand, because this process could not")


@pytest.mark.parametrize("source_holds_it", [True, False])
def test_another_runs_checkpoint_in_place_of_a_damaged_one(tmp_path, source_holds_it):
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    spoil(Checkpointer(own, ALONE).save(2, full(2, first=torch.ones(LARGE)), {}))
    held = {"first": torch.full((LARGE,), 4.0)} if source_holds_it else {}
    source = Checkpointer(elsewhere, ALONE).save(9, full(9, **held), {})
    for attempt in (0, 1):
        wanted = full(0, first=torch.full((LARGE,), 7.0))
        checkpoints = Checkpointer(own, replace(ALONE, attempt=attempt))
        try:
            loaded = checkpoints.load(wanted, newer_than=source, otherwise=source, optional=["first"])
        except OwnFailureError as error:
            assert attempt == 0 and not source_holds_it and "step 9 does not contain" in error.message
        else:
            assert loaded.path == source and (wanted["last"] == 9).all()
            assert (wanted["first"] == (4 if source_holds_it else 7)).all()


def test_tensors_are_as_they_were_where_nothing_is_loaded(tmp_path):
    source = Checkpointer(tmp_path / "elsewhere", ALONE).save(9, full(9), {})
    spoil(Checkpointer(tmp_path, ALONE).save(2, full(2), {}))
    with pytest.raises(
        OwnFailureError,
        match=r"last may be partly overwritten .*step-00000002, and no other checkpoint has the original value",
    ):
        Checkpointer(tmp_path, ALONE).load(full(5), newer_than=source)
    wanted = full(5)
    assert Checkpointer(tmp_path, replace(ALONE, attempt=1)).load(wanted, newer_than=source) is None
    assert (wanted["last"] == 5).all()


def test_copies_are_few_and_small_and_what_may_be_missing_comes_first():
    nothing = StartValues(LoadTarget({"a": torch.empty(LARGE), "b": torch.empty(1 << 26)}, ("a", "b"), 1))
    assert nothing._copies == []
    tensors = {f"model.{number}": torch.empty(SMALL) for number in range(2 * MOST_BYTES // MOST_BYTES_EACH)}
    kept = StartValues(LoadTarget({**tensors, "optimizer": {"step": torch.zeros(1)}}, ("optimizer",), 1))
    ((copied, copies),) = kept._copies
    assert copied[0].nbytes == 4 and MOST_BYTES - MOST_BYTES_EACH < copies.nbytes <= MOST_BYTES
    assert "optimizer.step" not in kept._large


def test_small_values_that_may_be_missing_are_copied_before_large_ones():
    optimizer = {f"{number}.moment": torch.empty(SMALL - number) for number in range(2 * MOST_BYTES // MOST_BYTES_EACH)}
    state = {"optimizer": optimizer, "random": {"rank-00003": torch.zeros(5056, dtype=torch.uint8)}}
    kept = StartValues(LoadTarget(state, ("optimizer", "random"), 1))
    assert "random.rank-00003" not in kept._large and kept._large


def test_a_sparse_target_is_no_obstacle_where_nothing_is_saved(tmp_path):
    assert Checkpointer(tmp_path, ALONE).load({"a": torch.ones(3), "sparse": torch.eye(3).to_sparse()}) is None


def test_the_checkpoint_to_rename_by_hand_is_the_one_that_overwrote_tensors(tmp_path, another_writes):
    checkpoints = Checkpointer(tmp_path, ALONE, keep_last=9)
    checkpoints.save(1, full(1), {})
    (checkpoints.save(2, full(2), {}) / SHARD).unlink()
    spoil(checkpoints.save(3, full(3, first=torch.ones(LARGE)), {}))
    with pytest.raises(OwnFailureError) as ended:
        Checkpointer(tmp_path, ALONE).load(full(0, first=torch.ones(LARGE)), optional=["first"])
    assert ended.value.fix.startswith("rename step-00000003 by hand")


def on_two_ranks(folder: Path, world: World) -> list[str]:
    """What each rank says where rank 1 alone has a large part; where it cannot copy; and at the next attempt."""
    mesh = init_device_mesh("cpu", (world.size,))

    def wanted(value: float, *, held: bool = True) -> dict[str, Any]:
        own = {f"rank-{world.rank}": torch.full((LARGE if world.rank else SMALL,), value)}
        return {
            "last": distribute_tensor(torch.full((LAST,), value), mesh, [Shard(0)]),
            **({"own": own} if held else {}),
        }

    def said(attempt: int) -> str:
        tensors = wanted(7.0)
        try:
            loaded = Checkpointer(folder / "run", replace(world, attempt=attempt)).load(tensors, optional=["own"])
        except ToolkitError as error:
            return f"{type(error).__name__}: {error}"
        assert (tensors["own"][f"rank-{world.rank}"] == 7).all() and (tensors["last"].to_local() == 1).all()
        return f"step {loaded.step}"

    checkpoints = Checkpointer(folder / "run", world)
    checkpoints.save(1, wanted(1.0, held=False), {})
    newest = checkpoints.save(2, wanted(2.0), {})
    if world.rank == 0:
        piece = read_manifest(newest).tensors["last"].pieces[0]
        flip(newest / piece.file, piece.byte_offset + 4 * piece.size - 1)
    torch.distributed.barrier()
    answers = [said(1), said(2)]
    if world.rank == 1:
        planned.flatten_state_dict = lambda _: exec("raise MemoryError('no room')")
    return [*answers, said(3)]


def test_ranks_end_and_go_on_together_whichever_has_the_large_part_or_no_room(tmp_path):
    first, second = run_ranks(2, on_two_ranks, tmp_path)
    assert first == second
    overwritten, after, no_room = first
    assert overwritten.startswith("OwnFailureError") and "own.rank-1 may be partly overwritten" in overwritten
    assert after == "step 1"
    assert no_room.startswith("OwnFailureError") and "rank 1: MemoryError: no room" in no_room


def beside_broken_ones(folder: Path, world: World) -> dict[str, Any]:
    """Load where the newer checkpoints lack a file, have a shorter one, or a damaged or an empty manifest.

    Step 1 lacks a large tensor, for which a load that had begun to read a newer one would end the attempt.
    """
    mesh = init_device_mesh("cpu", (world.size,))

    def wanted(value: float) -> dict[str, Any]:
        first = {"first": torch.full((LARGE,), value)} if value != 1 else {}
        return {"last": distribute_tensor(torch.full((100,), value), mesh, [Shard(0)]), **first}

    checkpoints = Checkpointer(folder / "run", world, keep_last=9)
    saved = [checkpoints.save(step, wanted(float(step)), {}) for step in (1, 2, 3, 4, 5)]
    if world.rank == 0:
        (saved[1] / read_manifest(saved[1]).files[0].name).unlink()
        with (saved[2] / read_manifest(saved[2]).files[-1].name).open("r+b") as file:
            file.truncate(9)
        flip(saved[3] / "manifest.json", 100)
        (saved[4] / "manifest.json").write_text("")
    torch.distributed.barrier()
    tensors = wanted(0.0)
    loaded = checkpoints.load(tensors, optional=["first"])
    assert (tensors["first"] == 0).all()
    names = sorted(path.name for path in (folder / "run").glob("step-*"))
    return {"step": loaded.step, "values": tensors["last"].to_local().unique().tolist(), "names": names}


def test_two_ranks_pass_over_all_that_a_quick_check_rejects(tmp_path):
    first, second = run_ranks(2, beside_broken_ones, tmp_path)
    assert first == second
    assert (first["step"], first["values"]) == (1, [1.0])
    assert first["names"] == ["step-00000001", *(f"step-0000000{step}.bad-1" for step in (2, 3, 4, 5))]


JOB = """
import torch
from toolkit.checkpoint import Checkpointer

def main(world, config):
    tensors = {{"last": torch.zeros({last}), "first": torch.full(({large},), 7.0)}}
    loaded = Checkpointer(world.run_dir / "checkpoints", world).load(tensors, optional=["first"])
    if loaded is None:  # a life before, whose last checkpoint a disk has damaged since
        checkpoints = Checkpointer(world.run_dir / "checkpoints", world)
        checkpoints.save(1, {{"last": torch.ones({last})}}, {{}})
        folder = checkpoints.save(2, {{"last": torch.ones({last}), "first": torch.ones({large})}}, {{}})
        from toolkit.checkpoint.format.manifest_file import read_manifest
        with open(folder / "{shard}", "r+b") as file:
            file.seek(read_manifest(folder).tensors["last"].pieces[0].byte_offset + 4 * {last} - 1)
            file.write(b"x")
        raise SystemExit(9)
    assert loaded.step == 1 and (tensors["first"] == 7).all()
"""


def test_a_run_restarts_by_itself_and_goes_on_from_the_older_one(toolkit):
    (toolkit.folder / "falls.py").write_text(JOB.format(last=LAST, large=LARGE, shard=SHARD))
    job = toolkit.folder / "job.toml"
    job.write_text(
        '[job]\nentry = "falls.py:main"\nranks_per_node = 1\n[restart]\ncrashes = 2\n[env]\npass = ["PYTHONPATH"]\n'
    )
    said = toolkit("submit", str(job), "--wait")
    assert said.code == 0, said
    (attempts,) = toolkit.folder.glob("runs/*/*/attempts")
    ends = [json.loads((attempts / number / "exit.json").read_text()) for number in ("000", "001", "002")]
    assert [(end["cause"], end["next"]) for end in ends] == [
        ("crashed", "restart"), ("crashed", "restart"), ("completed", "end")
    ]  # fmt: skip
    assert "first may be partly overwritten by the damaged checkpoint step-00000002" in ends[1]["reason"]


@pytest.mark.parametrize(
    ("saved", "wanted"), [("model._orig_mod.weight", "model.weight"), ("model.weight", "model._orig_mod.weight")]
)
def test_a_name_that_differs_only_by_torch_compile_is_named(saved, wanted):
    with pytest.raises(ToolkitError) as error:
        refuse_differences({wanted: torch.zeros(2)}, {saved: [2], "model.bias": [2]}, ())
    assert (
        error.value.message
        == f"the checkpoint lacks {wanted}; it contains {saved}: torch.compile adds _orig_mod. to names"
    )
    assert error.value.fix.startswith("pass the state_dict of the compiled model")
