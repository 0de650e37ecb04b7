"""How two checkpoints differ is told in numbers, exactly, whatever the type; what is equal to the bit is not named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.contents.differences import (
    MISSING,
    NumberDifference,
    TensorDifference,
    keys_of,
    tensor_differences,
    value_differences,
)
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.world.facts import World

ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")
NAN, INF = float("nan"), float("inf")


def compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, TensorDifference]:
    """The differences of two state dicts that were saved."""
    folders = [Checkpointer(tmp_path / name, ALONE).save(1, value, {}) for name, value in (("a", a), ("b", b))]
    one, other = map(read_manifest, folders)
    with StoredTensors(folders[0], one) as first, StoredTensors(folders[1], other) as second:
        return {found.key: found for found in tensor_differences(first, second, keys_of(one, other))}


def numbers(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> NumberDifference:
    found = compare(tmp_path, {"x": a}, {"x": b})["x"].numbers
    assert found is not None
    return found


def test_a_checkpoint_does_not_differ_from_itself(tmp_path):
    values = {"x": torch.tensor([NAN, INF, -0.0, 1.0]), "y": torch.arange(6).reshape(2, 3), "z": torch.empty(0)}
    assert not compare(tmp_path, values, {name: value.clone() for name, value in values.items()})


def test_every_kind_of_difference_has_its_word(tmp_path):
    same = torch.ones(3)
    found = compare(
        tmp_path,
        {"gone": same, "same": same, "shape": torch.ones(2, 3), "type": torch.ones(2), "values": torch.ones(2)},
        {"new": same, "same": same, "shape": torch.ones(3, 2), "type": torch.ones(2).half(), "values": torch.zeros(2)},
    )
    assert {key: one.what for key, one in found.items()} == {
        "gone": "only_in_a", "new": "only_in_b", "shape": "shape", "type": "type", "values": "values",
    }  # fmt: skip
    assert found["type"].numbers is not None and found["type"].numbers.differing == 0


def test_the_numbers_of_a_difference(tmp_path):
    found = numbers(tmp_path, torch.tensor([1.0, 2.0, -4.0, 0.0]), torch.tensor([1.0, 5.0, 0.0, 0.0]))
    assert found == NumberDifference(4, 2, 4.0, 1.0, 5.0, 5.0 / math.sqrt(26), 0, 0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
)
def test_types_that_numpy_lacks_are_compared_as_numbers(tmp_path, dtype):
    found = numbers(tmp_path, torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, -1.5]).to(dtype))
    assert (found.differing, found.largest, found.norm) == (1, 3.5, 3.5)


def test_other_types_are_compared_by_value(tmp_path):
    exact = torch.tensor([1.0, 1 + 2.0**-10, NAN])
    found = compare(tmp_path, {"x": exact}, {"x": exact.bfloat16()})["x"]
    assert found.what == "type" and found.numbers is not None
    assert (found.numbers.differing, found.numbers.largest) == (1, 2.0**-10)
    assert (found.numbers.nans_a, found.numbers.nans_b) == (1, 1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        (torch.int64, 2**60, 2**60 + 1, 1),
        (torch.int64, -(2**63), 2**63 - 1, 2.0**64),
        (torch.uint8, 250, 3, 247),
        (torch.int8, -128, 127, 255),
        (torch.bool, True, False, 1),
    ],
)
def test_integers_are_subtracted_as_integers(tmp_path, dtype, a, b, distance):
    for one, other in ((a, b), (b, a)):
        found = numbers(tmp_path / str(one), torch.tensor([one, 7], dtype=dtype), torch.tensor([other, 7], dtype=dtype))
        assert (found.differing, found.largest) == (1, distance)


def test_what_is_no_number_is_counted_and_infinity_is_far_away(tmp_path):
    found = numbers(tmp_path / "nan", torch.tensor([NAN, 1.0, 2.0]), torch.tensor([1.0, NAN, 2.5]))
    assert (found.differing, found.nans_a, found.nans_b, found.largest) == (3, 1, 1, 0.5)
    found = numbers(tmp_path / "inf", torch.tensor([INF, INF, 1.0]), torch.tensor([INF, -INF, 2.0]))
    assert (found.differing, found.largest, found.norm) == (2, INF, INF)


def test_other_bits_of_one_number_are_a_difference_of_none(tmp_path):
    found = numbers(tmp_path, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.differing, found.largest, found.norm) == (1, 0.0, 0.0)


def test_slices_are_put_together(tmp_path):
    """More rows than one slice holds, and more elements than are reckoned with at once."""
    a = torch.arange(9_000_000, dtype=torch.float32).reshape(900, 10_000)
    b = a.clone()
    b[0, 0] += 3
    b[899, 9_999] -= 4
    found = numbers(tmp_path, a, b)
    assert (found.elements, found.differing, found.largest, found.norm) == (9_000_000, 2, 4.0, 5.0)


def test_a_damaged_tensor_is_named_and_the_others_are_compared(tmp_path):
    values = {"large": torch.ones(3, 1 << 20), "small": torch.zeros(4)}
    other = Checkpointer(tmp_path / "b", ALONE).save(1, {"large": values["large"], "small": torch.ones(4)}, {})
    folder = Checkpointer(tmp_path / "a", ALONE).save(1, values, {})
    manifest = read_manifest(folder)
    (piece,) = manifest.tensors["large"].pieces
    data = bytearray((folder / piece.file).read_bytes())
    data[piece.byte_offset + (5 << 20)] ^= 1
    (folder / piece.file).write_bytes(data)
    with StoredTensors(folder, manifest) as one, StoredTensors(other, read_manifest(other)) as two:
        found = {one.key: one for one in tensor_differences(one, two, ["large", "small"])}
    assert found["large"].what == "damaged" and "block" in found["large"].why and piece.file in found["large"].why
    assert found["small"].what == "values"


def test_values_differ_by_type_and_place(tmp_path):
    states = [
        {"same": [1, {"x": NAN}], "list": [1, 2], "deep": {"a": [{"b": 1}]}, "a.b": 1, "a": {"b": 2}, "one": 1},
        {"same": [1, {"x": NAN}], "list": [1, 3], "deep": {"a": [{"b": 2}]}, "a.b": 2, "a": {"b": 2}, "one": True},
    ]
    objects = [{"lr": 0.5, "old": None}, {"lr": 0.25, "state": {"one": 1}}]
    folders = [
        Checkpointer(tmp_path / str(number), ALONE).save(1, {"x": torch.ones(1), **objects[number]}, states[number])
        for number in range(2)
    ]
    a, b = map(read_manifest, folders)
    found = [(one.key, one.a, one.b) for one in value_differences(a, b)]
    assert sorted(found, key=repr) == sorted(
        [
            ("lr", 0.5, 0.25), ("old", None, MISSING), ("state.one", MISSING, 1), ("state.one", 1, True),
            ("state.list", [1, 2], [1, 3]), ("state.deep.a[0].b", 1, 2), ("state.a.b", 1, 2),
        ],
        key=repr,
    )  # fmt: skip
    assert not value_differences(a, a)
    assert [one.key for one in value_differences(a, b, ["state.deep"])] == ["state.deep.a[0].b"]
