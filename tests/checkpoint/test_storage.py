"""HDF5 storage under plain dcp.save and dcp.load, in one process: every type and shape, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint import Checkpointer, HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf")


def save(path: Path, state: dict) -> None:
    dcp.save(state, storage_writer=HDF5StorageWriter(path))


def load(path: Path, state: dict) -> dict:
    dcp.load(state, storage_reader=HDF5StorageReader(path))
    return state


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(second)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits, so also NaNs with payloads, infinities and subnormal numbers."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * ELEMENTS[dtype].size_bytes
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(kind).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ELEMENTS)),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    transposed=st.booleans(),
)
def test_every_element_type_comes_back_bit_by_bit(dtype, shape, seed, transposed):
    tensor = random_bits(dtype, shape, seed)
    if transposed:
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        save(path, {"x": tensor})
        loaded = load(path, {"x": torch.zeros_like(tensor)})
    assert same_bits(loaded["x"], tensor)


class Counter:
    """Stateful, as DCP calls what has state_dict and load_state_dict."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict:
        return {"count": self.count, "seen": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


def test_plain_dcp_saves_modules_stateful_objects_lists_and_values(tmp_path):
    model = torch.nn.Linear(4, 3)
    state = {
        "model": model.state_dict(),
        "counter": Counter(7),
        "list": [torch.arange(3), [torch.ones(2)]],
        "name": "a/b",
        "betas": (0.9, None, True),
    }
    save(tmp_path / "x", state)
    wanted = {
        "model": torch.nn.Linear(4, 3).state_dict(),
        "counter": Counter(0),
        "list": [torch.zeros(3, dtype=torch.int64), [torch.zeros(2)]],
        "name": "",
        "betas": None,
    }
    load(tmp_path / "x", wanted)
    assert torch.equal(wanted["model"]["weight"], model.weight)
    assert wanted["counter"].count == 7
    assert wanted["list"][0].tolist() == [0, 1, 2] and wanted["list"][1][0].tolist() == [1, 1]
    assert (wanted["name"], wanted["betas"]) == ("a/b", (0.9, None, True))


def test_nothing_but_the_formats_own_files_is_written(tmp_path):
    """DCP's own metadata is a pickle; there is none here."""
    save(tmp_path / "x", {"a": torch.ones(2), "b": (1, 2)})
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        "manifest.json",
        "shard-00000-of-00001.h5",
        "shard-00000-of-00001.digest",
        "index.h5",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_values_alone_make_a_checkpoint_without_shards(tmp_path):
    save(tmp_path / "x", {"a": 1})
    assert load(tmp_path / "x", {"a": 0}) == {"a": 1}
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"manifest.json", "index.h5"}


def test_a_checkpoint_is_never_written_over(tmp_path):
    save(tmp_path / "x", {"a": torch.ones(2)})
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        save(tmp_path / "x", {"a": torch.zeros(2)})
    assert load(tmp_path / "x", {"a": torch.zeros(2)})["a"].tolist() == [1, 1]


def test_parts_of_shared_memory_are_stored_by_themselves(tmp_path):
    """A slice stores its own elements, not those of the tensor that it looks into; so do conjugates."""
    whole = torch.arange(1 << 20, dtype=torch.float32)
    conjugate = torch.tensor([1 + 2j]).conj()
    save(tmp_path / "x", {"slice": whole[10:20:3], "conjugate": conjugate})
    assert sum(path.stat().st_size for path in (tmp_path / "x").iterdir()) < 100_000
    loaded = load(tmp_path / "x", {"slice": torch.zeros(4), "conjugate": torch.zeros(1, dtype=torch.complex64)})
    assert loaded["slice"].tolist() == [10, 13, 16, 19]
    assert loaded["conjugate"].tolist() == [1 - 2j]


def test_a_slice_of_the_target_is_filled_in_place(tmp_path):
    save(tmp_path / "x", {"a": torch.arange(6.0).reshape(2, 3)})
    around = torch.full((3, 4), -1.0)
    load(tmp_path / "x", {"a": around[1:, :3]})
    assert around.tolist() == [[-1, -1, -1, -1], [0, 1, 2, -1], [3, 4, 5, -1]]


def test_the_step_is_that_of_the_folders_name(tmp_path):
    for name, said, step in [
        ("step-00000005", {}, 5),
        ("step-00000006", {"step": 6}, 6),
        ("x", {}, 0),
        ("y", {"step": 3}, 3),
    ]:
        writer = HDF5StorageWriter(tmp_path / name, **said)
        dcp.save({"x": torch.ones(3)}, storage_writer=writer, no_dist=True)
        manifest, problems = verify_fully(tmp_path / name)
        assert (manifest.step, problems) == (step, [])
    writer = HDF5StorageWriter(tmp_path / "step-00000008")
    dcp.save({"x": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "step-00000009", no_dist=True)
    assert read_manifest(tmp_path / "step-00000009").step == 9
    with pytest.raises(ToolkitError, match="is named after step 5, but `step` is 6"):
        HDF5StorageWriter(tmp_path / "step-00000005", step=6)


def test_a_checkpoint_with_another_step_than_its_name_still_loads_through_plain_dcp(tmp_path):
    """As the plain writer of older versions made them, when it was given no step."""
    save(tmp_path / "x", {"x": torch.ones(3)})
    (tmp_path / "x").rename(tmp_path / "step-00000005")
    wanted = {"x": torch.zeros(3)}
    dcp.load(wanted, storage_reader=HDF5StorageReader(tmp_path / "step-00000005"), no_dist=True)
    assert wanted["x"].tolist() == [1, 1, 1]


class RenamingPlanner(dcp.DefaultSavePlanner):
    """Renames keys, and tells the paths that they had."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {f"ema.{name}": value for name, value in self.state_dict.items()}
        self.mappings = {f"ema.{name}": path for name, path in self.mappings.items()}


def test_what_a_planner_renames_has_the_path_of_its_new_key(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "rate": 0.5}
    dcp.save(state, storage_writer=HDF5StorageWriter(tmp_path / "new"), planner=RenamingPlanner())
    manifest = read_manifest(tmp_path / "new")
    assert manifest.tensors["ema.model.w"].path == ("ema.model.w",)
    assert manifest.objects["ema.rate"].path == ("ema.rate",)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_more_dimensions_than_hdf5_has_are_refused_by_name(tmp_path, compression):
    few, many = torch.ones([1] * 32), torch.ones([1] * 33)
    alone = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
    checkpointer = Checkpointer(tmp_path, alone, compression=compression)
    with pytest.raises(ToolkitError, match=r"model\.many: has 33 dimensions; a checkpoint supports at most 32"):
        checkpointer.save(1, {"model": {"few": few, "many": many}}, {})
    checkpointer.save(2, {"model": {"few": few}}, {})
    with pytest.raises(dcp.CheckpointException) as refused:
        dcp.save({"many": many}, storage_writer=HDF5StorageWriter(tmp_path / "new", compression=compression))
    (error,) = (error for error, _ in refused.value.failures.values())
    assert isinstance(error, ToolkitError) and error.where == "many"
