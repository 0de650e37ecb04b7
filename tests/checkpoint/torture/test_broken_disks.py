"""A disk that is full, read-only, over quota or broken: one clear error on all ranks, and the last good checkpoint stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from committed_states import json_of, load_name, tensors_of
from sampling import sampled
from system_calls import chosen, moment_of, moments
from torture_scale import cases, spread
from torture_tally import Tally
from traced_ranks import Ended, Fault, Tracing, end_tracing, require_strace, run_ranks

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.deletion import await_deletions
from toolkit.checkpoint.folder.verify import verify_fully
from toolkit.checkpoint.folder.writer_lock import WRITER
from toolkit.checkpoint.format.filters import Compression
from toolkit.checkpoint.format.layout import committed_steps
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

DISK_BYTES = 12 << 20
T = TypeVar("T")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few MiB: ext4 in a file, or where that cannot be mounted, in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    mounted = shutil.which("mkfs.ext4") is not None and not any(
        subprocess.run(argv, capture_output=True).returncode
        for argv in (["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, disk])
    )
    if not mounted:
        memory = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], capture_output=True
        )
        if memory.returncode:
            pytest.skip("this root may not mount (a container)")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def again(work: Callable[[], T]) -> T:
    """What is no part of the save: a fault that befalls it was meant for the save, and comes once."""
    try:
        return work()
    except OSError:
        os.write(2, b"the fault missed the save\n")
        return work()


def save_then_mend(
    world: World, tell: Callable[[Any], None], directory: Path, mend: list[str], compression: Compression = "none"
) -> None:
    """Save step 2, which may be refused; then rank 0 mends the disk, and step 3 is saved."""
    import torch.distributed as dist

    from toolkit.comm.agreement import from_rank_zero

    checkpoints = Checkpointer(directory, world, keep_last=2, compression=compression)
    name = (2, world.attempt)
    again(lambda: os.write(2, b"step 2 begins\n"))
    told: dict[str, Any]
    try:
        checkpoints.save(2, tensors_of(name, [world.rank]), json_of(name))
        told = {"returned": name}
    except ToolkitError as error:
        told = {"error": str(error), "fix": error.fix, "kind": type(error).__name__}
    again(lambda: tell(told))
    assert await_deletions(30)
    again(lambda: os.write(2, b"step 2 is over\n"))
    if world.size > 1:
        dist.barrier()
    stands = again(lambda: sorted(path.name for path in directory.iterdir() if path.name != WRITER))
    again(lambda: tell({"stands": stands}))
    again(end_tracing)
    from_rank_zero(world, lambda: subprocess.run(mend, check=True).returncode)
    checkpoints.save(3, tensors_of((3, world.attempt), [world.rank]), json_of((3, world.attempt)))
    tell({"returned": (3, world.attempt)})
    assert await_deletions(30)


def save_first(folder: Path, directory: Path, size: int) -> None:
    """Step 1, of an attempt before."""
    ended = run_ranks(folder, save_step_one, (directory,), size=size, attempt=0)
    assert all(rank.code == 0 for rank in ended), ended


def save_step_one(world: World, tell: Callable[[Any], None], directory: Path) -> None:
    Checkpointer(directory, world).save(1, tensors_of((1, 0), [world.rank]), json_of((1, 0)))


def refusal(ended: list[Ended], reasons: Iterable[str]) -> str | None:
    """Why all ranks were refused step 2, in the same words; None where all have saved it."""
    told = [[said for said in rank.told if "stands" not in said] for rank in ended]
    assert all(rank.code == 0 for rank in ended), [(rank.code, rank.told, rank.stderr[-2000:]) for rank in ended]
    first = {str(said[0]) for said in told}
    assert len(first) == 1, f"the ranks were told different things: {first}"
    error = told[0][0].get("error")
    if error is None:
        return None
    assert any(reason in error for reason in reasons), error
    assert "checkpoint of step 2 was not saved: rank " in error
    assert "step 1 is the last good checkpoint" in error and "\n" not in error, error
    return error


def assert_clean(directory: Path, ended: list[Ended], size: int, *, refused: bool) -> None:
    """Nothing of the failed save stood when it had failed, and the next one is there."""
    (stood,) = (said["stands"] for said in ended[0].told if "stands" in said)
    assert stood == (["step-00000001"] if refused else ["step-00000001", "step-00000002"]), stood
    assert all(not verify_fully(folder)[1] for folder in committed_steps(directory).values())
    assert load_name(directory, list(range(size)), 2) == (3, 1)


def remove(folder: Path) -> None:
    """A listed file was once gone when it was to be unlinked: what counts is that nothing is left to fill the disk."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("size", "compression"),
    sampled([(1, "none"), (2, "none"), (2, "gzip")], lambda case: case == (2, "none")),
    ids=["1 rank", "2 ranks", "2 ranks, compressed"],
)
def test_full_at_any_level(small_disk, tmp_path, size, compression: Compression, tally: Tally):
    """From a disk that takes nothing more to one that takes all of a save."""
    save_first(tmp_path / "first", tmp_path / "before", size)
    needed = sum(file.stat().st_blocks * 512 for file in (tmp_path / "before").rglob("*"))
    levels = range(0, int(1.3 * needed), int(1.3 * needed) // 25)
    refused = 0
    for number, free_bytes in enumerate(spread(levels, cases(25, 4 - size))):
        directory, ballast = small_disk / str(number), small_disk / "ballast"
        shutil.copytree(tmp_path / "before", directory)
        fill(ballast, free_bytes)
        arguments = (directory, ["rm", str(ballast)], compression)
        ended = run_ranks(tmp_path / f"ranks-{number}", save_then_mend, arguments, size=size)
        error = refusal(ended, ("No space left on device",))
        if error is not None:
            assert all("free space there" in rank.told[0]["fix"] for rank in ended)
            refused += 1
        assert_clean(directory, ended, size, refused=error is not None)
        kind = f"{size} rank{'s' * (size > 1)}{', compressed' * (compression != 'none')}"
        tally.case(kind, "saved" if error is None else "refused clearly")
        remove(directory)
    assert 0 < refused < number + 1


def fill(ballast: Path, free_bytes: int) -> None:
    """Take all but so many bytes of the disk."""
    os.sync()  # what was deleted before is free
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    for piece in (bytes(1 << 20), bytes(1 << 12), bytes(1 << 9)):
        try:
            while os.write(descriptor, piece):
                os.fsync(descriptor)
        except OSError as error:
            assert error.errno == errno.ENOSPC
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - free_bytes)
    os.fsync(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("size", sampled([1, 2], lambda case: case[0] == 2), ids=["1 rank", "2 ranks"])
def test_read_only(small_disk, tmp_path, size, tally: Tally):
    """As a kernel mounts a disk again after an error."""
    directory = small_disk / "checkpoints"
    save_first(tmp_path / "first", directory, size)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    arguments = (directory, ["mount", "-o", "remount,rw", str(small_disk)])
    ended = run_ranks(tmp_path / "ranks", save_then_mend, arguments, size=size)
    assert refusal(ended, ("Read-only file system",)) is not None
    assert_clean(directory, ended, size, refused=True)
    tally.case(f"{size} rank{'s' * (size > 1)}", "refused clearly")


ERRORS = {name: os.strerror(getattr(errno, name)) for name in ("EIO", "ENOSPC", "EDQUOT", "EROFS")}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", sampled([1, 2], lambda case: case[0] == 2), ids=["1 rank", "2 ranks"])
def test_one_call_fails(in_memory, size, tally: Tally):
    """Each change of the file system fails once, on one of the ranks; then the disk is well again."""
    require_strace()
    save_first(in_memory / "first", in_memory / "before", size)
    wrong, refused = [], 0
    for number, fault in enumerate(faults(in_memory, size)):
        directory = in_memory / str(number)
        shutil.copytree(in_memory / "before", directory)
        tracing = Tracing(faults=[fault])
        ended = run_ranks(
            in_memory / f"ranks-{number}", save_then_mend, (directory, ["true"]), size=size, tracing=tracing
        )
        kind = f"{fault.call}, {size} rank{'s' * (size > 1)}"
        if any("step 2 begins" not in rank.stderr for rank in ended):
            tally.case(kind, "befell another thread, before the save")  # as gloo's, whose calls come in any order
            shutil.rmtree(directory)
            continue
        try:
            error = refusal(ended, ERRORS.values())
            assert_clean(directory, ended, size, refused=error is not None)
            if error is not None and (ERRORS["ENOSPC"] in error or ERRORS["EDQUOT"] in error):
                assert all("free space there" in one.told[0]["fix"] for one in ended)
            refused += error is not None
            tally.case(kind, "saved" if error is None else "refused clearly")
        except AssertionError as broken:
            wrong.append(f"{fault}: {broken}")
        shutil.rmtree(directory)
    assert not wrong, "\n".join(wrong)
    assert refused


def faults(folder: Path, size: int) -> Iterator[Fault]:
    """Errors of all kinds at moments of all kinds in saving step 2, on each of the ranks."""
    directory = folder / "undisturbed"
    shutil.copytree(folder / "before", directory)
    tracing = Tracing()
    run_ranks(folder / "ranks", save_then_mend, (directory, ["true"]), size=size, tracing=tracing)
    kinds = list(ERRORS)
    for rank, log in enumerate(tracing.logs):
        renamed = moment_of(log, ("rename",), 'step-00000002"') if rank == 0 else None
        of_save = moments(log, directory, first="step 2 begins", end="step 2 is over")
        if renamed is not None:  # what follows the commit has a test of its own
            of_save = of_save[: of_save.index(renamed) + 1]
        for number, moment in enumerate(chosen(of_save, cases(60 // size, 3 // size))):
            yield Fault(moment.call, moment.number, f"error={kinds[number % len(kinds)]}", rank)


def test_the_commit_cannot_be_synced(in_memory):
    """The folder has its name, and the folder around it does not reach the disk: it is taken back."""
    require_strace()
    save_first(in_memory / "first", in_memory / "before", 1)
    shutil.copytree(in_memory / "before", in_memory / "undisturbed")
    tracing = Tracing()
    run_ranks(in_memory / "ranks", save_then_mend, (in_memory / "undisturbed", ["true"]), tracing=tracing)
    synced = moment_of(tracing.logs[0], ("fsync",), "/undisturbed>")
    faults = [Fault(synced.call, synced.number, "error=EIO")]
    arguments = (in_memory / "before", ["true"])
    ended = run_ranks(in_memory / "ranks-1", save_then_mend, arguments, tracing=Tracing(faults=faults))
    error = refusal(ended, ERRORS.values())
    assert_clean(in_memory / "before", ended, 1, refused=error is not None)


def test_the_folder_cannot_be_listed(in_memory):
    """Where `Checkpointer` looks into it first."""
    require_strace()
    save_first(in_memory / "first", in_memory / "checkpoints", 1)
    tracing = Tracing(calls=("getdents64",), faults=[Fault("getdents64", 1, "error=EIO")])
    (ended,) = run_ranks(in_memory / "ranks", save_step_one, (in_memory / "checkpoints",), tracing=tracing)
    assert ended.code == 3, ended
    assert ended.told[0]["kind"] == "OwnFailureError"
    assert f"{in_memory}/checkpoints: cannot be read on " in ended.told[0]["error"]
    assert load_name(in_memory / "checkpoints", [0], 1) == (1, 0)
