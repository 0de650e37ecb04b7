"""What GPUs can do at most, by the names that their drivers give: dense matrix products, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Peak:
    """TFLOP/s of one device. `half` is for bf16 and fp16, `single` for fp32 without TF32."""

    words: tuple[str, ...]
    half: float
    single: float
    source: str
    has_bf16: bool = True


# The first row whose terms all occur in the device's name; more specific rows come first. NVIDIA states most tensor
# figures with sparsity, which is twice these; its fp32 is that of CUDA cores, AMD's that of matrix cores, which multiply
# fp32 as it is. A device of MI250X is one of its two dies. The size of the memory tells the models that the sheets are of
# from those made for one site, whose chips have more or fewer cores.
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
    """FLOP/s at most of a device in one type; None where it is not known, and never a guess."""
    parts = device_name.upper().replace("-", " ").split()
    # "SXM2", "SXM4": the form factor's number tells nothing that the model's does not.
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
