"""Adapters in the files of peft: read them, use one or several on a model, merge them into its weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.convert.adapters import CONFIG, ENDS, PREFIX, WEIGHTS, BaseWeights
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import tied_names
from toolkit.train.adapters.layers import AdaptedLinear, Scale, adapted_layers

__all__ = ["Adapter", "merge", "read_adapter", "unmerge", "use_adapters"]

# Settings of peft with another product than B A.
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication")
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")  # initial values that peft subtracts from the base


@dataclass(frozen=True)
class Adapter:
    """The scale of an adapter, and its values by the names of parameters: `blocks.0.up.lora_A`, `head.weight`."""

    scale: Scale
    values: dict[str, Tensor]

    @property
    def layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The matrices A and B of each layer."""
        names = [name.removesuffix(ENDS[0]) for name in self.values if name.endswith(ENDS[0])]
        return {name: (self.values[name + ENDS[0]], self.values[name + ENDS[1]]) for name in names}


def read_adapter(folder: Path) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`. Raises a ToolkitError for other methods than LoRA."""
    path = folder / CONFIG
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = "not found" if isinstance(error, FileNotFoundError) else f"cannot be read as JSON: {error!s:.80}"
        raise ToolkitError(why, where=str(path), fix="pass a folder with adapters of peft") from None
    is_lora = isinstance(config, dict) and config.get("peft_type") == "LORA" and isinstance(config.get("r"), int)
    used = [name for name in _UNSUPPORTED if config.get(name)] if is_lora else ["another peft_type than LORA"]
    if is_lora and str(config.get("init_lora_weights")).startswith(_CHANGED_BASE):
        used.append(f"init_lora_weights = {config['init_lora_weights']!r}")
    if used or config.get("bias", "none") != "none":
        fix = "merge it with peft, and use the result as adapters.base"
        raise ToolkitError(f"toolkit does not support {', '.join(used) or 'bias'} of peft", where=str(path), fix=fix)
    values, weights = {}, BaseWeights(folder / WEIGHTS)
    for name in weights.records:
        own = name.removeprefix(PREFIX)
        is_matrix = own.removesuffix(".weight").endswith(ENDS)
        values[own.removesuffix(".weight") if is_matrix else own] = torch.from_numpy(weights.numbers(name))
    alone = [name for name in values if name.endswith(ENDS) and not {name[:-1] + "A", name[:-1] + "B"} <= values.keys()]
    if alone:
        message, fix = f"has {alone[0]} without the other matrix of this layer", "fetch or export the adapter again"
        raise ToolkitError(message, where=str(folder / WEIGHTS), fix=fix)
    return Adapter(Scale(config["r"], float(config.get("lora_alpha", 8)), bool(config.get("use_rslora"))), values)


def use_adapters(model: nn.Module, adapters: Sequence[Adapter], weights: Sequence[float] = ()) -> None:
    """Let a whole, unsharded model use the sum of adapters, times `weights`, instead of those before; [] restores the base.

    Raises a ToolkitError if an adapter does not fit the model or has whole modules, which cannot be added.
    """
    names = dict.fromkeys(name for adapter in adapters for name in adapter.values)
    if whole := [name for name in names if not name.endswith(ENDS)]:
        message, fix = f"{whole[0]} of modules_to_save cannot be switched or added", "pass an adapter without it"
        raise ToolkitError(message, where="use_adapters", fix=fix)
    modules, device = dict(model.named_modules()), next(model.parameters()).device
    found: list[tuple[nn.Linear, Tensor, Tensor]] = []
    if weights and len(weights) != len(adapters):
        message = f"expected a weight for each of {len(adapters)} adapters, got {len(weights)}"
        raise ToolkitError(message, where="use_adapters", fix="pass as many weights as adapters, or none")
    scaled = list(zip(adapters, weights or [1.0] * len(adapters), strict=True))
    for name in dict.fromkeys(name.rpartition(".")[0] for name in names):
        pairs = [(*one.layers[name], one.scale.factor * weight) for one, weight in scaled if name in one.layers]
        # One product of all: [A1; A2] and [s1 B1, s2 B2].
        low = torch.cat([low for low, _, _ in pairs])
        high = torch.cat([factor * high for _, high, factor in pairs], dim=1)
        module = modules.get(name)
        if not isinstance(module, nn.Linear) or (high.shape[0], low.shape[1]) != tuple(module.weight.shape):
            message = f"the model has no nn.Linear {name} with {low.shape[1]} inputs and {high.shape[0]} outputs"
            raise ToolkitError(message, where="use_adapters", fix="pass adapters of this model")
        found.append((module, low, high))
    unmerge(model)
    for _, layer in adapted_layers(model):
        layer.lora_A = layer.lora_B = None
    for module, low, high in found:
        layer = AdaptedLinear.of(module)
        layer.lora_A, layer.lora_B, layer.factor = nn.Parameter(low.to(device)), nn.Parameter(high.to(device)), 1.0


def merge(model: nn.Module) -> None:
    """Add the adapters to the weights, so that forward passes cost as much as without. Rejects quantised weights."""
    _shift(model, is_merged=True)


def unmerge(model: nn.Module) -> None:
    """Subtract merged adapters again; the weights differ from the original ones by rounding."""
    _shift(model, is_merged=False)


@torch.no_grad()
def _shift(model: nn.Module, *, is_merged: bool) -> None:
    shared = {name for names in tied_names(model) for name in names}
    for name, layer in adapted_layers(model):
        if f"{name}.weight" in shared and layer.lora_A is not None:
            message = f"the weight of {name} is tied to another module, which would change, too"
            raise ToolkitError(message, where="merge", fix="untie it first, or pass an adapter without this layer")
        if layer.is_merged == is_merged or layer.lora_A is None or layer.lora_B is None:
            continue
        if layer.quantised is not None:
            fix = "merge into the base without quantisation, as `toolkit ckpt export --merge` does"
            raise ToolkitError(f"the weight of {name} is quantised, so it cannot change", where="merge", fix=fix)
        delta = layer.factor * (layer.lora_B @ layer.lora_A)
        layer.weight += (delta if is_merged else -delta).to(layer.weight.dtype)
        layer.is_merged = is_merged
