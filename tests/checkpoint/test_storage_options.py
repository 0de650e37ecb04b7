"""Options of plain dcp.save with the HDF5 storage: overwriting, cached plans, saving without collectives, two ranks."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kinds_of_state import KINDS, blank, is_same
from real_ranks import run_ranks
from sampling import sampled
from test_kinds_of_state import BY_DCP, REFUSED
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.folder import commit
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_plans(monkeypatch.setattr)


def forget_plans(set_attribute: Any = setattr) -> None:
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached")]:
        set_attribute(SavePlanner, name, {})


def save(path: Path, number: int, *, overwrite: bool = False, **options: Any) -> None:
    state = {"a": torch.full((5,), float(number)), "b": {"c": (number, b"x")}}
    dcp.save(state, storage_writer=HDF5StorageWriter(path, overwrite=overwrite), **options)


def number_in(path: Path) -> int:
    """The number that `save` wrote, which must be the same everywhere."""
    state: dict[str, Any] = {"a": torch.zeros(5), "b": {"c": None}}
    dcp.load(state, storage_reader=HDF5StorageReader(path))
    (number,) = {*state["a"].tolist(), state["b"]["c"][0]}
    return int(number)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwriting_replaces_only_a_checkpoint(tmp_path: Path, monkeypatch, can_exchange: bool) -> None:
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(commit, "_exchanged", lambda one, other: False)
    path = tmp_path / "x"
    for number in range(3):
        save(path, number, overwrite=True)
        assert number_in(path) == number and verify_fully(path)[1] == []
    await_deletions(60)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("years of work")
    with pytest.raises(dcp.CheckpointException, match="is not a checkpoint, so `overwrite` does not replace it"):
        save(tmp_path / "own", 1, overwrite=True)
    assert (tmp_path / "own" / "thesis.tex").read_text() == "years of work"


def test_an_old_checkpoint_survives_a_failed_and_an_interrupted_replacement(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x"
    save(path, 1)
    monkeypatch.setattr(commit, "_exchanged", lambda one, other: False)
    with monkeypatch.context() as broken:
        broken.setattr(commit, "_rename_to_final", lambda part, final: (_ for _ in ()).throw(OSError(5, "broken disk")))
        with pytest.raises(dcp.CheckpointException, match="broken disk"):
            save(path, 2, overwrite=True)
    assert number_in(path) == 1
    path.rename(tmp_path / "x.replaced-0")  # as a kill between the two renames leaves it
    commit.put_back(path, 0)
    assert number_in(path) == 1
    save(path, 3, overwrite=True)
    assert number_in(path) == 3


_SAVING = """
import sys, itertools, warnings, logging
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_storage_options import save
for number in itertools.count(int(sys.argv[1])):
    save(Path("x"), number, overwrite=True)
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", sampled([1, 30], lambda case: case[0] == 1))
def test_killed_saves_leave_the_old_or_the_new_checkpoint(tmp_path: Path, kills: int) -> None:
    done = 0
    for _ in range(kills):
        arguments = [sys.executable, "-c", _SAVING, str(done + 1), *sys.path]
        with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as saving:
            assert saving.stdout is not None and saving.stdout.readline()
            time.sleep(random.uniform(0, 0.3))
            saving.send_signal(signal.SIGKILL)
            printed = saving.stdout.read().split()
        last = int(printed[-1]) if printed else done + 1
        found = number_in(tmp_path / "x")
        assert found in (last, last + 1) and verify_fully(tmp_path / "x")[1] == []
        done = found


def test_cached_plans_serve_every_path_and_both_storages(tmp_path: Path) -> None:
    def planner() -> dcp.DefaultSavePlanner:
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    for number in range(3):
        save(tmp_path / str(number), number, planner=planner())
        assert number_in(tmp_path / str(number)) == number
    forget_plans()
    state = {"a": torch.zeros(5), "b": {"c": (0, b"x")}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"), planner=planner())
    save(tmp_path / "after", 4, planner=planner())
    assert number_in(tmp_path / "after") == 4
    forget_plans()
    save(tmp_path / "before", 5, planner=planner())
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torch 2"), planner=planner())
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "torch 2"))
    dcp.save({"a": torch.ones(7)}, storage_writer=HDF5StorageWriter(tmp_path / "other"), planner=planner())
    target = {"a": torch.zeros(7)}
    dcp.load(target, storage_reader=HDF5StorageReader(tmp_path / "other"))
    assert target["a"].tolist() == [1] * 7


def in_two_ranks(folder: Path, world: World) -> dict[str, Any]:
    """Save every kind, cached plans and checkpoints of single ranks; return what went wrong."""
    mesh = init_device_mesh("cpu", (world.size,))
    skipped = REFUSED.keys() | BY_DCP | {"stateful"}  # DCP calls only top-level objects stateful
    kinds = {kind: KINDS[kind]() for kind in KINDS.keys() - skipped}
    state = {"kinds": kinds, "sharded": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    target = {"kinds": {kind: blank(value) for kind, value in kinds.items()}, "sharded": state["sharded"] * 0}
    dcp.save(state, storage_writer=HDF5StorageWriter(folder / "kinds"))
    dcp.load(target, storage_reader=HDF5StorageReader(folder / "kinds"))
    changed = [kind for kind, value in kinds.items() if not is_same(value, target["kinds"][kind])]
    whole = target["sharded"].full_tensor().tolist()
    cached = []
    for number in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        save(folder / f"cached-{number}", number, planner=planner, overwrite=True)
        cached.append(number_in(folder / f"cached-{number}"))
    own = {"own": torch.full((3,), float(world.rank)), "rank": (world.rank,)}
    dcp.save(own, storage_writer=HDF5StorageWriter(folder / "alone"), use_collectives=False)
    back = {"own": torch.zeros(3), "rank": None}
    dcp.load(back, storage_reader=HDF5StorageReader(folder / "alone"))
    try:
        dcp.save({"o": object()}, storage_writer=HDF5StorageWriter(folder / "refused"))
        refused = ""
    except dcp.CheckpointException as error:
        refused = str(all(type(failure) is ToolkitError for failure, _ in error.failures.values()))
    dist.barrier()
    return {"changed": changed, "whole": whole, "cached": cached, "own": is_same(own, back), "refused": refused}


def test_two_ranks_save_every_kind_with_cached_plans_and_without_collectives(tmp_path: Path) -> None:
    for answer in run_ranks(2, in_two_ranks, tmp_path):
        assert answer == {
            "changed": [],
            "whole": [0, 1, 2, 3, 4, 5, 6, 7],
            "cached": [1, 2, 3],
            "own": True,
            "refused": "True",
        }
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["rank-00000", "rank-00001"]
    for folder in (tmp_path / "alone").iterdir():
        assert verify_fully(folder)[1] == []
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        save(tmp_path / "alone", 1)
