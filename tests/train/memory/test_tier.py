"""The tiers of offloaded tensors: exact copies of every type and layout, a file without a name, errors of disks."""

from __future__ import annotations

import os
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


def test_what_a_checkpoint_fills_is_read(tmp_path):
    tier = FileTier(tmp_path)
    slot = tier.slot(torch.zeros(100_000))
    with tier.reached():
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


def test_a_full_disk_is_named_before_training_uses_it(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ToolkitError, match=r"cannot reserve 3\.\d+ MiB .*No space left on device.*free space"):
        FileTier(tmp_path).slot(torch.zeros(1_000_000))


def test_an_error_of_the_disk_reaches_who_waits(tmp_path, monkeypatch):
    tier = FileTier(tmp_path)
    tensor = torch.zeros(10_000)
    slot = tier.slot(tensor)

    def broken(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(ToolkitError, match=r"cannot move offloaded tensors: Input/output error.*check this disk"):
        tier.write(slot, tensor).wait()
