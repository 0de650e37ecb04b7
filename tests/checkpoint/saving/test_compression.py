"""Compressed tensors: the same bits, fewer bytes, read by HDF5's own tools, and no more believed than others."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - Zstandard for h5py, as its users load it
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from ckpt_runs import ALONE, SHARD, flip, typed
from forged import put, sign, signed
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint import Checkpointer, HDF5StorageReader, HDF5StorageWriter
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.format.chunks import CHUNK_BYTES, chunk_ranges, chunk_shape, chunks_of_box, grid
from toolkit.checkpoint.format.filters import DecompressionError, compress, decompress
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = ["gzip", "zstd"]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weights": torch.randn(1501, 700, generator=generator),
        "half": torch.randn(3, 5, 120_007, generator=generator).bfloat16(),
        "noise": torch.randint(0, 256, (2_000_000,), dtype=torch.uint8, generator=generator),
        "zeros": torch.zeros(2, 1_500_001),
        "small": torch.zeros(1023),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "flags": torch.zeros(5000, dtype=torch.bool),
    }


def save(folder: Path, kind: str, step: int = 1) -> Path:
    return Checkpointer(folder, ALONE, keep_last=1, compression=kind).save(step, tensors(), {"step": step})


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def gzipped(tmp_path: Path) -> Path:
    return save(tmp_path / "run", "gzip")


def test_what_shrinks_is_compressed_and_loads_bit_by_bit(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert verify_fully(saved) == (manifest, [])
    assert {name for name, record in manifest.tensors.items() if record.filters} == {
        "weights",
        "half",
        "zeros",
        "flags",
    }
    wanted = {name: torch.ones_like(value) for name, value in tensors().items()}
    dcp.load(wanted, storage_reader=HDF5StorageReader(saved, threads=2))
    assert all(torch.equal(wanted[name], value) for name, value in tensors().items())
    plain_bytes = sum(record.size_bytes for record in manifest.tensors.values())
    assert manifest.size_bytes < 0.75 * plain_bytes


def test_hdf5_tools_read_it(saved: Path) -> None:
    for file in (SHARD, "index.h5"):
        with h5py.File(saved / file) as shown:
            for name, value in tensors().items():
                found = shown[f"tensors/{name}"]
                found = next(iter(found.values())) if isinstance(found, h5py.Group) else found
                assert np.array_equal(found[...].astype("f4"), value.float().numpy()), (file, name)


def test_boxes_need_the_chunks_that_hold_them(saved: Path) -> None:
    whole = tensors()
    with StoredTensors(saved, read_manifest(saved)) as stored:
        assert np.array_equal(stored.box("weights", (370, 10), (20, 5)), whole["weights"][370:390, 10:15].numpy())
        box = stored.box("half", (1, 2, 100_000), (2, 3, 7))
        assert np.array_equal(box, whole["half"][1:3, 2:5, 100_000:100_007].view(torch.uint16).numpy())
        (read,) = stored._shards.values()
        assert 0 < read.bytes_read < read_manifest(saved).size_bytes


def test_plain_dcp_saves_and_what_replaces_a_checkpoint(tmp_path: Path) -> None:
    """The folder of a checkpoint that is no more serves again, however it and the next are stored."""
    dcp.save(tensors(), storage_writer=HDF5StorageWriter(tmp_path / "dcp", compression="gzip", threads=2))
    wanted = {name: torch.ones_like(value) for name, value in tensors().items()}
    dcp.load(wanted, storage_reader=HDF5StorageReader(tmp_path / "dcp"))
    assert torch.equal(wanted["weights"], tensors()["weights"])
    checkpoints = Checkpointer(tmp_path / "run", ALONE, keep_last=1, compression="gzip")
    for step in (1, 2, 3):
        folder = checkpoints.save(step, {"x": torch.full((5000, 70), float(step))}, {})
    checkpoints.save_in_background(4, {"x": torch.full((5000, 70), 4.0), "lr": 0.5}, {})
    checkpoints.wait()
    folder = Checkpointer(tmp_path / "run", ALONE, keep_last=1).save(5, {"x": torch.full((5000, 70), 5.0)}, {})
    assert verify_fully(folder) == (read_manifest(folder), [])
    assert '"schema": 1' in (folder / MANIFEST).read_text()


def test_ranks_that_were_given_up_on_commit_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is fenced off between its making and the writing: HDF5 must not make it again."""
    from toolkit.checkpoint.saving import compressed_shard

    def fenced(path: Path, *given: Any, **named: Any) -> Any:
        path.parent.rename(path.parent.with_suffix(".stale-0"))
        return write(path, *given, **named)

    write = compressed_shard.write_compressed
    monkeypatch.setattr("toolkit.checkpoint.saving.prepared.write_compressed", fenced)
    with pytest.raises(ToolkitError, match="was not saved"):
        save(tmp_path, "gzip")
    assert [path.name for path in tmp_path.glob("step-*") if path.suffix != ".stale-0"] == []


def test_a_compressed_checkpoint_says_schema_2_where_it_needs_it(tmp_path: Path, gzipped: Path) -> None:
    assert '"schema": 2' in (gzipped / MANIFEST).read_text()
    folder = Checkpointer(tmp_path / "x", ALONE, compression="gzip").save(1, {"x": torch.zeros(8)}, {})
    assert '"schema": 1' in (folder / MANIFEST).read_text()


def test_a_flipped_bit_of_a_chunk_is_found_with_its_tensor(gzipped: Path) -> None:
    chunks = read_manifest(gzipped).tensors["weights"].pieces[0].chunks
    flip(gzipped / SHARD, chunks.places[-1][0] + 5)
    (problem,) = verify_fully(gzipped)[1]
    assert "weights" in problem.tensors and len(set(problem.tensors)) == len(problem.tensors)
    with (
        StoredTensors(gzipped, read_manifest(gzipped)) as stored,
        pytest.raises(CorruptCheckpointError, match="changed"),
    ):
        stored.read("weights")


def test_commands_take_it(gzipped: Path, tmp_path: Path) -> None:
    shown = typed("show", "--pieces", gzipped)
    assert shown.returncode == 0, shown.stderr
    assert typed("verify", "--full", gzipped).returncode == 0
    assert typed("index", gzipped).returncode == 0
    exported = typed("export", gzipped, tmp_path / "out.safetensors")
    assert exported.returncode == 0, exported.stderr
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out.safetensors")["weights"], tensors()["weights"])


PIECE = "tensors/weights/pieces/0"
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    (f"{PIECE}/4/0", lambda shape: [0, shape[1]], "has chunks of shape [0, 700]"),
    (f"{PIECE}/4/0", lambda shape: [shape[0]], "has chunks of shape"),
    (f"{PIECE}/4/0", lambda shape: [1502, 700], "has chunks of shape [1502, 700]"),
    (f"{PIECE}/4/0", lambda shape: [1, 1], "the wrong number of chunks"),
    (f"{PIECE}/4/1", lambda places: places[1:], "the wrong number of chunks"),
    (f"{PIECE}/4/1", lambda places: [*places[:-1], [2**40, 1]], "extends beyond the end of"),
    (f"{PIECE}/4/1", lambda places: [*places[:-1], [1, 2**40]], "extends beyond the end of"),
    (f"{PIECE}/4/1", lambda places: [*places[:-1], places[0]], "overlaps another one"),
    (f"{PIECE}/4/1", lambda places: [*places[:-1], [places[-1][0], 0]], "expected an integer of at least 1"),
    (f"{PIECE}/4/1/0", lambda place: [-1, 1], "expected an integer of at least 0"),
    (f"{PIECE}/4/1", lambda places: {}, "the wrong number of chunks"),
    (f"{PIECE}/4", lambda chunks: [*chunks, 1], "has a missing or invalid key"),
    (f"{PIECE}/3", lambda first: 7, "has both chunks and a byte offset"),
    ("tensors/weights/filters", lambda filters: [], "but its tensor has no filters"),
    ("tensors/weights/filters", lambda filters: ["lzf"], "is not a valid list of filters of this format"),
    ("tensors/weights/filters", lambda filters: "deflate", "is not a valid list of filters of this format"),
    ("tensors/zeros", lambda record: {**record, "shape": [2**18, 2**20], "pieces": [[1, [0, 0], [2**18, 2**20], 0, [[2**18, 2**20], [[9, 1]]]]]}, "more than 67108864 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "said"), WRONG)
def test_chunks_that_cannot_be_so_are_refused(
    saved: Path, tmp_path: Path, path: str, change: Callable[[Any], Any], said: str
) -> None:
    body = json.loads((saved / MANIFEST).read_text())
    value: Any = body
    for part in path.split("/"):
        value = value[int(part) if part.isdigit() else part]
    put(body, path, change(value))
    (tmp_path / MANIFEST).write_text(signed(body))
    with pytest.raises(CorruptCheckpointError) as refused:
        read_manifest(tmp_path)
    assert said in refused.value.message


BOMBS = {
    "deflate": zlib.compress(bytes(20 << 20)),
    "deflate, less": zlib.compress(bytes(5)),
    "deflate, more behind": zlib.compress(bytes(1000)) + b"x",
    "deflate, cut": zlib.compress(bytes(range(250)) * 4)[:-1],
    "deflate, none": b"xxxx",
    "zstd": zstandard.compress(bytes(200 << 20)),
    "zstd, less": zstandard.compress(bytes(5)),
    "zstd, unknown size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20)),
    "zstd, more behind": zstandard.compress(bytes(1000)) + b"x",
    "zstd, cut": zstandard.compress(bytes(range(250)) * 4)[:-1],
    "zstd, none": b"xxxx",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bytes_that_are_no_chunk_take_no_memory(name: str) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(DecompressionError):
            decompress(memoryview(BOMBS[name]), 1000, 4, ("shuffle", name.partition(",")[0]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_chunk_with_right_digests_that_is_none_is_refused(gzipped: Path) -> None:
    manifest = read_manifest(gzipped)
    first, size = manifest.tensors["zeros"].pieces[0].chunks.places[0]
    with (gzipped / SHARD).open("r+b") as file:
        file.seek(first)
        file.write(bytes(size))
    sign(gzipped, manifest)
    with pytest.raises(CorruptCheckpointError, match=f"the chunk at byte {first}"):
        Checkpointer(gzipped.parent, ALONE).load({"zeros": torch.ones(2, 1_500_001)}, source=gzipped)


def test_hdf5_that_shows_other_chunks_is_told(gzipped: Path) -> None:
    manifest = read_manifest(gzipped)
    with h5py.File(gzipped / SHARD, "r+") as file:
        dataset = file["tensors/zeros/0,0"]
        dataset.id.write_direct_chunk((0, 0), zlib.compress(bytes(5 << 20), 9))  # too large for its place
    sign(gzipped, manifest)
    assert any("HDF5 reads this tensor from other bytes" in str(problem) for problem in verify_fully(gzipped)[1])


def test_a_missing_library_is_named(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.checkpoint.format import filters

    monkeypatch.setitem(sys.modules, "zstandard", None)
    filters._zstandard.cache_clear()
    with pytest.raises(ToolkitError, match="requires zstandard") as refused:
        Checkpointer(tmp_path, ALONE, compression="zstd")
    assert "toolkit[zstd]" in refused.value.fix
    if "zstd" in str(saved):
        with pytest.raises(ToolkitError, match="requires zstandard"):
            Checkpointer(saved.parent, ALONE).load({"zeros": torch.ones(2, 1_500_001)})
        assert saved.is_dir()


@pytest.mark.parametrize("given", [{"compression": "lzf"}, {"compression": "gzip", "aggregate": "node"}])
def test_what_cannot_be_compressed_so_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ToolkitError, match="compress"):
        Checkpointer(tmp_path, ALONE, **given)


@settings(max_examples=100, deadline=None)
@given(
    extent=st.lists(st.sampled_from([1, 2, 3, 7, 100, 1000, 5000, 70_001]), min_size=1, max_size=4),
    size=st.sampled_from([1, 2, 4, 16]),
)
def test_chunks_hold_each_element_once_in_order(extent: list[int], size: int) -> None:
    shape = chunk_shape(extent, size)
    assert np.prod(shape, dtype=object) * size <= CHUNK_BYTES
    if np.prod(grid(extent, shape), dtype=object) > 3000:
        return
    held = list(chunk_ranges(extent, shape))
    assert held[0][1].start == 0 and held[-1][1].stop == np.prod(extent, dtype=object)
    assert all(one.stop == other.start for (_, one), (_, other) in pairwise(held))
    for start, inside in held:
        assert tuple(np.unravel_index(inside.start, extent)) == start


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_box_is_put_together_of_chunks_of_any_shape(data: st.DataObject) -> None:
    extent = data.draw(st.lists(st.integers(1, 6), max_size=3))
    shape = [data.draw(st.integers(1, size)) for size in extent]
    start = [data.draw(st.integers(0, size - 1)) for size in extent]
    box = [data.draw(st.integers(1, size - at)) for size, at in zip(extent, start, strict=True)]
    whole = np.arange(int(np.prod(extent))).reshape(extent)
    out = np.full(box, -1)
    for number, inside_chunk, inside_box in chunks_of_box(extent, shape, start, box):
        place = np.unravel_index(number, grid(extent, shape)) if extent else ()
        begin = [int(at) * count for at, count in zip(place, shape, strict=True)]
        chunk = np.full(shape, -2)
        part = whole[tuple(slice(at, at + count) for at, count in zip(begin, shape, strict=True))]
        chunk[tuple(map(slice, part.shape))] = part
        out[inside_box] = chunk[inside_chunk]
    assert np.array_equal(out, whole[tuple(slice(at, at + n) for at, n in zip(start, box, strict=True))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_a_chunk_comes_back(kind: str, size: int) -> None:
    plain = np.random.default_rng(0).integers(0, 9, 100 * size, np.uint8)
    stored = compress(plain.data, 112 * size, size, kind)
    filters = ("shuffle", "deflate" if kind == "gzip" else kind)
    assert decompress(memoryview(stored), 112 * size, size, filters).tobytes() == plain.tobytes() + bytes(12 * size)
