"""What reductions do to types, beyond what a few ranks can show."""

import pytest
import torch

from toolkit.comm.reductions import check_reducible, fold, from_working, overflows, to_working
from toolkit.errors import ToolkitError


def reduced(values, dtype, op):
    """As over len(values) ranks, one element each."""
    total, *others = (to_working(torch.tensor([value], dtype=dtype), op, len(values)) for value in values)
    total = total.clone()
    for other in others:
        fold(total, other, "sum" if op == "avg" else op)
    return overflows(total, dtype, op), from_working(total, dtype, op).tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_a_zero_makes_zero_of_any_number_of_large_factors(dtype):
    """The product passes the largest float64 before the zero comes."""
    factors = [-torch.iinfo(dtype).max] * 200
    assert reduced([*factors, 0], dtype, "product") == (False, [0])
    assert reduced(factors, dtype, "product")[0]


def test_the_largest_and_smallest_values_still_fit():
    assert reduced([100, 27], torch.int8, "sum") == (False, [127]) and reduced([100, 28], torch.int8, "sum")[0]
    assert reduced([-100, -28], torch.int8, "sum") == (False, [-128]) and reduced([-100, -29], torch.int8, "sum")[0]
    assert reduced([250, 5], torch.uint8, "sum") == (False, [255]) and reduced([250, 6], torch.uint8, "sum")[0]
    assert (
        reduced([-128, 1], torch.int8, "product") == (False, [-128]) and reduced([-128, -1], torch.int8, "product")[0]
    )
    assert reduced([100, 100, -100], torch.int8, "sum") == (False, [100]), "only the result has to fit"


def test_the_average_of_large_half_precision_does_not_overflow():
    assert reduced([57344.0] * 8, torch.float16, "avg") == (False, [57344.0])


@pytest.mark.parametrize("dtype", [torch.complex32, torch.uint32, torch.uint64, torch.float8_e5m2])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_types_that_nobody_adds_up_are_refused(dtype, op):
    with pytest.raises(ToolkitError, match=f"does not support {dtype} over nccl"):
        check_reducible(dtype, op, "nccl")
