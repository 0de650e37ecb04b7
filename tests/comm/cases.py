"""What ranks of the pool do in one case: every rank can make the tensors of all, so that each knows the answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from rank_pool import RankState

from toolkit.errors import ToolkitError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    """One tensor for each rank: the same type, shape and strides, other values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    view: str = "whole"  # or "transposed", "strided", "conjugated"
    seed: int = 0
    values: str = "plain"  # or "large", which overflows small integers, or "special", with NaN and infinity

    def tensor(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank)
        shape = (2 * self.shape[0], *self.shape[1:]) if self.view == "strided" and self.shape else self.shape
        values = self._values(shape, generator)
        if self.view == "transposed" and values.dim() > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if self.view == "conjugated" and values.is_complex():
            return values.conj()
        return values[::2] if self.view == "strided" and values.dim() else values

    def _values(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if self.dtype.is_complex:
            return torch.randn(shape, dtype=self.dtype, generator=generator)
        if not self.dtype.is_floating_point:
            limits = torch.iinfo(self.dtype)
            far = limits.max * 3 // 4 if self.values == "large" else 3
            low = max(-far, limits.min)
            return torch.randint(low, far + 1, shape, generator=generator).to(self.dtype)
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.5 + 0.5
        values *= (torch.rand(shape, generator=generator) < 0.5).double() * 2 - 1
        if self.values == "special":
            drawn = torch.rand(shape, generator=generator)
            values[drawn < 0.1] = float("nan")
            values[(drawn > 0.1) & (drawn < 0.2)] = float("inf")
            values[(drawn > 0.2) & (drawn < 0.3)] = -float("inf")
        return values.to(self.dtype)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(bits(tensor) for tensor in tensors)).hexdigest()


def overflow_of(case: Case, op: str, size: int) -> bool:
    """Whether exact whole numbers say that the result does not fit."""
    if case.dtype not in (torch.int8, torch.uint8, torch.int16, torch.uint16) or op not in ("sum", "product"):
        return False
    exact = exact_result([case.tensor(rank) for rank in range(size)], op)
    limits = torch.iinfo(case.dtype)
    return any(not limits.min <= value <= limits.max for value in exact)


def exact_result(tensors: list[torch.Tensor], op: str) -> list[int]:
    """Element by element, in Python's whole numbers."""
    columns = zip(*(tensor.reshape(-1).tolist() for tensor in tensors), strict=True)
    results = []
    for column in columns:
        total = 1 if op == "product" else 0
        for value in column:
            total = total * value if op == "product" else total + value
        results.append(total)
    return results


def check_reduced(result: torch.Tensor, tensors: list[torch.Tensor], op: str) -> None:
    """Equal to the reference: exact for whole numbers, min and max; within the bound of summation order for floats."""
    size, dtype = len(tensors), result.dtype
    if dtype.is_complex:
        check_reduced(
            torch.view_as_real(result.resolve_conj()), [torch.view_as_real(t.resolve_conj()) for t in tensors], op
        )
    elif op in ("min", "max"):
        wide = torch.stack([t.to(torch.float64) if dtype.is_floating_point else t.to(torch.int64) for t in tensors])
        expected = (wide.amin(0) if op == "min" else wide.amax(0)).to(dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    elif not dtype.is_floating_point:
        expected = torch.tensor(exact_result(tensors, op), dtype=torch.int64).view(result.shape)
        assert torch.equal(result.to(torch.int64), expected)
    else:
        wide = torch.stack([tensor.double() for tensor in tensors])
        exact = wide.prod(0) if op == "product" else wide.sum(0)
        magnitude = exact.abs() if op == "product" else wide.abs().sum(0)
        share = size if op == "avg" else 1
        finite = exact.isfinite()
        known = torch.finfo(dtype)
        bound = 2 * size * known.eps * magnitude / share + size * known.smallest_normal * known.eps
        away = (result.double() - exact / share).abs()
        assert (away[finite] <= bound[finite]).all(), (away[finite] - bound[finite]).max()
        torch.testing.assert_close(result.double()[~finite], exact[~finite], rtol=0, atol=0, equal_nan=True)


def all_reduce(state: RankState, case: Case, op: str, algorithm: str, later: bool) -> str:
    """One all-reduce against the reference; the answer is a digest of the bits."""
    size = state.world.size
    tensor = case.tensor(state.world.rank)
    before = tensor.clone()
    try:
        if later:
            handle = state.communicator.start.all_reduce(tensor, op, algorithm)
            assert handle.wait(30) is tensor and handle.done()
        else:
            assert state.communicator.all_reduce(tensor, op, algorithm) is tensor
    except ToolkitError as error:
        assert overflow_of(case, op, size), error
        assert "does not fit" in error.message and bits(tensor) == bits(before)
        return "overflow"
    assert not overflow_of(case, op, size)
    check_reduced(tensor, [case.tensor(rank) for rank in range(size)], op)
    return digest(tensor)


def reduce_parts(state: RankState, case: Case, op: str, lengths: list[int] | None, root: int) -> str:
    """Reduce-scatter and reduce of the same tensors: parts of one result, and both overflow on all ranks or on none."""
    size, rank, communicator = state.world.size, state.world.rank, state.communicator
    tensor = case.tensor(rank)
    tensors = [case.tensor(other) for other in range(size)]
    outcomes: list[Any] = []
    for call in (
        lambda: communicator.reduce_scatter(tensor, op, lengths),
        lambda: communicator.reduce(tensor, root, op),
    ):
        try:
            outcomes.append(call())
        except ToolkitError as error:
            assert overflow_of(case, op, size), error
            outcomes.append("overflow")
    assert bits(tensor) == bits(case.tensor(rank)), "the caller's tensor stays as it was"
    if "overflow" in outcomes:
        assert outcomes == ["overflow", "overflow"]
        return "overflow"
    part, whole = outcomes
    assert not overflow_of(case, op, size)
    splits = lengths if lengths is not None else [tensor.shape[0] // size] * size
    check_reduced(part, [other.split(splits)[rank] for other in tensors], op)
    assert (whole is None) == (rank != root)
    if whole is not None:
        check_reduced(whole, tensors, op)
    return "reduced"


def move(state: RankState, case: Case, root: int, lengths: list[list[int]]) -> None:
    """Every operation that moves data: bits arrive where they belong. `lengths[i][j]` rows go from rank i to rank j."""
    size, rank, communicator = state.world.size, state.world.rank, state.communicator
    tensors = [case.tensor(other) for other in range(size)]
    own = tensors[rank]
    gathered = communicator.all_gather(own)
    assert bits(gathered) == b"".join(map(bits, tensors)) and gathered.dtype == own.dtype
    assert gathered.shape == (size * (own.shape[0] if own.dim() else 1), *own.shape[1:])

    copy = own.clone(memory_format=torch.preserve_format)
    assert communicator.broadcast(copy, root) is copy and bits(copy) == bits(tensors[root])
    several = [case.tensor(rank) for _ in range(size + 1)]
    roots = [(root + index) % size for index in range(size + 1)]
    communicator.broadcast_many(several, roots)
    assert [bits(one) for one in several] == [bits(tensors[source]) for source in roots]

    to_all = tensors if rank == root else None
    assert bits(communicator.scatter(to_all, own, root)) == bits(own)
    for answer, where in ((communicator.gather(own, root), root), (communicator.all_gather_unequal(own), rank)):
        assert (answer is None) == (rank != where)
        assert answer is None or list(map(bits, answer)) == list(map(bits, tensors))
    move_unequal(state, case, root, lengths)


def move_unequal(state: RankState, case: Case, root: int, lengths: list[list[int]]) -> None:
    size, rank, communicator = state.world.size, state.world.rank, state.communicator

    def rows(source: int) -> torch.Tensor:
        inner = case.shape[1:] if case.shape else ()
        return Case(case.dtype, (sum(lengths[source]), *inner), case.view, case.seed).tensor(source)

    received = communicator.all_to_all_unequal(rows(rank), lengths[rank])
    expected = [rows(source).split(lengths[source])[rank] for source in range(size)]
    assert [bits(part) for part in received] == [bits(part) for part in expected]
    assert [part.shape for part in received] == [part.shape for part in expected]
    for answer in (communicator.all_gather_unequal(rows(rank)), communicator.gather(rows(rank), root)):
        if answer is not None:
            assert [bits(part) for part in answer] == [bits(rows(source)) for source in range(size)]
    equal = Case(case.dtype, (size * 3, 2), case.view, case.seed)
    joined = communicator.all_to_all(equal.tensor(rank))
    parts = [equal.tensor(source)[3 * rank : 3 * rank + 3] for source in range(size)]
    assert bits(joined) == b"".join(map(bits, parts))


def pass_round(state: RankState, case: Case) -> None:
    """Send to the right, receive from the left: once with handles, once in turns, both before a collective."""
    size, rank, communicator = state.world.size, state.world.rank, state.communicator
    right, left = (rank + 1) % size, (rank - 1) % size
    room = torch.empty_like(case.tensor(rank))
    sent = communicator.start.send(case.tensor(rank), right)
    assert bits(communicator.receive(room, left)) == bits(case.tensor(left))
    sent.wait(10)
    if rank % 2 == 0 and rank + 1 < size:
        communicator.send(case.tensor(rank), right)
    elif rank % 2 == 1:
        communicator.receive(room, left)
        assert bits(room) == bits(case.tensor(left))
    communicator.barrier()
