"""Every kind of entry that users put into a state dict, and whether a storage restores it equal and of the same type."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import http
import io
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from toolkit.checkpoint.format.elements import ELEMENTS


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Instance:
    def __init__(self) -> None:
        self.value = 1

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


class OwnTensor(torch.Tensor):
    pass


class OwnDict(dict):
    pass


Pair = collections.namedtuple("Pair", "first second")


def named_function(value: int) -> int:
    return value


class Counting:
    """Stateful, as DCP calls what has state_dict and load_state_dict."""

    def __init__(self) -> None:
        self.state = {"count": 0, "pair": (1, torch.zeros(2))}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def typed(dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.tensor([True, False, True])
    return torch.arange(4 * ELEMENTS[dtype].size_bytes, dtype=torch.uint8).view(kind)


def trained() -> dict[str, Any]:
    """The state of an optimizer, whose dict `state` has integer keys."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


_X = torch.arange(6.0).reshape(2, 3)

# What a state dict contains under the key "x".
KINDS: dict[str, Callable[[], Any]] = {
    **{f"tensor {dtype}": functools.partial(typed, dtype) for dtype in ELEMENTS},
    "tensor float4": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "tensor quint8": lambda: torch.quantize_per_tensor(_X, 0.1, 0, torch.quint8),
    "tensor qint8 by channel": lambda: torch.quantize_per_channel(_X, torch.ones(2), torch.zeros(2), 0, torch.qint8),
    "tensor qint32": lambda: torch.quantize_per_tensor(_X, 0.1, 0, torch.qint32),
    "tensor bits8": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "tensor int4": lambda: torch.empty(2, dtype=torch.int4),
    "tensor without dimensions": lambda: torch.tensor(3.0),
    "tensor without elements": lambda: torch.zeros(0),
    "tensor of 0 rows": lambda: torch.zeros(0, 3),
    "tensor of 32 dimensions": lambda: torch.ones([1] * 32),
    "tensor of 33 dimensions": lambda: torch.ones([1] * 33),
    "tensor transposed": lambda: _X.T,
    "tensor expanded": lambda: torch.ones(1).expand(3),
    "tensor sliced": lambda: torch.arange(20.0)[3:17:2],
    "tensor conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "tensor negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "tensor channels last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "tensor with gradient": lambda: torch.ones(2, requires_grad=True),
    "tensor not a leaf": lambda: torch.ones(2, requires_grad=True) * 2,
    "tensor NaN and inf": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "tensor in shared memory": lambda: torch.ones(2).share_memory_(),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "tensor on meta": lambda: torch.empty(2, device="meta"),
    "tensor sparse": lambda: torch.eye(3).to_sparse(),
    "tensor sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "tensor nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "tensor jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "tensor subclass": lambda: torch.ones(2).as_subclass(OwnTensor),
    "None": lambda: None,
    "bool": lambda: True,
    "int": lambda: -3,
    "int of 200 bits": lambda: 2**200,
    "float": lambda: 0.1,
    "float nan": lambda: float("nan"),
    "float -inf": lambda: float("-inf"),
    "float -0.0": lambda: -0.0,
    "float subnormal": lambda: 5e-324,
    "complex": lambda: 1 - 2j,
    "complex nan": lambda: complex("nan+infj"),
    "str": lambda: "$tuple ä\0\n\U0001f600",
    "str lone surrogate": lambda: "\ud800",
    "str empty": lambda: "",
    "bytes": lambda: bytes(range(256)),
    "bytes empty": lambda: b"",
    "bytearray": lambda: bytearray(b"abc"),
    "memoryview": lambda: memoryview(b"abc"),
    "ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "dict nested": lambda: {"a": {"b": {"c": 1, "d": torch.ones(1)}}},
    "dict integer keys": lambda: {1: torch.ones(1), 2: "two"},
    "dict of bool keys": lambda: {True: 1, False: 0},
    "dict of float keys": lambda: {0.5: 1},
    "dict of tuple keys": lambda: {(0, "a"): 1},
    "dict of None key": lambda: {None: 1},
    "dict of keys 1 and '1'": lambda: {1: 1, "1": 2},
    "dict of keys with dots": lambda: {"a.b": 1, "a/b": torch.ones(1), "": 2, "$x": 3},
    "dict empty": dict,
    "dict ordered": lambda: collections.OrderedDict(b=1, a=torch.ones(1)),
    "dict with default": lambda: collections.defaultdict(int, a=1),
    "dict counter": lambda: collections.Counter("aab"),
    "dict of a subclass": lambda: OwnDict(a=1),
    "list of numbers": lambda: [1, 2.5, "x", None],
    "list empty": list,
    "list of tensors": lambda: [torch.ones(1), torch.zeros(2)],
    "list mixed": lambda: [torch.ones(1), 2, {"a": 3}],
    "list of lists of tensors": lambda: [[torch.ones(1)], [torch.zeros(2), 1]],
    "list of tuples": lambda: [(1, 2), (3, torch.ones(1))],
    "tuple": lambda: (1, (2, "x"), None),
    "tuple empty": tuple,
    "tuple of tensors": lambda: (torch.ones(1), torch.arange(3)),
    "tuple of bfloat16": lambda: (torch.ones(1, dtype=torch.bfloat16), torch.zeros(0, 2)),
    "tuple of a parameter": lambda: (nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)),
    "tuple of dicts": lambda: ({1: torch.ones(1), (2, 3): {"a": b"x"}},),
    "tuple of an ordered dict": lambda: (collections.OrderedDict([(1, 2), ("a", torch.ones(1))]),),
    "tuple of a default dict": lambda: (collections.defaultdict(int, a=1),),
    "tuple of a sparse tensor": lambda: (torch.eye(2).to_sparse(),),
    "tuple named": lambda: Pair(1, 2),
    "set": lambda: {1, "a", (2, 3)},
    "set empty": set,
    "set of tensors": lambda: {torch.ones(1), torch.ones(1)},
    "frozenset": lambda: frozenset({1, 2}),
    "deque": lambda: collections.deque([1, (2,)]),
    "deque of 3": lambda: collections.deque([1.0, float("nan")], maxlen=3),
    "deque of tensors": lambda: collections.deque([torch.ones(1), torch.zeros(2)]),
    "range": lambda: range(2, 10, 3),
    "slice": lambda: slice(None, 3),
    "mapping proxy": lambda: types.MappingProxyType({"a": 1}),
    "numpy float32": lambda: np.arange(6, dtype="f4").reshape(2, 3),
    "numpy int64": lambda: np.arange(3),
    "numpy bool": lambda: np.array([True, False]),
    "numpy complex": lambda: np.array([1 + 2j]),
    "numpy without dimensions": lambda: np.array(1.5),
    "numpy empty": lambda: np.zeros((0, 2)),
    "numpy Fortran order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "numpy big-endian": lambda: np.arange(3, dtype=">i4"),
    "numpy strings": lambda: np.array(["a", "bcd"]),
    "numpy bytes": lambda: np.array([b"a", b"bcd"]),
    "numpy times": lambda: np.array(["2026-01-02"], "datetime64[D]"),
    "numpy records": lambda: np.zeros(2, "i4,f8"),
    "numpy objects": lambda: np.array([{}, None]),
    "numpy masked": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "numpy scalar float32": lambda: np.float32(1.5),
    "numpy scalar float64": lambda: np.float64(1.5),
    "numpy scalar int64": lambda: np.int64(3),
    "numpy scalar bool": lambda: np.bool_(True),
    "numpy scalar str": lambda: np.str_("a"),
    "numpy scalar time": lambda: np.datetime64("2026-01-02T03"),
    "numpy scalar long double": lambda: np.longdouble(1) / 3,
    "numpy type": lambda: np.dtype("f4"),
    "numpy random state": lambda: np.random.RandomState(1).get_state(),
    "numpy generator state": lambda: np.random.default_rng(1).bit_generator.state,
    "numpy RandomState": lambda: np.random.RandomState(1),
    "numpy Generator": lambda: np.random.default_rng(1),
    "python random state": lambda: random.Random(1).getstate(),
    "python Random": lambda: random.Random(1),
    "torch random state": lambda: torch.Generator().manual_seed(1).get_state(),
    "torch Generator": lambda: torch.Generator().manual_seed(1),
    "torch dtype": lambda: torch.bfloat16,
    "torch Size": lambda: torch.Size([2, 3]),
    "torch device": lambda: torch.device("cuda", 1),
    "torch layout": lambda: torch.strided,
    "torch memory format": lambda: torch.channels_last,
    "torch finfo": lambda: torch.finfo(torch.float32),
    "datetime": lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "datetime UTC": lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "datetime of a zone": lambda: datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "date": lambda: datetime.date(2026, 1, 2),
    "time": lambda: datetime.time(1, 2, 3),
    "timedelta": lambda: datetime.timedelta(-1, 5, 7),
    "Decimal": lambda: decimal.Decimal("1.10"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "UUID": lambda: uuid.UUID(int=5),
    "Path": lambda: pathlib.Path("/a/b c"),
    "PurePath": lambda: pathlib.PurePosixPath("a"),
    "PureWindowsPath": lambda: pathlib.PureWindowsPath("a"),
    "Enum": lambda: Colour.RED,
    "IntEnum": lambda: Level.LOW,
    "Enum of the library": lambda: http.HTTPStatus.OK,
    "dataclass": Settings,
    "instance": Instance,
    "class": lambda: Instance,
    "function": lambda: named_function,
    "lambda": lambda: lambda: 1,
    "builtin function": lambda: len,
    "partial": lambda: functools.partial(named_function, 1),
    "module": lambda: math_module(),
    "generator": lambda: (number for number in [1]),
    "file": lambda: io.BytesIO(b"abc"),
    "exception": lambda: ValueError("x"),
    "pattern": lambda: re.compile("a+"),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "object inside": lambda: {"a": [{"b": (1, {"c": Instance()})}]},
    "nn.Module's state": lambda: nn.Linear(3, 2).state_dict(),
    "optimizer's state": trained,
    "schedule's state": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.ones(1, requires_grad=True)]), 3
    ).state_dict(),
    "stateful": Counting,
}


def math_module() -> types.ModuleType:
    import math

    return math


def blank(value: Any) -> Any:
    """A target to load into: the same structure with other contents."""
    if isinstance(value, Counting):
        return Counting()
    if isinstance(value, torch.Tensor):
        try:
            with torch.no_grad():
                return torch.zeros_like(value).fill_(0).detach()
        except (RuntimeError, NotImplementedError):  # of a type without arithmetic
            return torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype)
    if isinstance(value, Mapping):
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType({key: blank(item) for key, item in value.items()})
        target = copy.copy(value)
        for key, item in value.items():
            target[key] = blank(item)
        return target
    if isinstance(value, list) and has_tensors(value):
        return [blank(item) for item in value]
    return None


def has_tensors(items: list[Any]) -> bool:
    """Whether DCP stores the items of a list one by one."""
    return any(
        isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and has_tensors(item)) for item in items
    )


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have equal types and contents, bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.is_quantized) != (other.dtype, other.shape, other.is_quantized):
            return False
        if one.layout != torch.strided or one.is_quantized or one.is_nested:
            return one.layout == other.layout and repr(one) == repr(other)
        return plain_bits(one) == plain_bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Counting):
        return is_same(one.state, other.state)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            is_same(key, other_key) and is_same(item, other_item)
            for (key, item), (other_key, other_item) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, (set, frozenset)):
        return len(one) == len(other) and all(any(is_same(item, found) for found in other) for item in one)
    if isinstance(one, (list, tuple, collections.deque)):
        same_length = getattr(one, "maxlen", None) == getattr(other, "maxlen", None) and len(one) == len(other)
        return same_length and all(map(is_same, one, other))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, (random.Random, np.random.RandomState, np.random.Generator)):
        return one.random() == other.random()
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return bool(one == other) or repr(one) == repr(other)


def plain_bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(state: dict[str, Any], target: dict[str, Any], writer: Any, reader: Any) -> tuple[str, Exception | None]:
    """Return "stored", "changed" or "refused" with the error of this rank."""
    try:
        dcp.save(state, storage_writer=writer)
        dcp.load(target, storage_reader=reader)
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001 - the latter is a BaseException
        failures = getattr(error, "failures", {})
        return "refused", next((failure for failure, _ in failures.values()), error)
    return ("stored" if is_same(state, target) else "changed"), None
