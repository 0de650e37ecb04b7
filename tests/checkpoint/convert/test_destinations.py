"""Where exports and imports may go: never into a checkpoint, and what cannot be written is said so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from exported import save
from safetensors.torch import save_file

from toolkit.checkpoint.convert.destination import refuse_checkpoint

SHARD = "shard-00000-of-00001.h5"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, {"model": {"w": torch.ones(2)}})


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        ("step-00000007/manifest.json", "torch", "is inside the checkpoint step-00000007"),
        (f"step-00000007/{SHARD}", "torch", "is inside the checkpoint step-00000007"),
        ("step-00000007/x.pt", "torch", "is inside the checkpoint step-00000007"),
        ("step-00000007/new/x.safetensors", "safetensors", "is inside the checkpoint step-00000007"),
        ("step-00000007", "safetensors", "is a checkpoint"),
        ("step-00000007", "dcp", "is a checkpoint"),
        ("link", "dcp", "is a checkpoint"),
        ("step-00000008", "safetensors", "has a name that is reserved for checkpoints"),
        ("step-00000008", "torch", "has a name that is reserved for checkpoints"),
        ("step-00000008.bad-1", "dcp", "has a name that is reserved for checkpoints"),
        ("step-00000009.part-0-1/x.pt", "torch", "is inside the checkpoint step-00000009.part-0-1"),
        ("renamed", "safetensors", "is a checkpoint"),
        ("renamed/manifest.json", "torch", "is inside the checkpoint renamed"),
        ("damaged", "safetensors", "is a checkpoint"),
    ],
)
def test_no_export_goes_into_a_checkpoint(toolkit, saved: Path, place: str, kind: str, said: str) -> None:
    checkpoints = saved.parent
    for name in ("renamed", "damaged"):
        (checkpoints / name).mkdir()
        for path in saved.iterdir():
            (checkpoints / name / path.name).write_bytes(path.read_bytes())
    (checkpoints / "damaged" / "manifest.json").write_bytes(b"{}")
    (checkpoints / "step-00000009.part-0-1").mkdir()
    (checkpoints / "link").symlink_to(saved)
    before = contents(checkpoints)
    for force in ([], ["--force"]):
        done = toolkit("ckpt", "export", saved, checkpoints / place, "--format", kind, *force)
        assert done.code == 2 and f": {said}. Fix: " in done.err and done.err.count("\n") == 1, done
    assert contents(checkpoints) == before and not (checkpoints / "step-00000008").exists()


def test_a_manifest_of_another_program_is_no_checkpoint(toolkit, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "page"}')
    toolkit.ok("ckpt", "export", saved, tmp_path / "page" / "step-00000007.pt")
    toolkit.ok("ckpt", "export", saved, saved / ".." / ".." / "state.pt")
    refuse_checkpoint(tmp_path / "page")


def test_no_import_goes_into_a_checkpoint(toolkit, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, source)
    new = tmp_path / "im" / "step-00000005"
    for place, fix in [
        (new, f"DEST must not be the folder of one step. Fix: pass {tmp_path / 'im'} as DEST, and --step 5\n"),
        (saved, f"is a checkpoint. Fix: choose a path outside of {saved}\n"),
        (saved / "deeper", f"is inside the checkpoint step-00000007. Fix: choose a path outside of {saved}\n"),
    ]:
        done = toolkit("ckpt", "import", source, place)
        assert done.code == 2 and done.err == f"toolkit: {place}: {fix}", done
    assert not new.parent.exists()


LONG = "n" * 250  # a name may have 255 bytes


def test_what_cannot_be_written_is_not_called_unreadable(toolkit, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, source)
    reader, writer = os.pipe()
    (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
    try:
        for words, part in [
            (["export", saved, "/proc/x.pt"], "/proc/x.pt: cannot be written: No such file or directory"),
            (["export", saved, "/proc/x/y/z.pt"], "cannot be written: No such file or directory"),
            (["export", saved, "/proc/x", "--format", "dcp"], "cannot be written: No such file or directory"),
            (["export", saved, tmp_path / f"{LONG}{LONG}.pt"], "cannot be written: File name too long"),
            (["export", saved, f"/dev/fd/{writer}", "--format", "torch"], f"/dev/fd/{writer}: is not a regular file"),
            (["export", saved, tmp_path / "loop.pt"], "is a link to itself"),
            (["import", source, tmp_path / (LONG + LONG)], "cannot be written: File name too long"),
            (["import", source, "/proc/x"], "cannot be written: No such file or directory"),
        ]:
            done = toolkit("ckpt", *words)
            said = done.err.splitlines()[-1]
            assert done.code == 2 and part in said and "Fix: " in said and "cannot be read" not in said, done
    finally:
        os.close(reader)
        os.close(writer)


def test_a_name_may_be_as_long_as_the_system_takes(toolkit, saved: Path, tmp_path: Path) -> None:
    toolkit.ok("ckpt", "export", saved, tmp_path / f"{LONG}.pt")
    toolkit.ok("ckpt", "export", saved, tmp_path / ("ü" * 127), "--format", "dcp")


def test_a_checkpoint_of_another_steps_name_is_not_exported(toolkit, saved: Path, tmp_path: Path) -> None:
    """As it is not loaded; who looks at it is told."""
    renamed = saved.rename(saved.with_name("step-00000008"))
    wrong = (
        f"{renamed}/manifest.json: contains step 7, but the folder is named after step 8. Fix: mv {renamed} {saved}\n"
    )
    done = toolkit("ckpt", "export", renamed.parent, tmp_path / "o.pt")
    assert (done.code, done.err) == (1, f"toolkit: {wrong}") and not (tmp_path / "o.pt").exists()
    for words in (["show", renamed], ["index", renamed]):
        done = toolkit("ckpt", *words)
        assert (done.code, done.err) == (0, f"toolkit: {wrong}"), done
    done = toolkit("ckpt", "diff", renamed, renamed)
    assert (done.code, done.err) == (0, f"toolkit: {wrong}" * 2), done


def test_an_ending_and_a_format_that_contradict_are_refused(toolkit, saved: Path, tmp_path: Path) -> None:
    for name, kind, told in [
        ("o.safetensors", "torch", "safetensors"),
        ("o.safetensors", "dcp", "safetensors"),
        ("o.pt", "safetensors", "torch"),
        ("o.pth", "dcp", "torch"),
    ]:
        done = toolkit("ckpt", "export", saved, tmp_path / name, "--format", kind)
        assert done.code == 2 and f"{name}: DEST has the suffix of {told}, but --format is {kind}. Fix: " in done.err
        assert not (tmp_path / name).exists()


def test_options_of_no_sense_are_refused_by_their_names(toolkit, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, source)
    sized = ["export", saved, tmp_path / "sized", "--format", "safetensors", "--max-shard-size"]
    for words, part in [
        (
            ["import", source, tmp_path / "im", "--step", 2**63],
            f"--step: {2**63} is too large. Fix: choose a number up",
        ),
        (
            ["import", source, tmp_path / "im", "--under", "."],
            "--under: '.' has an empty name between its dots. Fix: separate",
        ),
        (
            ["import", source, tmp_path / "im", "--under", "a..b"],
            "--under: 'a..b' has an empty name between its dots. Fix: separate",
        ),
        (["import", "", tmp_path / "im"], "SOURCE: is empty. Fix: pass a path, such as . for the current folder"),
        (["import", source, ""], "DEST: is empty. Fix: pass a path, such as . for the current folder"),
        (
            ["export", saved, "", "--format", "safetensors"],
            "DEST: is empty. Fix: pass a path, such as . for the current folder",
        ),
        (["export", "", tmp_path / "o.pt"], "RUN: is empty. Fix: pass a path, such as . for the current folder"),
        (["show", ""], "RUN: is empty. Fix: pass a path, such as . for the current folder"),
        ([*sized, "5XB"], "--max-shard-size: '5XB' has the unknown unit 'XB'. Fix: write one of B, or K"),
        ([*sized, "5 parsecs"], "'5 parsecs' has the unknown unit 'parsecs'. Fix: write one of"),
        ([*sized, "5iB"], "'5iB' has the unknown unit 'iB'. Fix: write one of"),
        ([*sized, "500"], "--max-shard-size: '500' has no unit. Fix: write one of B, or K"),
        ([*sized, "much"], "--max-shard-size: expected a size, got 'much'. Fix: write 5GB"),
    ]:
        done = toolkit("ckpt", *words)
        assert done.code == 2 and part in done.err and done.err.count("\n") == 1, done
    assert not (tmp_path / "im").exists()
