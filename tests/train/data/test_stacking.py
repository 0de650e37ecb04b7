from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from toolkit.train.data.stacking import stack
from toolkit.train.data.travel import MOST_BYTES, packed, unpacked

SAMPLES = [
    {"x": torch.arange(3), "pair": (torch.ones(2), 1.5), "name": "a", "n": 1, "array": np.ones(2, np.float32)},
    {"x": torch.arange(3, 6), "pair": (torch.zeros(2), 2.5), "name": "b", "n": 2, "array": np.zeros(2, np.float32)},
]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("samples", [SAMPLES, [1, 2], ["a", "b"], [torch.ones(()), torch.zeros(())], [torch.ones(2, 3)] * 4, [(1, torch.ones(2))] * 2, [[1, 2], [3, 4]]])  # fmt: skip
def test_a_batch_is_what_torch_makes_of_it(samples):
    assert same(stack(samples), default_collate(samples))


def test_samples_that_do_not_match_are_refused_as_torch_does():
    for wrong in ([{"x": 1}, {"y": 2}], [(1, 2), (1,)], [torch.ones(2), torch.ones(3)]):
        with pytest.raises((RuntimeError, KeyError)):
            stack(wrong)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn])  # fmt: skip
def test_what_travels_comes_as_it_went(dtype):
    tensors = [torch.tensor([0, 1, 1]).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 3).to(dtype), torch.ones(4, 4).to(dtype)[:, 1:]]  # fmt: skip
    batch = {"a": tensors, "b": (1, "x", None)}
    # As a queue between processes does it.
    back = unpacked(pickle.loads(ForkingPickler.dumps(packed(batch))))
    assert all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())
        for one, other in zip(tensors, back["a"], strict=True)
        if not dtype.is_complex
    )
    assert back["b"] == batch["b"] and [one.dtype for one in back["a"]] == [dtype] * 4
    back["a"][0][0] = 1  # it is the rank's own, to write to


def test_large_tensors_are_left_to_shared_memory():
    for size, small in ((MOST_BYTES, True), (MOST_BYTES + 1, False)):
        tensor = torch.zeros(size, dtype=torch.uint8)
        assert isinstance(packed(tensor), torch.Tensor) is not small
