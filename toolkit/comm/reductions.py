"""What a reduction does to which type: who adds up, in which type, and what is refused.

8 and 16 bit integers are summed in 32 bits and multiplied as float64, which is exact wherever the result fits; a
result that does not fit is an error, never a wrapped number. 32 and 64 bit integers wrap, as in torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError

OPS = ("sum", "avg", "min", "max", "product")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
_INTEGERS = (torch.int32, torch.int64)
BACKEND_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def check_reducible(dtype: torch.dtype, op: str, backend: str) -> None:
    """Refuse what has no meaning, or what the backend cannot reduce.

    Raises:
        ToolkitError: names the op, the type and the backend, and what to do.
    """
    if op not in OPS:
        raise ToolkitError(f"op {op!r} is not known", fix=f"one of {', '.join(OPS)}")
    if dtype in _FLOATS:
        return
    fix = ""
    if dtype in (*_SMALL_INTEGERS, *_INTEGERS):
        fix = "use op 'sum' and divide, or convert to a float before" if op == "avg" else ""
    elif dtype is torch.bool:
        fix = "" if op in ("min", "max") else "'min' is and, 'max' is or; to count, convert to torch.int64 before"
    elif dtype.is_complex and dtype is not torch.complex32:
        fix = "" if op in ("sum", "avg") else "reduce torch.view_as_real(tensor), or its absolute value"
    else:
        fix = "convert to torch.float32 or torch.int64 before"
    if fix:
        raise ToolkitError(f"op {op!r} of {dtype} cannot be reduced over {backend}", fix=fix)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, without a gradient, and with its values in memory as they are: the tensor itself where it can be."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_working(tensor: torch.Tensor, op: str, size: int) -> torch.Tensor:
    """What goes into the reduction: contiguous, in a type that algorithms and backends add up.

    Shape (elements,), and it shares the tensor's memory where it can. Averages are divided by `size` first, as DDP
    does, so that half precision does not overflow; the op that is left is a sum.
    """
    tensor = plain(tensor).view(-1)
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor).view(-1)
    elif tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype in _SMALL_INTEGERS and op == "product":
        tensor = tensor.to(torch.float64)
    elif tensor.dtype in (torch.int16, torch.uint16) or (tensor.dtype in _SMALL_INTEGERS and op == "sum"):
        tensor = tensor.to(torch.int32)
    return tensor.div(size) if op == "avg" else tensor


def from_working(result: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """The result in the type that the caller handed in, shape (elements,); call `overflows` before."""
    if dtype.is_complex:
        return torch.view_as_complex(result.view(-1, 2))
    if dtype is torch.bool:
        return result.view(torch.bool)
    if dtype in _SMALL_INTEGERS and op == "product":
        # Infinity times zero: only a factor that is zero makes this of whole numbers.
        return result.nan_to_num(nan=0.0).to(dtype)
    return result.to(dtype)


def overflows(result: torch.Tensor, dtype: torch.dtype, op: str) -> bool:
    """Whether a small integer type cannot hold the result. Waits for a GPU, for these types only."""
    if not may_overflow(dtype, op) or result.numel() == 0:
        return False
    limits = torch.iinfo(dtype)
    return bool(((result < limits.min) | (result > limits.max)).any())


def may_overflow(dtype: torch.dtype, op: str) -> bool:
    """Whether the result is checked against the type."""
    return dtype in _SMALL_INTEGERS and op in ("sum", "product")


def overflow_error(dtype: torch.dtype, op: str, size: int) -> ToolkitError:
    """The same on every rank."""
    limits = torch.iinfo(dtype)
    return ToolkitError(
        f"the {op} of {size} ranks does not fit into {dtype} ({limits.min} to {limits.max})",
        fix="convert to torch.int32 or torch.int64 before",
    )


def fold(into: torch.Tensor, other: torch.Tensor, op: str) -> None:
    """Take `other` into `into`, element by element. NaN goes through "min" and "max"."""
    if op == "sum":
        into.add_(other)
    elif op == "min":
        torch.minimum(into, other, out=into)
    elif op == "max":
        torch.maximum(into, other, out=into)
    else:
        assert op == "product", op
        into.mul_(other)


def fold_rows(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce shape (ranks, elements) to (elements,)."""
    if op == "sum":
        return parts.sum(dim=0, dtype=parts.dtype)
    if op == "product":
        return parts.prod(dim=0, dtype=parts.dtype)
    return parts.amin(dim=0) if op == "min" else parts.amax(dim=0)


def backend_all_reduce(flat: torch.Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    """The backend's own all-reduce of a working tensor, in place.

    gloo's "min" and "max" keep or drop a NaN by the order of ranks: a mask brings it to all of them.
    """
    mask = torch.isnan(flat).to(torch.uint8) if op in ("min", "max") and flat.is_floating_point() else None
    dist.all_reduce(flat, op=BACKEND_OPS[op], group=group)
    if mask is not None:
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group)
        flat.masked_fill_(mask.bool(), float("nan"))
