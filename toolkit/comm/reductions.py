"""The type rules of reductions: supported ops, accumulation types and overflow checks.

8- and 16-bit integers are summed in 32 bits and multiplied as float64, which is exact if the result fits. An overflow
is an error, never a wrapped number. 32- and 64-bit integers wrap, as in torch.
"""

import torch
import torch.distributed as dist

from toolkit.errors import ToolkitError

__all__ = ["backend_all_reduce"]

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
    """Reject an op that the type or the backend does not support.

    Raises:
        ToolkitError: `op` is unknown, or not supported for `dtype`.
    """
    if op not in OPS:
        raise ToolkitError(f"unknown op {op!r}", fix=f"use one of {', '.join(OPS)}")
    if dtype in _FLOATS:
        return
    fix = ""
    if dtype in (*_SMALL_INTEGERS, *_INTEGERS):
        fix = "use op 'sum' and divide, or convert the tensor to a float type first" if op == "avg" else ""
    elif dtype is torch.bool:
        fix = "" if op in ("min", "max") else "use 'min' for and, 'max' for or; to count, convert to torch.int64 first"
    elif dtype.is_complex and dtype is not torch.complex32:
        fix = "" if op in ("sum", "avg") else "reduce torch.view_as_real(tensor), or its absolute value"
    else:
        fix = "convert the tensor to torch.float32 or torch.int64 first"
    if fix:
        raise ToolkitError(f"op {op!r} does not support {dtype} over {backend}", fix=fix)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, contiguous, and with conjugation and negation resolved; copied only if necessary."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_working(tensor: torch.Tensor, op: str, size: int) -> torch.Tensor:
    """Return the input of the reduction: contiguous, shape (elements,), in a type that algorithms and backends support.

    It shares the tensor's memory if possible. For an average, the input is divided by `size` first, as in DDP, so that
    half precision does not overflow; the remaining op is a sum.
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
    """Return the result in the caller's type, shape (elements,); call `overflows` first."""
    if dtype.is_complex:
        return torch.view_as_complex(result.view(-1, 2))
    if dtype is torch.bool:
        return result.view(torch.bool)
    if dtype in _SMALL_INTEGERS and op == "product":
        # Infinity times zero gives NaN, but a product of integers with a factor of zero is zero.
        return result.nan_to_num(nan=0.0).to(dtype)
    return result.to(dtype)


def overflows(result: torch.Tensor, dtype: torch.dtype, op: str) -> bool:
    """Return whether the result overflows a small integer type. Only for these types, it synchronizes with the GPU."""
    if not may_overflow(dtype, op) or result.numel() == 0:
        return False
    limits = torch.iinfo(dtype)
    return bool(((result < limits.min) | (result > limits.max)).any())


def may_overflow(dtype: torch.dtype, op: str) -> bool:
    """Return whether the type and op require an overflow check."""
    return dtype in _SMALL_INTEGERS and op in ("sum", "product")


def overflow_error(dtype: torch.dtype, op: str, size: int) -> ToolkitError:
    """Return the error for an overflow, which is identical on every rank."""
    limits = torch.iinfo(dtype)
    return ToolkitError(
        f"the {op} over {size} ranks does not fit in {dtype} ({limits.min} to {limits.max})",
        fix="convert the tensor to torch.int32 or torch.int64 first",
    )


def fold(into: torch.Tensor, other: torch.Tensor, op: str) -> None:
    """Reduce `other` into `into`, element by element. "min" and "max" propagate NaN."""
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
    """All-reduce a working tensor in place with the backend.

    With "min" and "max", gloo keeps or drops a NaN depending on rank order, so a reduced mask sets it on all ranks.
    """
    mask = torch.isnan(flat).to(torch.uint8) if op in ("min", "max") and flat.is_floating_point() else None
    dist.all_reduce(flat, op=BACKEND_OPS[op], group=group)
    if mask is not None:
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group)
        flat.masked_fill_(mask.bool(), float("nan"))
