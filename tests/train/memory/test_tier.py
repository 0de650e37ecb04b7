"""The tiers of offloaded tensors: exact copies of every type and layout, a file without a name, errors of disks."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.train.memory import tier as tiers
from toolkit.train.memory.tier import FileTier, HostTier

TENSORS = {
    "one element": torch.tensor([1.5]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "not a multiple of a page": torch.randn(1001),
    "several pieces": torch.randn(3, 1_000_003),
    "whole pages": torch.randn(5 << 19),
    "a page too short": torch.randn((1 << 20) - 1),
    "bf16": torch.randn(257, 33).bfloat16(),
    "bool": torch.rand(1000) > 0.5,
    "transposed": torch.randn(40, 30).t(),
    "channels last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "part of a larger one": torch.randn(100, 100)[10:20],
    "empty": torch.randn(0, 3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("kind", ["host", "file"])
def test_a_tensor_returns_as_it_was(tmp_path, tensor, kind):
    tier = HostTier("cpu") if kind == "host" else FileTier(tmp_path)
    other, slot = tier.slot(tensor), tier.slot(tensor)
    tier.write(slot, tensor)
    tier.write(other, tensor.new_zeros(()).expand_as(tensor).clone(memory_format=torch.preserve_format)).wait()
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    tier.read(slot, found).wait()
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    assert torch.equal(slot.kept, tensor), "a checkpoint reads it, too"
    near = tier.empty(slot, tensor.device)
    tier.read(slot, near).wait()
    tier.write(other, near).wait()
    assert torch.equal(near, tensor) and near.stride() == tensor.stride()
    assert torch.equal(other.kept, tensor)


def test_a_file_has_no_slots_with_gaps(tmp_path):
    with pytest.raises(AssertionError, match="gaps"):
        FileTier(tmp_path).slot(torch.zeros(10, 10)[:, :5])


def test_what_a_checkpoint_fills_is_read(tmp_path):
    tier = FileTier(tmp_path)
    slot = tier.slot(torch.zeros(100_000))
    with tier.host_access():
        slot.kept.copy_(torch.arange(100_000.0))
    found = torch.empty(100_000)
    tier.read(slot, found).wait()
    assert torch.equal(found, torch.arange(100_000.0))
    tier.write(slot, found + 1).wait()
    assert torch.equal(slot.kept, torch.arange(100_000.0) + 1), "a write reaches the mapping"


def test_many_tensors_at_once_in_several_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "_SEGMENT_BYTES", 1 << 20)
    tier = FileTier(tmp_path)
    tensors = [torch.randn(70_000) for _ in range(30)]
    slots = [tier.slot(tensor) for tensor in tensors]
    for transfer in [tier.write(*pair) for pair in zip(slots, tensors, strict=True)]:
        transfer.wait()
    found = [torch.empty(70_000) for _ in tensors]
    for transfer in [tier.read(*pair) for pair in zip(slots, found, strict=True)]:
        transfer.wait()
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
    assert tier.traffic.read_bytes == tier.traffic.written_bytes == 30 * 280_000


def test_the_file_has_no_name_and_no_other_user_can_read_it(tmp_path, monkeypatch):
    modes = []
    plain = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        modes.append(path.stat().st_mode & 0o777)
        plain(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    FileTier(tmp_path)
    assert modes == [0o600] and not list(tmp_path.iterdir())


def test_a_missing_folder_is_named():
    with pytest.raises(ToolkitError, match=r"train.offload_to = '/nowhere'.*use an existing folder"):
        FileTier(Path("/nowhere"))


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [("posix_fallocate", errno.ENOSPC, "No space left on device"), ("ftruncate", errno.EFBIG, "File too large")],
)
def test_a_full_disk_or_a_limit_of_file_sizes_is_named(tmp_path, monkeypatch, call, code, message):
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ToolkitError, match=rf"cannot reserve 3\.\d+ MiB .*{message}.*free space"):
        FileTier(tmp_path).slot(torch.zeros(1_000_000))


def test_the_file_is_closed_with_the_tier_and_stays_mapped_for_its_slots(tmp_path):
    tier = FileTier(tmp_path)
    slot = tier.slot(torch.zeros(10_000))
    tier.write(slot, torch.arange(10_000.0)).wait()
    number = tier._file
    assert "(deleted)" in str(Path(f"/proc/self/fd/{number}").readlink())
    del tier
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert torch.equal(slot.kept, torch.arange(10_000.0))


def test_processes_with_the_same_number_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    FileTier(tmp_path), FileTier(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


class Stream:
    """A stream whose work never ends; it records its order."""

    def __init__(self) -> None:
        self.order: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        self.order.append(other)

    def wait_event(self, event: object) -> None:
        self.order.append(event)

    def record_event(self) -> object:
        event = object()
        self.order.append(event)
        return event


def test_copies_from_a_gpu_do_not_stop_the_host_and_keep_their_tensors(monkeypatch):
    main, out, into = Stream(), Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    tier = HostTier("cpu")
    tier._streams = (out, into)
    tensor = torch.ones(3)
    slot, alive = tier.slot(tensor), weakref.ref(tensor)
    write = tier.write(slot, tensor)
    del tensor
    assert alive() is not None, "its memory has another use only after the copy"
    write.wait()
    (copied,) = main.order
    assert out.order == [main, copied] and alive() is None
    tier.read(slot, torch.zeros(3)).wait()
    assert into.order[:2] == [copied, main], "a read follows the write of its slot"
    assert main.order[-1] is into.order[-1]


def test_an_error_of_the_disk_reaches_who_waits(tmp_path, monkeypatch):
    tier = FileTier(tmp_path)
    tensor = torch.zeros(10_000)
    slot = tier.slot(tensor)

    def broken(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(ToolkitError, match=r"cannot move offloaded tensors: Input/output error.*check this disk"):
        tier.write(slot, tensor).wait()
