"""safetensors, torch and DCP files as checkpoints: what a run begins from is what they held, bit by bit."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_runs import disk_of_one_mib
from exported import ALONE, bits, every_element, save, without_torch_in_280_mb
from real_ranks import SHAPES, reference, run_ranks, state
from safetensors.torch import save_file

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.convert.import_safetensors import CODES
from toolkit.checkpoint.convert.imports import import_checkpoint
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")


def loaded(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What a run gets that begins from the checkpoint."""
    target = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in like.items()}
    Checkpointer(folder.parent / "none", ALONE).load({"model": target}, source=folder)
    return target


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = bits(found[name]) == bits(value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The library refuses to write tensors that share memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_a_checkpoint_of_deepspeed_is_recognized_and_its_converter_named(toolkit, tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-400" / "global_step400"
    step.mkdir(parents=True)
    torch.save({"x": torch.ones(1)}, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for source in (step.parent, step):
        said = toolkit("ckpt", "import", source, tmp_path / "out")
        assert said.code == 2 and f"`python {source}/zero_to_fp32.py {source} OUT`" in said.err
    (step.parent / "zero_to_fp32.py").touch()
    said = toolkit("ckpt", "import", step, tmp_path / "out")
    assert f"`python {step.parent}/zero_to_fp32.py {step.parent} OUT`" in said.err


def test_a_save_of_dcp_that_never_ended_is_told_so(toolkit, tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(4)}, checkpoint_id=tmp_path / "killed")
    (tmp_path / "killed" / ".metadata").unlink()
    for options in ([], ["--format", "dcp"]):
        said = toolkit("ckpt", "import", tmp_path / "killed", tmp_path / "out", *options)
        assert said.code == 2 and "no .metadata, which is written last: this save never ended" in said.err


def test_what_the_import_of_a_trainers_folder_omits_is_named(toolkit, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-120"
    source.mkdir()
    save_file({"weight": torch.ones(2)}, source / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json", "config.json"):
        (source / name).touch()
    said = toolkit("ckpt", "import", source, tmp_path / "out")
    assert said.code == 0
    assert (
        f"omitted these files of {source}: optimizer.pt, rng_state_0.pth, scheduler.pt, trainer_state.json\n"
        in said.err
    )


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_run_begins_from_what_was_imported_bit_by_bit(toolkit, tmp_path: Path, kind: str) -> None:
    model: dict[str, Any] = every_element(CODES if kind == "safetensors" else ELEMENTS)
    if kind == "safetensors":
        source = tmp_path / "m.safetensors"
        save_file(unshared(model), source)
    elif kind == "torch":
        source = tmp_path / "m.pt"
        torch.save(model, source)
    else:
        source = tmp_path / "dcp"
        dcp.save(model, storage_writer=dcp.FileSystemWriter(source), no_dist=True)
    said = toolkit("ckpt", "import", source, tmp_path / "new", "--under", "model", "--step", "12")
    final = tmp_path / "new" / "step-00000012"
    assert (said.code, said.out) == (0, f"{final}\n") and f"imported {len(model)} tensors from {source}" in said.err
    assert verify_fully(final)[1] == []
    assert_same(loaded(final, model), model)
    assert read_manifest(final).step == 12 and (final / "index.h5").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_there_and_back_again(toolkit, tmp_path: Path, kind: str) -> None:
    model = every_element(CODES if kind == "safetensors" else ELEMENTS)
    first = save(tmp_path, {"model": model, "lr": 0.5, "groups": [{"betas": (0.9, 0.95)}, {"betas": (0.5, 0.6)}]})
    toolkit.ok("ckpt", "export", first, tmp_path / "out", "--format", kind, "--only", "")
    toolkit.ok("ckpt", "import", tmp_path / "out", tmp_path / "back", "--format", kind)
    before, after = read_manifest(first), read_manifest(tmp_path / "back" / "step-00000000")
    assert after.tensors.keys() == before.tensors.keys()
    if kind != "safetensors":
        assert {key: record.path for key, record in after.tensors.items()} == {
            key: record.path for key, record in before.tensors.items()
        }
        assert after.objects == before.objects and after.objects["groups.1.betas"].value == (0.5, 0.6)
    assert_same(loaded(tmp_path / "back" / "step-00000000", model), model)


def save_with_dcp(folder: Path, world: World) -> None:
    writer = dcp.FileSystemWriter(folder / "dcp", single_file_per_rank=True)
    dcp.save(state(3, world.rank, world.size), storage_writer=writer)


def test_dcp_shards_of_four_ranks_are_taken_piece_by_piece(toolkit, tmp_path: Path) -> None:
    run_ranks(4, save_with_dcp, tmp_path)
    toolkit.ok("ckpt", "import", tmp_path / "dcp", tmp_path / "new")
    final = tmp_path / "new" / "step-00000000"
    manifest = read_manifest(final)
    assert len(manifest.tensors["rows.odd"].pieces) == 4 and manifest.objects["lr"].value == 0.5
    target = {
        key: torch.zeros(record.shape, dtype=getattr(torch, record.dtype)) for key, record in manifest.tensors.items()
    }
    Checkpointer(tmp_path / "none", ALONE).load(target, source=final)
    for layout in ("plain", "rows", "columns", "hybrid", "both"):
        for name in SHAPES:
            found = target[f"{layout}.{name}"]
            assert bits(found) == bits(reference(name, found.dtype, 3)), (layout, name)


def test_the_shards_of_hugging_face_are_one_checkpoint(toolkit, tmp_path: Path) -> None:
    model = {f"model.layer.{n}": torch.full((100,), float(n)) for n in range(5)}
    save(tmp_path, {"model": {f"model.layer.{n}": value for n, value in enumerate(model.values())}})
    out = tmp_path / "hub"
    toolkit.ok("ckpt", "export", tmp_path, out, "--format", "safetensors", "--max-shard-size", "800B")
    assert len(list(out.iterdir())) == 4
    cache = tmp_path / "snapshot"  # as in Hugging Face's cache, where every file is a link
    cache.mkdir()
    for path in out.iterdir():
        (cache / path.name).symlink_to(path)
    toolkit.ok("ckpt", "import", cache, tmp_path / "new", "--only", "model", "--under", "my.net")
    manifest = read_manifest(tmp_path / "new" / "step-00000000")
    assert sorted(manifest.tensors) == [f"my.net.layer.{n}" for n in range(5)]
    assert manifest.tensors["my.net.layer.0"].path == ("my", "net", "layer.0")


def test_a_part_of_a_training_file_is_taken_with_its_keys(toolkit, tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    whole = {"net": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "odd": OrderedDict(a=1)}
    torch.save(whole, tmp_path / "whole.pth")
    toolkit.ok("ckpt", "import", tmp_path / "whole.pth", tmp_path / "net", "--only", "net", "--under", "model")
    assert_same(loaded(tmp_path / "net" / "step-00000000", network.state_dict()), network.state_dict())
    toolkit.ok("ckpt", "import", tmp_path / "whole.pth", tmp_path / "all")
    manifest = read_manifest(tmp_path / "all" / "step-00000000")
    assert manifest.objects["epoch"].value == 3 and manifest.objects["odd.a"].value == 1
    # The keys are those that DCP would have given.
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    toolkit.ok("ckpt", "import", tmp_path / "dcp", tmp_path / "same")
    same = read_manifest(tmp_path / "same" / "step-00000000")
    assert {k: r.path for k, r in same.tensors.items()} == {k: r.path for k, r in manifest.tensors.items()}
    assert same.objects == manifest.objects


def test_where_an_import_goes(toolkit, run_directory, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, source)
    (run_directory.attempts / "000").mkdir(parents=True)
    checkpoints = save(tmp_path, {"w": torch.ones(1)})
    for words, code, part in [
        ([source, run_directory.path], 2, "is in a run directory"),
        ([source, run_directory.checkpoints], 2, "is in a run directory"),
        (
            [source, checkpoints.parent, "--step", "7"],
            2,
            "step-00000007: already exists. Fix: pass --step 8, or another folder",
        ),
        ([checkpoints, tmp_path / "new"], 2, "is already a checkpoint"),
        ([tmp_path / "nothing", tmp_path / "new"], 4, "not found"),
        ([tmp_path / "nothing.pt", tmp_path / "new", "--format", "torch"], 4, "not found"),
        ([tmp_path / "nothing", tmp_path / "new", "--format", "dcp"], 4, "not found"),
        ([tmp_path, tmp_path / "new", "--format", "dcp"], 4, "contains no .metadata"),
        ([tmp_path, tmp_path / "new", "--format", "torch"], 2, "is a folder"),
        (
            [run_directory.path, tmp_path / "new"],
            2,
            "expected a folder with safetensors files, or with the .metadata file of dcp.save",
        ),
        ([source, source / "x"], 2, "Not a directory"),
        ([source, tmp_path / "new", "--only", "model"], 4, "contains no keys below 'model'"),
        ([source, tmp_path / "new", "--step", "-1"], 2, "--step"),
    ]:
        said = toolkit("ckpt", "import", *words)
        assert said.code == code and part in said.err and "Fix:" in said.err and said.err.count("\n") == 1, (
            words,
            said,
        )
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of_one_mib(tmp_path / "small") as folder:
        yield folder


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_full_disk_is_said_and_nothing_is_left(toolkit, tmp_path: Path, small_disk: Path, kind: str) -> None:
    save(tmp_path, {"model": {"w": torch.ones(1024, 512)}})
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "out", "--format", kind)
    said = toolkit("ckpt", "import", tmp_path / "out", small_disk / "new", "--format", kind)
    assert said.code == 125 and "cannot be written: No space left on device. Fix: free space there" in said.err, said
    assert not list(small_disk.glob("new/*"))


def test_a_source_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(1000)}, source)
    from toolkit.checkpoint.convert import imports

    def cut(*arguments: Any, **words: Any) -> Any:
        with source.open("r+b") as file:
            file.truncate(source.stat().st_size - 10)  # its writer began anew between the look and the reading
        return write(*arguments, **words)

    write = imports.write_checkpoint
    monkeypatch.setattr(imports, "write_checkpoint", cut)
    with pytest.raises(ToolkitError, match="is truncated within tensor 'b'"):
        import_checkpoint(source, tmp_path / "new", kind="safetensors")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.evidence
def test_safetensors_are_imported_without_torch_in_bounded_memory(tmp_path: Path) -> None:
    model = {"long": torch.ones(1, 75_000_000)}  # 300 MB in one row
    save_file(model, tmp_path / "m.safetensors")
    done = without_torch_in_280_mb("ckpt", "import", tmp_path / "m.safetensors", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'step-00000000'}\n"), done.stderr
    target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    Checkpointer(tmp_path / "none", ALONE).load(target, source=tmp_path / "step-00000000")
    assert all(torch.equal(target[name], tensor) for name, tensor in model.items())


def test_without_the_library_safetensors_are_refused_with_the_command_to_install_it(
    toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    checkpoint = save(tmp_path, {"w": torch.ones(2)})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for words in (
        ["import", tmp_path / "m.safetensors", tmp_path / "new"],
        ["export", checkpoint, tmp_path / "o.safetensors"],
    ):
        said = toolkit("ckpt", *words)
        assert said.code == 2 and "Fix: pip install 'toolkit[safetensors]'" in said.err and said.out == "", said
    assert not (tmp_path / "new").exists() and not (tmp_path / "o.safetensors").exists()


def test_random_states_of_trainers_are_imported_or_omitted_by_name(toolkit, tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "cpu": torch.get_rng_state(),
        "loss": np.float64(0.5),
        "model": {"w": torch.ones(2), "shape": torch.Size([2])},
    }
    torch.save(state, tmp_path / "state.pt")
    dcp.save(state, checkpoint_id=tmp_path / "folder")
    for source in ("state.pt", "folder"):
        said = toolkit("ckpt", "import", tmp_path / source, tmp_path / f"from-{source}")
        assert said.code == 0, said
        assert "omitted numpy: it contains numpy." in said.err and "omitted loss: it contains numpy." in said.err
        manifest = read_manifest(tmp_path / f"from-{source}" / "step-00000000")
        assert manifest.tensors.keys() == {"cpu", "model.w"}
        assert manifest.objects["python"].value == state["python"] and "model.shape" in manifest.objects
