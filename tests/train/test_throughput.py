"""FLOPs as they follow from the shapes of a model, whatever recomputes; and peaks that are known or are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toolkit.errors import ToolkitError
from toolkit.jobs.train_lm import GPT, Arguments, loss_of
from toolkit.train.memory.compiling import compile_blocks
from toolkit.train.memory.on_meta import on_meta
from toolkit.train.memory.recompute import is_recomputed, recompute_block
from toolkit.train.throughput import count_flops, no_peak, peak_flops, throughput

BATCH, CONTEXT, WIDTH, LAYERS = 3, 16, 32, 2
TEXT = torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT)


def gpt() -> GPT:
    return GPT(Arguments(layers=LAYERS, width=WIDTH, heads=2, context=CONTEXT))


def test_a_gpt_counts_as_the_formula_says():
    """2 FLOPs a weight of a matrix and token, and 4 x context x width for attention's two products."""
    weights = LAYERS * 12 * WIDTH**2 + WIDTH * 256
    forward = BATCH * CONTEXT * (2 * weights + LAYERS * 4 * CONTEXT * WIDTH)
    found = count_flops(gpt(), (TEXT, TEXT), loss_of)
    assert (found.forward, found.backward, found.total) == (forward, 2 * forward, 3 * forward)


def test_recomputed_and_compiled_blocks_count_once():
    model = gpt()
    expected = count_flops(model, (TEXT, TEXT), loss_of)
    for number, block in enumerate(model.blocks):
        recompute_block(block, selective=number == 1)
    compile_blocks(model, backend="eager")
    assert count_flops(model, (TEXT, TEXT), loss_of) == expected
    assert all(is_recomputed(block) for block in model.blocks), "the model itself stays as it is"


def test_a_convolution_counts_its_kernel_at_each_place():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    images, labels = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    found = count_flops(model, (images, labels), nn.functional.cross_entropy)
    convolution, linear = 2 * 2 * 36 * 8 * 27, 2 * 2 * 288 * 5
    assert found.forward == convolution + linear
    assert found.backward == convolution + 2 * linear  # images need no gradient


def test_no_memory_is_taken_and_ties_stay():
    shapes = on_meta(gpt())
    assert {parameter.device.type for parameter in shapes.parameters()} == {"meta"}
    assert shapes.head.weight is shapes.token_embedding.weight


def test_a_model_that_looks_at_values_is_refused_by_name():
    class Looking(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values if values.sum() > 0 else -values

    with pytest.raises(ToolkitError, match="count_flops: Looking cannot run on the meta device"):
        count_flops(Looking(), (torch.ones(2), torch.ones(2)), nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.5),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 990),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.float16, 125),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float32, 14),
        ("Tesla T4", torch.float16, 65),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("AMD Instinct MI250X", torch.float32, 47.9),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA A100-SXM-64GB", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 9999", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
        ("", torch.float32, None),
    ],
)
def test_a_peak_is_that_of_exactly_this_gpu_or_not_known(name, dtype, tera):
    assert peak_flops(name, dtype) == (None if tera is None else pytest.approx(tera * 1e12))


def test_throughput_is_per_rank_against_its_own_peak():
    given = {"flops_per_step": 8e15, "tokens_per_step": 4000, "seconds": 2.0, "ranks": 8, "dtype": torch.bfloat16}
    found = throughput(device_name="NVIDIA A100-SXM4-80GB", **given)
    assert (found.tokens_per_s, found.flops_per_s) == (2000.0, 5e14)
    assert found.utilization == pytest.approx(500 / 312)
    assert throughput(device_name="something new", **given).utilization is None


def test_an_unknown_peak_is_said_and_a_cpu_has_none_to_know():
    said = no_peak("NVIDIA GeForce RTX 9999", torch.bfloat16)
    assert said == "the log has no mfu: the peak bfloat16 FLOP/s of NVIDIA GeForce RTX 9999 is unknown"
    assert no_peak("NVIDIA H200", torch.bfloat16) == no_peak("", torch.float32) == ""
