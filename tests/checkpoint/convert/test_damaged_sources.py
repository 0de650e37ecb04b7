"""Sources of an import that are damaged, or something else: one line that names the file, what is wrong, and the fix."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_runs import typed
from safetensors.torch import save_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

AGAIN = "copy or fetch the whole file again"
CUT = "is truncated: the zip central directory at its end is missing"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
NO_FOLDER = "expected a folder with safetensors files, or with the .metadata file of dcp.save"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a good file of each format, and others made of them."""
    torch.save({"a": torch.ones(100, 100), "set": {1, 2}, 5: {(1, 2): 3}}, tmp_path / "odd.pt")
    torch.save({"a": torch.ones(100, 100), "n": {"m": 1}}, tmp_path / "good.pt")
    torch.save({"a": torch.ones(100, 100)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"a": object}, tmp_path / "class.pt")
    torch.save({1, 2}, tmp_path / "set.pt")
    torch.save({"a": {(1, 2): 3}}, tmp_path / "key.pt")
    save_file({"a": torch.ones(100)}, tmp_path / "good.safetensors")
    for name, of, size in (("cut.pt", "good.pt", 20_000), ("cut.bin", "old.bin", 20_000)):
        (tmp_path / name).write_bytes((tmp_path / of).read_bytes()[:size])
    content = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-7])
    (tmp_path / "header.safetensors").write_bytes(content[:30])
    (tmp_path / "text.safetensors").write_bytes(b"<html>not found</html>")
    (tmp_path / "zip.safetensors").write_bytes((tmp_path / "good.pt").read_bytes())
    for name in ("pointer.pt", "pointer.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
    for name in ("empty.pt", "empty.safetensors"):
        (tmp_path / name).touch()
    for name in ("folder.pt", "folder.safetensors", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder.pt" / "inner.pth").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "what", "fix"),
    [
        ("cut.pt", 2, CUT, AGAIN),
        ("cut.bin", 2, "the file is damaged or contains other objects", f"{AGAIN}, or save only a state dict"),
        ("empty.pt", 2, "is empty", AGAIN),
        ("pointer.pt", 2, "is a Git LFS pointer", "run `git lfs pull` in its folder"),
        ("class.pt", 2, "the file contains object", "save only a state dict"),
        ("set.pt", 2, "expected a dict, got a set", "save a dict of names and tensors"),
        ("key.pt: a", 2, "expected a string or an integer as a key, got (1, 2)", "save this part with other keys"),
        ("folder.pt", 2, NO_FOLDER, "pass the file to import, such as {folder}/folder.pt/inner.pth"),
        ("missing.pt", 4, "not found", "pass an existing file or folder"),
        ("empty.safetensors", 2, "is empty", AGAIN),
        ("pointer.safetensors", 2, "is a Git LFS pointer", "run `git lfs pull`"),
        ("header.safetensors", 2, "truncated: expected a header of 64 bytes, got 22", AGAIN),
        ("cut.safetensors", 2, "incomplete metadata, file not fully covered", AGAIN),
        ("text.safetensors", 2, "is not a valid safetensors file: header too large", AGAIN),
        ("zip.safetensors", 2, "looks like a torch.save file", "pass --format torch"),
        ("folder.safetensors", 2, NO_FOLDER, "pass a file, or a folder with such files"),
        ("missing.safetensors", 4, "not found", "pass an existing file or folder"),
        ("none", 2, NO_FOLDER, "pass a file"),
    ],
)
def test_a_source_is_refused_in_one_line(toolkit, sources: Path, name: str, code: int, what: str, fix: str) -> None:
    said = toolkit("ckpt", "import", sources / name.partition(":")[0], sources / "new")
    message, _, told = said.err.partition(". Fix: ")
    assert said.code == code and said.out == "" and said.err.count("\n") == 1, said
    assert message.startswith(f"toolkit: {sources / name}: ") and what in message, said
    assert told.startswith(fix.format(folder=sources)), said
    assert not (sources / "new").exists()


@pytest.mark.parametrize(
    ("name", "kind", "what", "fix"),
    [
        ("folder.pt", "torch", "is a folder", "pass a torch.save file in this folder"),
        ("good.safetensors", "torch", "looks like a safetensors file", "pass --format safetensors"),
        ("text.safetensors", "torch", "does not look like a torch.save file", "pass another file\n"),
        (
            "good.pt",
            "dcp",
            "expected a dcp.save folder, got a file",
            "pass the folder with .metadata, or omit --format",
        ),
        ("good.pt", "safetensors", "looks like a torch.save file", "pass --format torch"),
        ("none", "dcp", "contains no .metadata", "pass a dcp.save folder"),
        ("none", "safetensors", "contains no safetensors file", "pass the file or its folder"),
    ],
)
def test_a_format_that_is_not_the_sources_is_refused(
    toolkit, sources: Path, name: str, kind: str, what: str, fix: str
) -> None:
    said = toolkit("ckpt", "import", sources / name, sources / "new", "--format", kind)
    assert f"toolkit: {sources / name}: {what}. Fix: {fix}" in said.err and said.err.count("\n") == 1, said


@pytest.mark.parametrize("only", ["a", "n.m"])
def test_one_tensor_or_value_is_no_part(toolkit, sources: Path, only: str) -> None:
    said = toolkit("ckpt", "import", sources / "good.pt", sources / "new", "--only", only)
    assert said.code == 2 and f"good.pt: {only} is a single " in said.err and "omit --only" in said.err, said


def test_a_damaged_folder_of_dcp_is_to_be_fetched_again(toolkit, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"w": torch.ones(4, 2)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    metadata, data = folder / ".metadata", folder / "__0_0.distcp"
    whole = metadata.read_bytes(), data.read_bytes()
    for path, content, what in [
        (data, whole[1][:100], "refers to bytes after the end of __0_0.distcp, which may be truncated"),
        (data, None, "refers to the file __0_0.distcp, which is missing"),
        (metadata, whole[0][:-9], "cannot be read safely as torch.distributed.checkpoint metadata"),
        (metadata, b"", "is empty"),
    ]:
        path.unlink() if content is None else path.write_bytes(content)
        said = toolkit("ckpt", "import", folder, tmp_path / "new")
        assert said.code == 2 and f"{metadata}: {what}" in said.err and said.err.count("\n") == 1, said
        assert "Fix: copy or fetch the whole f" in said.err
        data.write_bytes(whole[1])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; those of pytest are for its user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_what_this_user_may_not_read_is_said_so(open_folder: Path) -> None:
    torch.save({"a": torch.ones(1)}, open_folder / "closed.pt")
    save_file({"a": torch.ones(1)}, open_folder / "closed.safetensors")
    for path in (open_folder / "closed.pt", open_folder / "closed.safetensors"):
        path.chmod(0)
        done = typed("import", path, open_folder / "new", unprivileged=True)
        fix = "Fix: ask its owner for read permission (chmod), or pass a copy"
        assert (done.returncode, done.stderr) == (2, f"toolkit: {path}: cannot be read: Permission denied. {fix}\n")


def test_a_header_as_long_as_no_file_takes_no_memory(toolkit, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    said = toolkit("ckpt", "import", tmp_path / "m.safetensors", tmp_path / "new")
    assert "truncated: expected a header of 99000000 bytes, got 2" in said.err


@pytest.mark.parametrize("name", ["good.pt", "old.bin", "good.safetensors"])
def test_a_file_whose_name_tells_no_format_is_known_by_its_beginning(toolkit, sources: Path, name: str) -> None:
    (sources / name).rename(sources / "weights")
    toolkit.ok("ckpt", "import", sources / "weights", sources / "new")


def test_a_format_that_is_proposed_is_taken(toolkit, sources: Path) -> None:
    for number, name in enumerate(("good.safetensors", "good.pt")):
        other = {"good.safetensors": "torch", "good.pt": "safetensors"}[name]
        said = toolkit("ckpt", "import", sources / name, sources / "new", "--step", number, "--format", other)
        fix = said.err.partition("Fix: pass ")[2].split()
        assert said.code == 2 and len(fix) == 2, said
        toolkit.ok("ckpt", "import", sources / name, sources / "new", "--step", number, *fix)
    # Of a file of no format none is proposed.
    (sources / "text.safetensors").rename(sources / "text")
    for words in ((), ("--format", "torch"), ("--format", "safetensors")):
        said = toolkit("ckpt", "import", sources / "text", sources / "new", "--step", 9, *words)
        assert said.code == 2 and "--format" not in said.err, said
