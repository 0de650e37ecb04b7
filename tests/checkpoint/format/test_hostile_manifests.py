"""A manifest that somebody wrote on purpose, with a digest that is right: nothing outside is touched, no memory taken."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import put, signed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.errors import CorruptCheckpointError
from toolkit.checkpoint.format.layout import MANIFEST
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.errors import ToolkitError
from toolkit.world.facts import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ALONE = World(0, 0, 1, 1, 0, 1, "here", "cpu", "none", "alone")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"weight": torch.ones(4, 6), "nested": {"bias": torch.ones(6, dtype=torch.bfloat16)}, "rate": 0.5}
    return Checkpointer(tmp_path_factory.mktemp("hostile"), ALONE).save(3, tensors, {"loss": float("nan")})


def read(folder: Path, body: dict[str, Any]) -> Any:
    (folder / MANIFEST).write_text(signed(body))
    return read_manifest(folder)


def body_of(saved: Path) -> dict[str, Any]:
    return json.loads((saved / MANIFEST).read_text())


BIAS = "nested.bias"  # 12 bytes, in file 1; file 0 has its digests
HUGE = 2**40
DEEP: list[Any] = []
for _ in range(700):  # JSON takes them
    DEEP = [DEEP]
WRONG = [
    ("files/0/name", "../../home/ada/.ssh/id_rsa", "is not a valid name of a shard or digest file"),
    ("files/0/name", "/etc/passwd", "is not a valid name of a shard or digest file"),
    ("files/0/name", "shard-00000-of-00001.h5\n", "is not a valid name of a shard or digest file"),
    ("files/0/name", "shard-00000-of-00001.h5", "lists a file twice"),
    ("files/0/name", "shard-00001-of-00002.digest", "without its digest file"),
    ("files/0/size", -1, "expected an integer of at least 0"),
    ("files/0/size", True, "expected an integer of at least 0"),
    ("files/0/digest", "0" * 31, "is not a valid digest"),
    (f"tensors/{BIAS}/shape", [HUGE, HUGE, HUGE], "is too large for a file"),
    (f"tensors/{BIAS}/shape", [1] * 33, "expected a list of at most 32 numbers"),
    (f"tensors/{BIAS}/shape", [-6], "expected an integer of at least 0"),
    (f"tensors/{BIAS}/shape", [6.0], "expected an integer of at least 0"),
    (f"tensors/{BIAS}/dtype", "object", "elements of type 'object'"),
    (f"tensors/{BIAS}/path", [["nested"]], "is not a valid path"),
    (f"tensors/{BIAS}/path", [], "its path [] does not match its key"),
    (f"tensors/{BIAS}/path", ["weight"], "its path ['weight'] does not match its key"),
    (f"tensors/{BIAS}/path", ["nested", "bias", 0], "does not match its key"),
    ("objects/rate/path", [], "rate: its path [] does not match its key"),
    ("objects/rate/path", ["weight"], "rate: its path ['weight'] does not match its key"),
    ("objects/weight", {"path": ["weight"], "value": 1}, "weight: is listed both as a tensor and as an object"),
    (f"tensors/{BIAS}/pieces/0/0", 0, "which is not a shard file"),
    (f"tensors/{BIAS}/pieces/0/0", 9, "which is not a shard file"),
    (f"tensors/{BIAS}/pieces/0/1", [1], "is outside of [6]"),
    (f"tensors/{BIAS}/pieces/0/2", [6, 1], "is outside of [6]"),
    (f"tensors/{BIAS}/pieces/0/3", HUGE, "beyond the end of shard-00000-of-00001.h5"),
    (f"tensors/{BIAS}/pieces/0/3", -2, "expected an integer of at least 0"),
    (f"tensors/{BIAS}/pieces", [[0, [0], [0], 0], [1, [0], [6], 0]], "which is not a shard file"),
    (f"tensors/{BIAS}/pieces", [[1, [0], [7], 0], [1, [7], [-1], 0]], "is outside of [6]"),
    (f"tensors/{BIAS}/pieces/0", [1, [0], [6]], "has a missing or invalid key"),
    (f"tensors/{BIAS}/pieces", [], "do not contain each element of [6] exactly once"),
    (f"tensors/{BIAS}/pieces", [[1, [0], [3], 0], [1, [3], [2], 0]], "do not contain each element of [6] exactly once"),
    (f"tensors/{BIAS}/pieces", [[1, [0], [3], 0], [1, [2], [3], 0]], "two pieces contain the same elements, at [2]"),
    ("tensors/weight/pieces", [[1, [0, 0], [2, 6], 0], [1, [1, 0], [1, 6], 0], [1, [3, 0], [1, 6], 0]], "the same elements"),
    ("tensors", [], "tensors: expected a table, got []"),
    ("world/size", 0, "expected an integer of at least 1"),
    ("world/mesh", ["gpu"], "world.mesh: expected a table, got 'gpu'"),
    ("step", "3", "step: expected an integer of at least 0, got '3'"),
    ("state", {"$dict": [[{}, 1]]}, "state: {} is a duplicate or invalid key"),
    ("state", {"$dict": [[{"$tuple": [[]]}, 1]]}, "state: {'$tuple': [[]]} is a duplicate or invalid key"),
    ("state", {"$dict": [[1, 2], [1, 3]]}, "state: 1 is a duplicate or invalid key"),
    ("state/run", {"$dict": [[1, {"$dict": {"a": 1}}]]}, "state['run'][1]: {'$dict': {'a': 1}} is not a valid value of this"),
    ("state/run", {"$dict": [5]}, "state['run']: expected a key and its value, got 5"),
    ("state/run", {"$dict": ["ab"]}, "state['run']: expected a key and its value, got 'ab'"),
    ("state/run", {"$tuple": 5}, "state['run']: {'$tuple': 5} is not a valid value of this format"),
    ("state/run", {"$float": "1e5"}, "state['run']: {'$float': '1e5'} is not a valid value of this format"),
    ("state/run", {"$float": []}, "state['run']: {'$float': []} is not a valid value of this format"),
    ("state/run", {"$tuple": [], "b": 1}, "state['run']: {'$tuple': [], 'b': 1} is not a valid value of this format"),
    ("state", {"$tuple": [1]}, "state: expected a table, got (1,)"),
    ("state/run", {"$list": []}, "state['run']: {'$list': []} is not a valid value of this format"),
    ("objects/rate/value", {"$tuple": "ab"}, "rate: {'$tuple': 'ab'} is not a valid value of this format"),
    ("objects/rate/value", DEEP, "rate is nested too deep"),
    ("written_by", None, "written_by: expected a string, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), WRONG)
def test_what_cannot_be_so_is_refused(saved: Path, tmp_path: Path, path: str, value: object, said: str) -> None:
    body = body_of(saved)
    read(tmp_path, body)  # it is good as it was
    put(body, path, value)
    with pytest.raises(CorruptCheckpointError) as refused:
        read(tmp_path, body)
    assert said in refused.value.message
    assert refused.value.where == str(tmp_path / MANIFEST)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("schema", True, 'schema 1 or 2 or 3, got "toolkit-checkpoint" with schema true'),
        (
            "schema",
            "1",
            'expected format "toolkit-checkpoint" with schema 1 or 2 or 3, got "toolkit-checkpoint" with schema "1"',
        ),
        ("schema", 1.0, 'got "toolkit-checkpoint" with schema 1.0'),
        ("schema", [1], 'got "toolkit-checkpoint" with schema [1]'),
        ("schema", 4, 'got "toolkit-checkpoint" with schema 4'),
        ("format", 5, "got 5 with schema 1"),
    ],
)
def test_another_schema_is_refused_and_not_damaged(
    saved: Path, tmp_path: Path, key: str, value: object, said: str
) -> None:
    with pytest.raises(ToolkitError) as refused:
        read(tmp_path, {**body_of(saved), key: value})
    assert said in refused.value.message and not isinstance(refused.value, CorruptCheckpointError)


def test_pieces_that_are_no_slices_may_lie_in_any_order(saved: Path, tmp_path: Path) -> None:
    body = body_of(saved)
    boxes = [([2, 0], [2, 6]), ([0, 3], [2, 3]), ([0, 0], [2, 3]), ([4, 0], [0, 6])]
    put(body, "tensors/weight/pieces", [[1, offset, shape, 0] for offset, shape in boxes])
    assert len(read(tmp_path, body).tensors["weight"].pieces) == 4


def test_a_manifest_as_deep_as_python_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"digest": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CorruptCheckpointError, match="is not a valid manifest"):
        read_manifest(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_anywhere_is_read_or_refused(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    body = copy.deepcopy(body_of(saved))
    place = data.draw(st.sampled_from([place for place in places(body) if place]))
    parent: Any = body
    for part in place[:-1]:
        parent = parent[part]
    parent[place[-1]] = data.draw(ANYTHING)
    try:
        manifest = read(tmp_path, body)
    except ToolkitError:
        return
    assert all(file.name.startswith("shard-") for file in manifest.files)
    for record in manifest.tensors.values():
        for piece in record.pieces:
            assert piece.byte_offset + piece.size <= manifest.file(piece.file).size
