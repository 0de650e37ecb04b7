"""Adapters in the files of peft: read them, use one or several on a model, merge them into its weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.convert.base_weights import BaseWeights
from toolkit.checkpoint.convert.export_peft import CONFIG, PREFIX, WEIGHTS
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.train.adapters.layers import AdaptedLinear, Scale, adapted_layers

__all__ = ["Adapter", "merge", "read_adapter", "unmerge", "use_adapters"]

_ENDS = (".lora_A.weight", ".lora_B.weight")
# Settings of peft with another product than B A.
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """The matrices A and B of each layer, and the parameters of modules that were trained whole, by name."""

    scale: Scale
    layers: dict[str, tuple[Tensor, Tensor]]
    saved: dict[str, Tensor]


def read_adapter(folder: Path) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ToolkitError: a file is missing or invalid, or another method than LoRA made it.
    """
    config = _config(folder / CONFIG)
    weights = BaseWeights(folder / WEIGHTS)
    tensors = {name.removeprefix(PREFIX): torch.from_numpy(weights.numbers(name)) for name in weights.records}
    first, second = ({name.removesuffix(end) for name in tensors if name.endswith(end)} for end in _ENDS)
    if first != second or not first:
        raise ToolkitError(
            "expected a lora_A and a lora_B for each layer" + (f", got one for {min(first ^ second)}" if first else ""),
            where=str(folder / WEIGHTS),
            fix="pass adapters that peft's save_pretrained or `toolkit ckpt export --format peft` wrote",
        )
    layers = {name: (tensors.pop(name + _ENDS[0]), tensors.pop(name + _ENDS[1])) for name in sorted(first)}
    if wrong := [name for name, (low, high) in layers.items() if {low.shape[0], high.shape[1]} != {config["r"]}]:
        raise ToolkitError(
            f"expected rank {config['r']}, got another rank for {wrong[0]}",
            where=str(folder / WEIGHTS),
            fix="fetch the folder again, because its files belong to different adapters",
        )
    scale = Scale(config["r"], float(config.get("lora_alpha", 8)), bool(config.get("use_rslora")))
    return Adapter(scale, layers, tensors)


def use_adapters(model: nn.Module, adapters: Sequence[Adapter], weights: Sequence[float] = ()) -> None:
    """Let a whole, unsharded model use the sum of these adapters instead of those before; none restores the base.

    Args:
        weights: a factor of each adapter; 1 by default.

    Raises:
        ToolkitError: an adapter does not fit the model or has whole modules, which cannot be added.
    """
    if any(adapter.saved for adapter in adapters):
        raise ToolkitError(
            "adapters with modules_to_save replace whole modules, which cannot be switched or added",
            where="use_adapters",
            fix="load these modules with load_state_dict, and pass Adapter(scale, layers, {})",
        )
    unmerge(model)
    for _, layer in adapted_layers(model):
        layer.lora_A = layer.lora_B = None
    modules = dict(model.named_modules())
    factors = list(weights) or [1.0] * len(adapters)
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.layers):
        if not isinstance(module := modules.get(name), nn.Linear):
            raise ToolkitError(
                f"the model has no nn.Linear {name!r}", where="use_adapters", fix="pass its own adapters"
            )
        pairs = [
            (*adapter.layers[name], adapter.scale.factor * factor)
            for adapter, factor in zip(adapters, factors, strict=True)
            if name in adapter.layers
        ]
        # One product of all: [A1; A2] and [s1 B1, s2 B2].
        low = torch.cat([low for low, _, _ in pairs])
        high = torch.cat([factor * high for _, high, factor in pairs], dim=1)
        AdaptedLinear.of(module).put(1.0, low.to(module.weight.device), high.to(module.weight.device))


def merge(model: nn.Module) -> None:
    """Add the adapters to the weights, so that a forward pass costs the same as without adapters.

    Raises:
        ToolkitError: a weight is quantised, and a sum with it would be rounded again.
    """
    for name, layer in adapted_layers(model):
        if layer.quantised is not None:
            raise ToolkitError(
                f"the weight of {name} is quantised, so an adapter cannot be added to it",
                where="merge",
                fix='merge into the base without quantisation: adapters.quantize = "none", or `ckpt export --merge`',
            )
    _shift(model, merged=True)


def unmerge(model: nn.Module) -> None:
    """Subtract the adapters again; the weights differ from the original ones by rounding."""
    _shift(model, merged=False)


@torch.no_grad()
def _shift(model: nn.Module, *, merged: bool) -> None:
    for _, layer in adapted_layers(model):
        delta = layer.delta()
        if delta is not None and layer.is_merged != merged:
            layer.weight += delta.to(layer.weight.dtype) if merged else -delta.to(layer.weight.dtype)
            layer.is_merged = merged


def _config(path: Path) -> dict[str, Any]:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError("file not found", where=str(path), fix="pass a folder with adapters of peft") from None
    except (OSError, ValueError) as error:
        raise ToolkitError(f"cannot be read as JSON: {error!s:.80}", where=str(path), fix="fetch it again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ToolkitError("expected adapters of the type LORA", where=str(path), fix="train adapters of this type")
    used = [name for name in _UNSUPPORTED if config.get(name)]
    if used or config.get("bias", "none") != "none":
        raise ToolkitError(
            f"toolkit does not support {', '.join(used) or 'bias'} of peft",
            where=str(path),
            fix="merge it with peft first",
        )
    return config
