"""Every kind of state under plain dcp.save and dcp.load: stored equal and of the same type, or refused by type name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kinds_of_state import KINDS, blank, outcome

from toolkit.checkpoint import HDF5StorageReader, HDF5StorageWriter
from toolkit.errors import ToolkitError

pytestmark = pytest.mark.filterwarnings("ignore")

# The kinds that toolkit refuses, with a part of the message. It stores all others.
REFUSED = {
    "tensor float4": "element type float4_e2m1fn_x2",
    "tensor quint8": "element type quint8",
    "tensor qint8 by channel": "element type qint8",
    "tensor qint32": "element type qint32",
    "tensor of 33 dimensions": "33 dimensions",
    "tensor on meta": "device meta",
    "tensor sparse": "torch.sparse_coo",
    "tensor sparse csr": "torch.sparse_csr",
    "tuple of a default dict": "collections.defaultdict",
    "tuple of a sparse tensor": "torch.sparse_coo",
    "tuple named": "kinds_of_state.Pair",
    "memoryview": "builtins.memoryview",
    "ellipsis": "builtins.ellipsis",
    "NotImplemented": "builtins.NotImplementedType",
    "numpy records": "numpy.ndarray",
    "numpy objects": "numpy.ndarray",
    "numpy masked": "numpy.ma.MaskedArray",
    "numpy RandomState": "numpy.random.mtrand.RandomState",
    "numpy Generator": "numpy.random._generator.Generator",
    "python Random": "random.Random",
    "torch Generator": "torch._C.Generator",
    "torch finfo": "torch.finfo",
    "datetime of a zone": "ZoneInfo",
    "PureWindowsPath": "pathlib.PureWindowsPath",
    "Enum": "kinds_of_state.Colour",
    "IntEnum": "kinds_of_state.Level",
    "Enum of the library": "http.HTTPStatus",
    "dataclass": "kinds_of_state.Settings",
    "instance": "kinds_of_state.Instance",
    "class": "builtins.type",
    "function": "builtins.function",
    "lambda": "builtins.function",
    "builtin function": "builtins.builtin_function_or_method",
    "partial": "functools.partial",
    "module": "builtins.module",
    "generator": "builtins.generator",
    "file": "_io.BytesIO",
    "exception": "builtins.ValueError",
    "pattern": "re.Pattern",
    "namespace": "types.SimpleNamespace",
    "object inside": "kinds_of_state.Instance",
}
# Those that DCP itself refuses, with any storage.
BY_DCP = {"tensor bits8", "tensor int4", "tensor nested", "tensor jagged", "dict of keys 1 and '1'", "mapping proxy"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_stored_as_it_is_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    state, targets = state_of(kind)
    ours, error = outcome(state, targets[0], HDF5StorageWriter(tmp_path / "ours"), HDF5StorageReader(tmp_path / "ours"))
    torchs, _ = outcome(
        state, targets[1], dcp.FileSystemWriter(tmp_path / "dcp"), dcp.FileSystemReader(tmp_path / "dcp")
    )
    assert ours == ("refused" if kind in REFUSED.keys() | BY_DCP else "stored"), error
    if kind in BY_DCP:  # before any storage sees the state
        assert torchs == "refused"
    elif kind in REFUSED:
        assert isinstance(error, ToolkitError) and REFUSED[kind] in error.message
        assert error.where.startswith("x") and error.fix


def test_the_place_of_a_refused_value_is_its_path(tmp_path: Path) -> None:
    state, (target, _) = state_of("object inside")
    _, error = outcome(state, target, HDF5StorageWriter(tmp_path / "x"), HDF5StorageReader(tmp_path / "x"))
    assert isinstance(error, ToolkitError) and error.where == "x.a.0.b[1]['c']"


def state_of(kind: str) -> tuple[dict[str, Any], tuple[dict[str, Any], dict[str, Any]]]:
    value = KINDS[kind]()
    first, second = ({"x": blank(value), "w": torch.zeros(1)} for _ in range(2))
    return {"x": value, "w": torch.ones(1)}, (first, second)
