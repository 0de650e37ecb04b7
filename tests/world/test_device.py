"""The device of a rank: whole GPUs, slices, and a library that does not work."""

import os
import sys
from types import SimpleNamespace

import pytest

from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rank import torch_variables
from toolkit.world import device, discover
from toolkit.world.device import choose_device, own_slice, visible_gpus


class NVMLError(Exception):
    def __init__(self, value, text):
        self.value = value
        super().__init__(text)


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """Replace NVML by one that counts `gpus`, or fails with `error`."""
    monkeypatch.setattr(device, "_KFD_NODES", tmp_path)

    def set_nvml(gpus=0, error=None):
        def start():
            if error is not None:
                raise error

        library = SimpleNamespace(
            NVMLError=NVMLError, nvmlInit=start, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: gpus
        )
        monkeypatch.setitem(sys.modules, "pynvml", library)

    return set_nvml


@pytest.mark.parametrize(
    ("gpus", "names", "ranks"), [(1, "MIG-a,MIG-b,MIG-c,MIG-d", 4), (8, "MIG-a,MIG-b", 2), (8, "MIG-a", 4)]
)
def test_each_rank_has_its_own_slice(nvml, gpus, names, ranks):
    nvml(gpus)
    environ = {"CUDA_VISIBLE_DEVICES": names, "SLURM_STEP_GPUS": "0"}
    assert visible_gpus(environ) == len(names.split(","))
    assert [choose_device(rank, ranks, environ) for rank in range(ranks)] == ["cuda:0"] * ranks
    slices = [own_slice(rank, environ) for rank in range(ranks)]
    assert slices == (names.split(",") if "," in names else [""] * ranks)


def test_fewer_slices_than_ranks_are_refused_by_number(nvml):
    nvml(1)
    with pytest.raises(ToolkitError, match="got 2 visible MIG slices for 4 ranks"):
        choose_device(0, 4, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b", "SLURM_STEP_GPUS": "0"})


def test_names_of_slices_are_no_gpus_without_a_driver(nvml):
    nvml(error=NVMLError(12, "NVML Shared Library Not Found"))
    assert choose_device(0, 2, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == "cpu"


def test_whole_gpus_are_numbered(nvml):
    nvml(4)
    assert [choose_device(rank, 2, {}) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert own_slice(1, {"CUDA_VISIBLE_DEVICES": "0,1"}) == own_slice(0, {}) == ""


def test_the_slice_of_a_rank_is_the_only_one_that_it_sees(nvml, monkeypatch):
    nvml(1)
    for name, value in {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b", "TOOLKIT_LAUNCHER": "local", "RANK": "1", "LOCAL_RANK": "1",
                        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for _ in range(2):  # such as in a process that the rank starts
        assert discover.discover().device == "cuda:0"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"


def test_a_program_sees_only_the_slice_of_its_rank(monkeypatch, tmp_path):
    for name, value in {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b", "TOOLKIT_WORLD_SIZE": "2", "TOOLKIT_RANKS_PER_NODE": "2",
                        "TOOLKIT_LAUNCHER": "local", "TOOLKIT_ATTEMPT": "0", "TOOLKIT_RUN_DIR": str(tmp_path), "LOCAL_RANK": "1",
                        }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    endpoint = SimpleNamespace(host="h", port=1, listener=None)
    monkeypatch.setattr(torch_variables, "meet", lambda *_, **__: endpoint)
    before = dict(os.environ)
    torch_variables.set_for_program(1, "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_a_library_that_does_not_work_is_not_silent(nvml):
    nvml(error=NVMLError(18, "Driver/library version mismatch"))
    with pytest.raises(OwnFailureError, match="NVML reports none: Driver/library version mismatch"):
        choose_device(0, 2, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert choose_device(0, 2, {}) == choose_device(0, 2, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == "cpu"
