"""Which GPU of the machine "cuda:0" is, with a library shaped like pynvml: none of its GPUs exist."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.world.physical_gpu import gpu_of_device, gpus_of_process


class FourGpus:
    """What is asked of nvidia-ml-py. A MIG device of GPU 2 is the only one."""

    class NVMLError(Exception):
        pass

    def __init__(self, names=("H100",) * 4, *, lost: bool = False) -> None:
        self.names, self.lost, self.open = names, lost, 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.lost and index == 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}a-0000".encode()  # older releases give bytes

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetHandleByUUID(self, name):
        if name != "MIG-7":
            raise self.NVMLError
        return "a part of GPU 2"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle == "a part of GPU 2"
        return 2


def shown(library=None, **environ):
    library = library or FourGpus()
    gpus = gpus_of_process(environ, library)
    assert library.open == 0
    return [int(gpu.bus.split(":")[1]) for gpu in gpus]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3", [3]),
        ("2,0", [2, 0]),
        ("GPU-3a-0000,1", [3, 1]),
        ("GPU-2", [2]),
        ("GPU-", []),  # which one?
        ("1,-1,2", [1]),  # CUDA reads no further
        ("9", []),
        ("", []),
        ("NoDevFiles", []),
        ("MIG-7", [2]),
        ("MIG-8", []),
    ],
)
def test_the_environment_shows_some_of_the_gpus(visible, expected):
    assert shown(CUDA_VISIBLE_DEVICES=visible) == expected


def test_without_a_word_all_are_shown_in_the_order_of_the_bus():
    assert shown() == [0, 1, 2, 3]


def test_cuda_numbers_unequal_gpus_in_an_order_of_its_own():
    mixed = FourGpus(("T400", "H100", "H100", "H100"))
    assert shown(mixed) == [] and shown(mixed, CUDA_VISIBLE_DEVICES="1") == []
    assert shown(mixed, CUDA_VISIBLE_DEVICES="GPU-1a-0000") == [1], "a UUID needs no order"
    assert shown(mixed, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]


def test_nothing_is_said_of_a_node_whose_gpu_is_lost():
    assert shown(FourGpus(lost=True)) == []


def test_the_device_of_a_rank_is_one_of_those():
    gpus = gpus_of_process({"CUDA_VISIBLE_DEVICES": "3"}, FourGpus())
    assert gpu_of_device("cuda:0", gpus).uuid == "GPU-3a-0000"
    assert gpu_of_device("cuda:1", gpus) is gpu_of_device("cpu", gpus) is None
