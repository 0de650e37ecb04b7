"""Checkpoints as safetensors, torch and DCP files: what their own readers give back is what was saved, bit by bit."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_runs import disk_of_one_mib
from exported import any_bits, bits, every_element, save, without_torch_in_280_mb
from real_ranks import SHAPES, reference, run_ranks, state
from safetensors import safe_open
from safetensors.torch import load_file

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.convert import source_files
from toolkit.checkpoint.convert.export_safetensors import convert
from toolkit.checkpoint.convert.export_torch import export_dcp
from toolkit.checkpoint.convert.import_safetensors import CODES
from toolkit.checkpoint.convert.selection import ExportRequest, select
from toolkit.checkpoint.format.elements import ELEMENTS
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = every_element(CODES)
    return save(tmp_path, {"model": model, "optimizer": {"lr": 0.5, "momentum": torch.ones(4)}})


def test_safetensors_of_the_model_are_what_was_saved(toolkit, saved: Path, tmp_path: Path) -> None:
    said = toolkit("ckpt", "export", saved.parent, tmp_path / "out", "--format", "safetensors")
    assert said.code == 0 and said.out == f"{tmp_path / 'out'}\n"
    assert said.err.startswith("toolkit: exporting 25 of 26 tensors (below `model`) of ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in every_element(CODES).items()
    }
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_lies_at_a_multiple_of_its_elements(toolkit, saved: Path, tmp_path: Path) -> None:
    toolkit.ok("ckpt", "export", saved, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    sizes = {code: ELEMENTS[dtype].size_bytes for dtype, code in CODES.items()}
    for name, entry in header.items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0, name


def test_many_tensors_are_split_as_hugging_face_splits_them(toolkit, tmp_path: Path) -> None:
    model = {f"layer.{number}.weight": torch.full((100,), float(number)) for number in range(12)}
    model["large"] = torch.ones(500)
    save(tmp_path, {"model": model})
    out = tmp_path / "out"
    toolkit.ok("ckpt", "export", tmp_path, out, "--format", "safetensors", "--max-shard-size", "1.2kB")
    files = sorted(path.name for path in out.iterdir())
    assert files == [*(f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)), "model.safetensors.index.json"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 12 * 400 + 2000}
    assert index["weight_map"]["large"] == files[0] and index["weight_map"].keys() == model.keys()
    assert [index["weight_map"][f"layer.{n}.weight"] for n in (2, 3, 9, 10, 11)] == [files[n] for n in (1, 2, 4, 4, 4)]
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(found[name], model[name]) for name in model)
    assert all((out / file).stat().st_size < 1200 + 1000 for file in files[1:5])


def test_a_type_that_safetensors_has_not_is_refused_by_name(toolkit, tmp_path: Path) -> None:
    missing = sorted(set(ELEMENTS) - set(CODES))
    assert missing == ["complex128", "complex32", "float8_e8m0fnu"]
    for dtype in missing:
        folder = save(tmp_path / dtype, {"model": {"fine": torch.ones(2), "odd": any_bits(dtype, (2,))}})
        said = toolkit("ckpt", "export", folder, tmp_path / "out", "--format", "safetensors")
        assert said.code == 2 and f"model.odd: safetensors cannot contain elements of type {dtype}" in said.err
        assert not (tmp_path / "out").exists()


def test_what_is_exported_can_be_chosen(toolkit, saved: Path, tmp_path: Path) -> None:
    said = toolkit("ckpt", "export", saved, tmp_path / "o.safetensors", "--only", "optimizer")
    assert load_file(tmp_path / "o.safetensors").keys() == {"momentum"}
    assert "without 1 values that are not tensors: optimizer.lr" in said.err
    toolkit.ok("ckpt", "export", saved, tmp_path / "all.safetensors", "--only", "")
    assert load_file(tmp_path / "all.safetensors").keys() == read_manifest(saved).tensors.keys()
    said = toolkit("ckpt", "export", saved, tmp_path / "n.safetensors", "--only", "modle")
    assert said.code == 4 and "contains no keys below 'modle'. Fix: choose one of: model, optimizer" in said.err
    assert not (tmp_path / "n.safetensors").exists()


def test_without_a_part_called_model_all_is_exported(toolkit, tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "modelling": {"x": torch.ones(1)}})
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "o.safetensors")
    assert load_file(tmp_path / "o.safetensors").keys() == {"w", "modelling.x"}


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_floats_are_rounded_as_torch_rounds_them(toolkit, tmp_path: Path, wanted: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(100_000, dtype=torch.float64, generator=generator)
    values[:5] = torch.tensor([float("inf"), -0.0, 1e-7, 6e-8, 1 / 3])
    ties = (torch.arange(0x3F7F0000, 0x3F820000, 0x4000, dtype=torch.int32)).view(torch.float32)
    model = {str(dtype): values.to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    kept = {
        "n": torch.arange(3),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "c": torch.ones(2, dtype=torch.complex64),
    }
    save(tmp_path, {"model": {**model, "ties": ties, **kept}})
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "o.safetensors", "--dtype", wanted)
    found = load_file(tmp_path / "o.safetensors")
    for name, tensor in {**model, "ties": ties}.items():
        assert bits(found[name]) == bits(tensor.to(getattr(torch, wanted))), name
    assert all(bits(found[name]) == bits(tensor) for name, tensor in kept.items())


def test_a_number_that_rounding_would_lose_is_refused(toolkit, tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.tensor([1.0, 70000.0])}})
    said = toolkit("ckpt", "export", tmp_path, tmp_path / "o.safetensors", "--dtype", "float16")
    assert said.code == 2 and "model.w: contains 70000, which is too large for float16" in said.err
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"]


def test_what_is_no_number_stays_none() -> None:
    for bits_of_nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        single = np.array([bits_of_nan], "<u4").view("<f4")
        rounded = convert(single, "float32", "bfloat16", "w")
        assert torch.from_numpy(rounded).view(torch.bfloat16).isnan().all()


def save_on_ranks(folder: Path, world: World) -> None:
    Checkpointer(folder / "checkpoints", world).save(3, state(3, world.rank, world.size), {"loss": 1.0})


def test_uneven_shards_of_four_ranks_become_whole_tensors(toolkit, tmp_path: Path) -> None:
    run_ranks(4, save_on_ranks, tmp_path)
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "o.safetensors")
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "o.pt")
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "dcp", "--format", "dcp")
    of_torch = torch.load(tmp_path / "o.pt", weights_only=True)
    assert of_torch["lr"] == 0.5 and of_torch["random"]["rank-00003"].tolist() == [3] * 6
    of_dcp = {
        layout: {name: torch.zeros_like(of_torch[layout][name]) for name in SHAPES} for layout in ("rows", "both")
    }
    dcp.load(of_dcp, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    found = load_file(tmp_path / "o.safetensors")
    for layout in ("plain", "rows", "columns", "hybrid", "both"):
        for name in SHAPES:
            expected = bits(reference(name, found[f"{layout}.{name}"].dtype, 3))
            assert bits(found[f"{layout}.{name}"]) == expected == bits(of_torch[layout][name]), (layout, name)
            assert layout not in of_dcp or bits(of_dcp[layout][name]) == expected


def test_a_torch_file_holds_the_nested_state_with_its_values(toolkit, tmp_path: Path) -> None:
    model = every_element(ELEMENTS)
    values = {
        "lr": 0.5,
        "betas": (0.9, 0.95),
        "name": "größe",
        "nan": float("inf"),
        "none": None,
        "by step": {"5": [1, 2]},
    }
    groups = [{"momentum": torch.ones(2), "lr": 0.1}, {"momentum": torch.zeros(2), "lr": 0.2}]
    save(tmp_path, {"model": model, "values": values, "groups": groups})
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "new" / "state.pt")
    found = torch.load(tmp_path / "new" / "state.pt", weights_only=True)
    assert {name: bits(tensor) for name, tensor in found["model"].items()} == {n: bits(t) for n, t in model.items()}
    assert found["values"] == values and [group["lr"] for group in found["groups"]] == [0.1, 0.2]
    assert found["groups"][0]["momentum"].tolist() == [1, 1]
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "model.pt", "--only", "model")
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == model.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.pt", "new"]


def test_a_dcp_folder_loads_with_torchs_own_reader(toolkit, tmp_path: Path) -> None:
    model = every_element(ELEMENTS)
    save(tmp_path, {"model": model, "lr": 0.5, "groups": [{"n": torch.ones(2)}]})
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "dcp", "--format", "dcp")
    target = {"model": {n: torch.zeros_like(t) for n, t in model.items()}, "lr": 0.0, "groups": [{"n": torch.zeros(2)}]}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert {name: bits(tensor) for name, tensor in target["model"].items()} == {n: bits(t) for n, t in model.items()}
    assert target["lr"] == 0.5 and target["groups"][0]["n"].tolist() == [1, 1]


FORMATS = {"safetensors": "model.safetensors", "torch": "", "dcp": ".metadata"}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_stands_there_is_kept_unless_it_is_to_be_replaced(toolkit, tmp_path: Path, kind: str) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2)}})
    out = tmp_path / "out"
    toolkit.ok("ckpt", "export", tmp_path, out, "--format", kind)
    before = (out / FORMATS[kind]).read_bytes()
    said = toolkit("ckpt", "export", tmp_path, out, "--format", kind)
    assert (
        said.code == 2
        and "already" in said.err
        and "Fix: choose another" in said.err
        and "replace this" in said.err
        and "with --force" in said.err
    )
    assert (out / FORMATS[kind]).read_bytes() == before
    save(tmp_path, {"model": {"w": torch.zeros(2), "v": torch.ones(1)}}, 8)
    toolkit.ok("ckpt", "export", tmp_path, out, "--format", kind, "--force")
    assert (out / FORMATS[kind]).read_bytes() != before
    assert not list(tmp_path.glob(".*")), "something was left beside it"


def test_a_folder_keeps_its_other_files_and_no_shard_of_an_older_export(toolkit, tmp_path: Path) -> None:
    save(tmp_path, {"model": {f"w{n}": torch.full((10,), float(n)) for n in range(4)}})
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    base = ("ckpt", "export", tmp_path, out, "--format", "safetensors")
    toolkit.ok(*base, "--max-shard-size", "80B")
    assert len(list(out.glob("model-*-of-00002.safetensors"))) == 2
    toolkit.ok(*base, "--force")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    toolkit.ok(*base, "--force", "--max-shard-size", "40B")
    names = [*(f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)), "model.safetensors.index.json"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *names]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_block_is_named_and_nothing_is_left(toolkit, tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path, {"model": {"a": torch.ones(10), "z": torch.ones(1024, 1024, 2)}})
    shard = folder / "shard-00000-of-00001.h5"
    (piece,) = read_manifest(folder).tensors["model.z"].pieces
    content = bytearray(shard.read_bytes())
    content[piece.byte_offset + 5_000_000] ^= 1
    shard.write_bytes(content)
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "out", tmp_path / "there" if kind != "torch" else tmp_path / "out"):
        said = toolkit("ckpt", "export", folder, out, "--format", kind)
        assert said.code == 1 and "block 1" in said.err and str(shard) in said.err and "Traceback" not in said.err
        assert said.err.endswith("Fix: there is no other checkpoint\n")
    save(tmp_path, {"model": {"a": torch.ones(10)}}, 8)
    said = toolkit("ckpt", "export", f"{tmp_path}:7", tmp_path / "out", "--format", kind)
    assert said.code == 1 and said.err.endswith("Fix: choose another step: 8\n")
    assert sorted(path.name for path in tmp_path.rglob("*") if "checkpoints" not in path.parts) == ["there"]


def test_what_is_no_regular_file_is_never_replaced(toolkit, saved: Path, tmp_path: Path) -> None:
    device = tmp_path / "device"
    os.mkfifo(device)
    for kind in ("torch", "dcp"):
        said = toolkit("ckpt", "export", saved, device, "--format", kind, "--force")
        assert said.code == 2 and f"{device}: is " in said.err
    os.mkfifo(tmp_path / "o.safetensors")
    assert toolkit("ckpt", "export", saved, tmp_path / "o.safetensors", "--force").code == 2
    assert device.is_fifo() and (tmp_path / "o.safetensors").is_fifo()


def test_wrong_words_are_one_line_with_a_fix(toolkit, saved: Path, tmp_path: Path) -> None:
    for name in ("there.pt", "file"):
        (tmp_path / name).touch()
    for words, code, part in [
        ([saved, tmp_path / "out"], 2, "pass --format safetensors, torch or dcp"),
        ([saved, tmp_path / "o.safetensors", "--max-shard-size", "1GB"], 2, "omit --max-shard-size"),
        ([saved, tmp_path / "o", "--format", "safetensors", "--max-shard-size", "many"], 2, "write 5GB, 500MB or 2GiB"),
        ([saved, tmp_path / "o.pt", "--dtype", "bfloat16"], 2, "requires safetensors, but the format is torch"),
        ([saved, tmp_path / "o.pt", "--step", "8"], 4, "choose one of the steps 7"),
        ([saved, tmp_path, "--format", "torch"], 2, "choose a file"),
        ([saved, tmp_path / "there.pt" / "x.pt"], 2, "Fix: choose a writable path"),
        ([saved, tmp_path / "file", "--format", "dcp"], 2, "is a file. Fix: choose a folder"),
        ([tmp_path / "nothing", tmp_path / "o.pt"], 4, "Fix:"),
        ([tmp_path / "there.pt", tmp_path / "o.pt"], 4, "`toolkit ckpt import` converts other files to a checkpoint"),
    ]:
        said = toolkit("ckpt", "export", *words)
        assert said.code == code and part in said.err.splitlines()[-1], said
        assert "Traceback" not in said.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of_one_mib(tmp_path / "small") as folder:
        yield folder


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_is_said_and_nothing_is_left(toolkit, tmp_path: Path, small_disk: Path, kind: str) -> None:
    save(tmp_path, {"model": {"w": torch.ones(1024, 512)}})
    said = toolkit("ckpt", "export", tmp_path, small_disk / "out", "--format", kind)
    assert said.code == 125, said
    assert f"{small_disk / 'out'}: cannot be written: No space left on device. Fix: free space there" in said.err
    assert not list(small_disk.iterdir())


def test_safetensors_are_exported_without_torch_in_bounded_memory(tmp_path: Path) -> None:
    model = {"long": torch.ones(1, 75_000_000)}  # 300 MB in one row
    save(tmp_path, {"model": model})
    out = tmp_path / "o.safetensors"
    done = without_torch_in_280_mb("ckpt", "export", tmp_path, out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    with safe_open(out, framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in model.items())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_refusal_comes_before_what_is_taken(toolkit, tmp_path: Path, kind: str) -> None:
    """Who reads what is taken believes that it begins."""
    save(tmp_path, {"model": {"w": torch.ones(2)}})
    words = ("ckpt", "export", tmp_path, tmp_path / "out", "--format", kind)
    assert "1 of 1 tensors" in toolkit(*words).err
    said = toolkit(*words)
    assert said.code == 2 and "already" in said.err and said.err.count("\n") == 1, said


def test_dcp_is_written_file_after_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one file's tensors are alive at any time, and one tensor may be larger than a file."""
    model = {f"w{number}": torch.full((250,), float(number)) for number in range(10)} | {"long": torch.ones(1000)}
    folder = save(tmp_path, {"model": model, "lr": 0.5, "groups": [{"n": torch.ones(250)}]})
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0
    read_one = StoredTensors.read

    def read(stored: StoredTensors, name: str) -> np.ndarray:
        nonlocal most
        array = read_one(stored, name)
        alive.append(weakref.ref(array))
        most = max(most, sum(found.nbytes for one in alive if (found := one()) is not None))
        return array

    monkeypatch.setattr(StoredTensors, "read", read)
    manifest = read_manifest(folder)
    request = ExportRequest(folder, manifest, select(manifest, "", where=""), tmp_path / "dcp")
    export_dcp(request, most_file_bytes=3000)
    assert len(alive) == 12 and most <= 4000
    assert len(list((tmp_path / "dcp").glob("__*_0.distcp"))) == 6
    target = {
        "model": {n: torch.zeros_like(t) for n, t in model.items()},
        "lr": 0.0,
        "groups": [{"n": torch.zeros(250)}],
    }
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(target["model"][name], tensor) for name, tensor in model.items())
    assert target["lr"] == 0.5 and target["groups"][0]["n"].tolist() == [1.0] * 250


def meminfo(root: Path, free_kib: int, limit_bytes: int) -> Path:
    """A node's free memory and a job's limit, as the kernel tells them."""
    files = {
        "proc/meminfo": f"MemTotal: 900 kB\nMemAvailable: {free_kib} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{limit_bytes}\n",
        "sys/fs/cgroup/job/memory.current": "1000\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("kind", "free_kib", "limit_bytes", "who"),
    [
        ("torch", 7, 100_000, "torch.save needs 8e-06 GB of memory, but the node has 7.17e-06 GB free"),
        ("torch", 100, 8_000, "torch.save needs 8e-06 GB of memory, but the cgroup /job has 7e-06 GB free"),
        ("dcp", 7, 100_000, "a DCP file needs 8e-06 GB of memory, but the node has 7.17e-06 GB free"),
    ],
)
def test_what_does_not_fit_in_memory_is_refused_before_it_is_read(
    toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, free_kib: int, limit_bytes: int, who: str
) -> None:
    save(tmp_path, {"model": {"w": torch.ones(1000), "v": torch.ones(1000)}})
    root = meminfo(tmp_path / "root", free_kib, limit_bytes)
    monkeypatch.setattr(source_files, "ROOT", root)
    monkeypatch.setattr(StoredTensors, "read", None)
    said = toolkit("ckpt", "export", tmp_path, tmp_path / "out", "--format", kind)
    assert said.code == 125 and who in said.err and said.err.count("\n") == 1, said
    fix = "safetensors or dcp" if kind == "torch" else "safetensors"
    assert f"Fix: export with --format {fix}, or on a host with more memory" in said.err
    assert not (tmp_path / "out").exists()
    toolkit.ok("ckpt", "export", tmp_path, tmp_path / "o.safetensors")
