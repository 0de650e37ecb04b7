"""Training throughput: the FLOPs of a step, and the fraction of the GPU's peak that they reach (MFU)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from toolkit.train.memory.on_meta import on_meta, on_shapes_alone
from toolkit.train.memory.recompute import forget_recompute


@dataclass(frozen=True)
class _Peak:
    """Peak TFLOP/s of one device. `half` is for bf16 and fp16, `single` for fp32 without TF32."""

    words: tuple[str, ...]
    half: float
    single: float
    source: str
    has_bf16: bool = True


# The first row whose terms all occur in the device name applies, so more specific rows come first. NVIDIA states most
# tensor figures with sparsity, which doubles them. Its fp32 figure is that of CUDA cores; AMD's is that of matrix cores
# without rounding. An MI250X appears as two devices, one per die. The memory size distinguishes the models of the data
# sheets from those made for one site, whose chips have more or fewer cores.
_PEAKS = (
    _Peak(("GB200",), 2500, 80, "NVIDIA Blackwell data sheet, one GPU of GB200 NVL72"),
    _Peak(("B200",), 2250, 75, "NVIDIA Blackwell data sheet, one GPU of HGX B200"),
    _Peak(("GH200",), 990, 67, "NVIDIA GH200 Grace Hopper data sheet"),
    _Peak(("H200", "NVL"), 835.5, 60, "NVIDIA H200 data sheet"),
    _Peak(("H200",), 989.5, 67, "NVIDIA H200 data sheet"),
    _Peak(("H100", "NVL"), 835.5, 60, "NVIDIA H100 data sheet"),
    _Peak(("H100", "PCIE"), 756, 51, "NVIDIA H100 data sheet of 2023, which has SXM and PCIe"),
    _Peak(("H100", "80GB", "HBM3"), 989.5, 67, "NVIDIA H100 data sheet"),
    _Peak(("A100", "40GB"), 312, 19.5, "NVIDIA A100 data sheet"),
    _Peak(("A100", "80GB"), 312, 19.5, "NVIDIA A100 data sheet"),
    _Peak(("A30",), 165, 10.3, "NVIDIA A30 data sheet"),
    _Peak(("A40",), 149.7, 37.4, "NVIDIA A40 data sheet"),
    _Peak(("A10",), 125, 31.2, "NVIDIA A10 data sheet"),
    _Peak(("L40S",), 362, 91.6, "NVIDIA L40S data sheet"),
    _Peak(("L40",), 181, 90.5, "NVIDIA L40 data sheet"),
    _Peak(("L4",), 121, 30.3, "NVIDIA L4 data sheet"),
    _Peak(("V100S",), 130, 16.4, "NVIDIA V100 data sheet", has_bf16=False),
    _Peak(("V100", "SXM"), 125, 15.7, "NVIDIA V100 data sheet", has_bf16=False),
    _Peak(("V100", "PCIE"), 112, 14, "NVIDIA V100 data sheet", has_bf16=False),
    _Peak(("T4",), 65, 8.1, "NVIDIA T4 data sheet", has_bf16=False),
    _Peak(("MI325X",), 1307.4, 163.4, "AMD Instinct MI325X data sheet"),
    _Peak(("MI300X",), 1307.4, 163.4, "AMD Instinct MI300X data sheet"),
    _Peak(("MI250X",), 191.5, 47.9, "AMD Instinct MI250X data sheet, a half"),
    _Peak(("MI210",), 181, 45.3, "AMD Instinct MI210 data sheet"),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for a dtype, or None if the table has no figure."""
    parts = device_name.upper().replace("-", " ").split()
    # SXM2, SXM4 and so on are equal here, because the model implies the version of the form factor.
    words = {"SXM" if part.startswith("SXM") else part for part in parts}
    if "MIG" in words:  # a slice of a GPU
        return None
    peak = next((one for one in _PEAKS if words.issuperset(one.words)), None)
    if peak is None:
        return None
    if dtype == torch.float32:
        return peak.single * 1e12
    known = dtype == torch.float16 or (dtype == torch.bfloat16 and peak.has_bf16)
    return peak.half * 1e12 if known else None


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one micro-batch: matrix products, convolutions and attention; a multiply-add counts as two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Throughput:
    """`flops_per_s` are model FLOPs of one rank; `utilization` (MFU) is None if the device's peak is unknown."""

    tokens_per_s: float
    flops_per_s: float
    utilization: float | None


def count_flops(
    model: nn.Module, micro_batch: tuple[Tensor, Tensor], loss_of: Callable[[Any, Any], Tensor]
) -> StepFlops:
    """Return the model FLOPs of a forward and a backward pass, which torch counts on the meta device without computing.

    Recomputation is not counted, because model FLOPs are the work of the model itself; causal attention is counted
    in full (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). Elementwise operations are not counted. Pass the
    model before it is sharded or wrapped.

    Raises:
        ToolkitError: the model cannot run on the meta device.
    """
    shapes = on_meta(model)
    forget_recompute(shapes)
    counter = FlopCounterMode(display=False)
    inputs, targets = (one.to("meta") for one in micro_batch)
    fix = "create tensors on the device of the input, and do not branch on tensor values"
    with on_shapes_alone(model, "cannot run on the meta device", where="count_flops", fix=fix), counter:
        loss = loss_of(shapes(inputs), targets)
        forward = counter.get_total_flops()
        loss.backward()
    return StepFlops(forward, counter.get_total_flops() - forward)


def throughput(
    *, flops_per_step: float, tokens_per_step: float, seconds: float, ranks: int, device_name: str, dtype: torch.dtype
) -> Throughput:
    """Return the throughput of a step of `seconds`.

    Args:
        flops_per_step, tokens_per_step: totals over all ranks.
        device_name: as from `torch.cuda.get_device_name()`; "" for a CPU, whose peak is unknown.
        dtype: the dtype of the matrix products.
    """
    per_rank = flops_per_step / ranks / seconds
    peak = peak_flops(device_name, dtype)
    return Throughput(tokens_per_step / seconds, per_rank, None if peak is None else per_rank / peak)


def no_peak(device_name: str, dtype: torch.dtype) -> str:
    """Return why records have no MFU on this GPU; "" if they have one, or on a CPU."""
    if not device_name or peak_flops(device_name, dtype) is not None:
        return ""
    of_type = str(dtype).removeprefix("torch.")
    return f"the log has no mfu: the peak {of_type} FLOP/s of {device_name} is unknown"
