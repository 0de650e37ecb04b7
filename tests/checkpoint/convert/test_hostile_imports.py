"""Files that were made to do harm are refused in one line, before they can: no code runs, no path leads out."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from toolkit.checkpoint.convert.dcp_metadata import read_dcp_metadata
from toolkit.checkpoint.convert.import_safetensors import read_header
from toolkit.errors import ToolkitError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf support", "ignore:The PyTorch API of nested tensors"
)


class Evil:
    """Unpickled by pickle.load it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


class Plain:
    pass


def folded(levels: int) -> list[Any]:
    """A few lists that write out as 2 to the power of `levels` numbers."""
    lists: list[Any] = [1]
    for _ in range(levels):
        lists = [lists, lists]
    return lists


def holding_itself(value: Any, place: Any) -> Any:
    if isinstance(value, list):
        value.append(place(value))
    else:
        value["self"] = place(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_what_is_no_tensor_and_no_plain_value_is_refused_by_name(toolkit, tmp_path: Path) -> None:
    for name, value, part in [
        ("evil", {"w": Evil(tmp_path / "made")}, "the file contains posix.mkdir"),
        ("class", {"w": Plain()}, f"the file contains {__name__}.Plain"),
        ("list", [torch.ones(1)], "expected a dict, got a list"),
        (
            "sparse tuple",
            {"pair": (torch.eye(3).to_sparse(), 2)},
            "pair[0]: tensor layout torch.sparse_coo cannot be stored",
        ),
        (
            "repeated tuple",
            {"pair": (torch.ones(1).expand(2**40), 2)},
            "pair[0]: a value of type torch.Tensor cannot be stored: 4398",
        ),
        ("sparse", {"s": torch.eye(3).to_sparse()}, "s is not a dense tensor with data (torch.sparse_coo"),
        ("meta", {"m": torch.empty(2**40, device="meta")}, "m is not a dense tensor"),
        ("repeated", {"r": torch.ones(1).expand(2**40)}, "is an expanded view of fewer stored bytes"),
        ("doubled", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two values have the key a.b"),
        ("key", {("a", 1): torch.ones(1)}, "expected a string or an integer as a key, got ('a', 1)"),
        ("empty", {"a": {}}, "contains no tensors or values"),
        (
            "nested",
            {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
            "n is not a dense tensor with data (nested",
        ),
        ("dimensions", {"d": torch.ones([1] * 33)}, "d: has 33 dimensions; a checkpoint supports at most 32"),
        (
            "itself",
            holding_itself({"w": torch.ones(1)}, lambda state: state),
            "self.self.self: contains a reference to itself",
        ),
        (
            "in a list",
            holding_itself({"w": torch.ones(1)}, lambda state: [state]),
            "self.0.self: contains a reference to itself",
        ),
        ("a list", {"own": holding_itself([1], lambda values: values)}, "own.1.1: contains a reference to itself"),
        (
            "a tuple",
            {"own": (holding_itself([1], lambda values: values),)},
            "a tuple.pt: own: contains a reference to itself",
        ),
        (
            "folded",
            {"w": torch.ones(1), "own": folded(60)},
            "shared references to the same lists or dicts would expand to over",
        ),
        (
            "folded tuple",
            {"own": ((folded(60),),)},
            "shared references to the same lists or dicts would expand to over",
        ),
        (
            "deep",
            {"w": torch.ones(1), "deep": deep(300)},
            "deep.0.0: contains a reference to itself, or is nested more than 100 levels",
        ),
    ]:
        torch.save(value, tmp_path / f"{name}.pt")
        said = toolkit("ckpt", "import", tmp_path / f"{name}.pt", tmp_path / "new")
        assert said.code == 2 and part in said.err and said.err.count("\n") == 1, (name, said)
        assert not (tmp_path / "new").exists() and not (tmp_path / "made").exists()


def test_broken_and_packed_torch_files_are_refused(toolkit, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "good.pt")
    content = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pt").write_text("hello\n" * 10)
    (tmp_path / "none.pt").write_bytes(b"")
    torch.save({"w": torch.ones(1000)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for entry in good.namelist():
            packed.writestr(entry, good.read(entry))
    for name, part in [
        ("cut", "is truncated"),
        ("text", "does not look like a torch.save file"),
        ("none", "is empty"),
        ("packed", "is a compressed zip file"),
    ]:
        said = toolkit("ckpt", "import", tmp_path / f"{name}.pt", tmp_path / "new")
        assert said.code == 2 and part in said.err and said.err.count("\n") == 1, (name, said)
    toolkit.ok("ckpt", "import", tmp_path / "old.pt", tmp_path / "new")


def header(entries: Any, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


W = entry([2], 0, 8)
HARMFUL = {
    "header longer than the file": header({"w": W}, 2**40) + bytes(8),
    "header of all numbers": header({"w": W}, 2**64 - 1) + bytes(8),
    "shorter than a length": b"\0\0\0",
    "nothing": b"",
    "no JSON": header(b"{'w'}"),
    "no UTF-8": header(b'{"\xff": 1}'),
    "deep": header(b"[" * 100_000),
    "a list": header([1, 2]),
    "twice": header(b"{%s, %s}" % ((b'"w": ' + json.dumps(W).encode(),) * 2)) + bytes(8),
    "giant shape": header({"w": entry([2**40, 2**40], 0, 8)}) + bytes(8),
    "giant shape of nothing": header({"w": entry([2**62, 2**62, 0, -1], 0, 0)}),
    "overflow to eight": header({"w": entry([2**62, 2, 2], 0, 8, "U8")}) + bytes(8),
    "negative": header({"w": entry([-2], 0, 8)}) + bytes(8),
    "many dimensions": header({"w": entry([1] * 40, 0, 4)}) + bytes(4),
    "no whole number": header({"w": entry([2.0], 0, 8)}) + bytes(8),
    "true": header({"w": entry([True, 2], 0, 8)}) + bytes(8),
    "out of range": header({"w": entry([2], 8, 16)}) + bytes(8),
    "backwards": header({"w": entry([2], 8, 0)}) + bytes(8),
    "behind the end": header({"w": entry([4], 0, 16)}) + bytes(8),
    "overlap": header({"w": W, "v": entry([2], 4, 12)}) + bytes(12),
    "same bytes": header({"w": W, "v": W}) + bytes(8),
    "hole": header({"w": W, "v": entry([2], 12, 20)}) + bytes(20),
    "more bytes": header({"w": W}) + bytes(9),
    "unknown type": header({"w": entry([2], 0, 8, "F31")}) + bytes(8),
    "type of no text": header({"w": entry([2], 0, 8, ["F32"])}) + bytes(8),
    "no entry": header({"w": 5}) + bytes(8),
    "lacking": header({"w": {"dtype": "F32", "shape": [2]}}) + bytes(8),
    "truth of two": header({"w": entry([4], 0, 4, "BOOL")}) + b"\0\1\2\1",
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_safetensors_file_is_refused_in_one_line(toolkit, tmp_path: Path, case: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(HARMFUL[case])
    said = toolkit("ckpt", "import", path, tmp_path / "new")
    other = {"truth of two": "contains bytes other than 0 and 1", "nothing": "is empty"}
    why = other.get(case, "is not a valid safetensors file")
    assert said.code == 2 and f"{path}: " in said.err and why in said.err and said.err.count("\n") == 1, said
    assert said.err.endswith(". Fix: copy or fetch the whole file again\n")
    assert not list((tmp_path / "new").glob("*")) if (tmp_path / "new").exists() else True


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_header_that_the_library_refuses_is_taken(data: st.DataObject, tmp_path: Path) -> None:
    """One or two bytes of a good file changed: what ours takes, the library takes, and gives the same tensors."""
    content = bytearray(
        header({"w": W, "v": entry([1, 2], 8, 12, "F16"), "e": entry([0, 3], 12, 12)}) + bytes(range(12))
    )
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except ToolkitError:
        return
    try:
        with safe_open(path, framework="np") as file:
            assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
                name: found.shape for name, found in entries.items()
            }
    except SafetensorError as error:
        pytest.fail(f"the library refuses it: {error}")


@pytest.mark.parametrize(
    "file",
    [
        "../../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "passwd",
        5,
        "a\0.safetensors",
    ],
)
def test_an_index_leads_nowhere_else(toolkit, tmp_path: Path, file: object) -> None:
    folder = tmp_path / "a" / "b" / "hub"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "a" / "x.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"w": torch.ones(2)}, place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    said = toolkit("ckpt", "import", folder, tmp_path / "new")
    assert said.code == 2 and "expected a safetensors file of this folder" in said.err


def test_an_index_must_fit_its_files(toolkit, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "v": torch.ones(1)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, part in [
        ({"w": "x.safetensors"}, "'v' is in x.safetensors but not in the index"),
        (
            {"w": "x.safetensors", "v": "x.safetensors", "u": "x.safetensors"},
            "'u' is in the index but not in x.safetensors",
        ),
        ({"w": "gone.safetensors"}, "gone.safetensors: not found"),
        ({}, "contains no weight_map table"),
        ([], "contains no weight_map table"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        said = toolkit("ckpt", "import", tmp_path, tmp_path / "new")
        assert said.code in (2, 4) and part in said.err, said
    index.write_text("[" * 100_000)
    assert toolkit("ckpt", "import", tmp_path, tmp_path / "new").code == 2


def dcp_folder(folder: Path) -> Path:
    dcp.save({"w": torch.ones(4, 2), "n": 5}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def changed(folder: Path, change) -> None:
    """Have DCP's own metadata say something else."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_a_pickle_that_runs_code_is_refused_before_it_does(toolkit, tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = dcp_folder(tmp_path / "dcp")
    hidden = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    cases = {
        "posix.mkdir": pickle.dumps(Evil(made)),
        "builtins.eval": b"cbuiltins\neval\n(S'1'\ntR.",
        "os.system": hidden,
        "torch.load": b"ctorch\nload\n.",
        "_reconstructor": pickle.dumps(Plain(), protocol=0),
    }
    for name, content in cases.items():
        (folder / ".metadata").write_bytes(content)
        said = toolkit("ckpt", "import", folder, tmp_path / "new")
        assert said.code == 2 and name in said.err and said.err.count("\n") == 1, (name, said)
    assert not made.exists()


def test_a_pickle_cannot_change_what_stands_in_for_its_names(toolkit, tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    good = (folder / ".metadata").read_bytes()
    for name in ("torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata", "torch\nfloat32"):
        # BUILD on the name itself, with a state and with attributes to set.
        for state_of in (b"(dS'get'\nI5\ns", b"(N(dS'get'\nI5\nst"):
            (folder / ".metadata").write_bytes(b"c" + name.encode() + b"\n" + state_of + b"b.")
            assert toolkit("ckpt", "import", folder, tmp_path / "new").code == 2
    (folder / ".metadata").write_bytes(good)
    assert read_dcp_metadata(folder)[0]["w"].shape == (4, 2)


def set_size(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([2**40, 2])


def set_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2**40, 2])


def doubled(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks *= 2


def without_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks = []


def info_set(**values: Any):
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return change


WRONG = {
    "size": (set_size, "its pieces do not contain each element"),
    "chunk": (set_chunk, "has only"),
    "doubled": (doubled, "w has two pieces at [0, 0]"),
    "no chunks": (without_chunks, "do not contain each element"),
    "path": (info_set(relative_path="../secret.distcp"), "expected the name of a file in this folder"),
    "absolute": (info_set(relative_path="/etc/passwd"), "expected the name of a file in this folder"),
    "link": (info_set(relative_path="link.distcp"), "not a regular file"),
    "gone": (info_set(relative_path="gone.distcp"), "is missing"),
    "behind": (info_set(offset=10**9), "after the end"),
    "negative": (info_set(offset=-1), "expected non-negative integers, got"),
    "extension": (info_set(transform_descriptors=["zip"]), "was written with a storage extension"),
    "other bytes": (info_set(offset=0, length=2000), "expected the piece of w at [0, 0], got other contents"),
    "no storage": (lambda metadata: metadata.storage_data.clear(), "storage_data has no entry for w"),
    "no records": (
        lambda metadata: setattr(metadata, "state_dict_metadata", None),
        "state_dict_metadata is missing or not a dict",
    ),
    "key": (lambda metadata: metadata.planner_data.update(w=([],)), "expected a list of keys and indices, got"),
    "type": (
        lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", torch.quint8),
        "torch.quint8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_of_dcp_that_cannot_be_so_are_refused(toolkit, tmp_path: Path, case: str) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    (tmp_path / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "link.distcp").symlink_to(tmp_path / "secret.distcp")
    change, part = WRONG[case]
    changed(folder, change)
    said = toolkit("ckpt", "import", folder, tmp_path / "new")
    assert said.code == 2 and part in said.err and said.err.count("\n") == 1, said
    assert not list(tmp_path.glob("new/*"))


def test_a_value_in_dcp_that_runs_code_is_refused(toolkit, tmp_path: Path) -> None:
    dcp.save({"w": Evil(tmp_path / "made")}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    said = toolkit("ckpt", "import", tmp_path / "dcp", tmp_path / "new")
    assert said.code == 2 and "__0_0.distcp: w: cannot be read as tensors" in said.err and "posix.mkdir" in said.err
    assert not (tmp_path / "made").exists()


def test_more_dimensions_than_a_checkpoint_has_are_refused_in_dcp_too(toolkit, tmp_path: Path) -> None:
    many = {"d": torch.ones([1] * 33)}
    dcp.save(many, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    said = toolkit("ckpt", "import", tmp_path / "dcp", tmp_path / "new")
    assert said.code == 2 and "dcp: d: has 33 dimensions" in said.err and said.err.count("\n") == 1, said
    assert not (tmp_path / "new").exists()
