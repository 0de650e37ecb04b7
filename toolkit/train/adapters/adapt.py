"""Adapt the model of a job as the table [adapters] configures: freeze it, add adapters, and load or quantise its base.

`build` and `initialise` of a `Design` do all of that, so every parallel strategy treats an adapted model as any other.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.convert.base_weights import BaseWeights
from toolkit.checkpoint.loading.planner import both_shapes, difference
from toolkit.config.adapters import check_adapters
from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import Initialise, own_value, parameters_on_meta, seeded, tied_names
from toolkit.parallel.outline import Outline
from toolkit.train.adapters.files import read_adapter
from toolkit.train.adapters.layers import AdaptedLinear, Scale
from toolkit.train.adapters.quantised import Quantised

__all__ = ["Adapters"]


class Adapters:
    """The adapters of a run. As an object with a state, it records its base in checkpoints and refuses another one."""

    def __init__(
        self, config: ResolvedJob, build: Callable[[], nn.Module], initialise: Initialise, outline: Outline
    ) -> None:
        """Choose the layers of the model that `build` creates, and check the files of [adapters].

        Raises:
            ToolkitError: a pattern matches nothing, or the files do not match the model.
        """
        check_adapters(config)
        settings = config.adapters
        self._settings, self._seed = settings, config.train.seed
        self._build, self._initialise = build, initialise
        self._scale = Scale(settings.rank, settings.alpha, settings.rank_stabilized)
        with parameters_on_meta(0):
            model = build()
        # Only the exact class: a subclass may never call `forward`, such as the projection of nn.MultiheadAttention.
        linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        of_blocks = [name for name in linear if name.startswith(f"{outline.blocks}.")]
        self._targets = _matching(settings.targets, linear, "adapters.targets") if settings.targets else of_blocks
        modules = [name for name, _ in model.named_modules() if name]
        self._saved = _matching(settings.modules_to_save, modules, "adapters.modules_to_save")
        self._quantised: list[str] = []
        if settings.quantize != "none":
            both = dict.fromkeys([*of_blocks, *self._targets])
            self._quantised = [name for name in both if not _is_below(name, self._saved)]
        self._check_choice(model)
        self._base = BaseWeights(config.job_directory / settings.base) if settings.base else None
        self._names_in_base = self._found_in_base(model)
        self._start = self._starting_values(model, config) if settings.source else {}

    def build(self) -> nn.Module:
        """Return the model with adapters, frozen except these and `modules_to_save`."""
        model = self._build()
        model.requires_grad_(False)
        for name in {*self._targets, *self._quantised}:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapted = AdaptedLinear.of(layer)
            if name in self._targets:
                adapted.add(self._scale.factor, self._scale.rank, self._settings.dropout)
        for name in self._saved:
            model.get_submodule(name).requires_grad_(True)
        if self._base is not None:
            for name, buffer in model.named_buffers():
                if name in self._base.records:
                    self._read(name, buffer)
        return model

    def initialise(self, name: str, tensor: Tensor) -> None:
        """Set the initial values of a parameter: of `source`, of `base`, else random; B is 0."""
        if name in self._start:
            tensor.copy_(self._start[name])
        elif name.endswith(".lora_A"):
            nn.init.kaiming_uniform_(tensor, a=sqrt(5))
        elif name.endswith(".lora_B"):
            nn.init.zeros_(tensor)
        elif name in self._names_in_base:
            self._read(self._names_in_base[name], tensor)
        else:
            self._initialise(name, tensor)

    def take_out(self, part: nn.Module) -> None:
        """Replace the weights of layers to quantise, after the tensor-parallel split and before they use memory."""
        modules = dict(part.named_modules())
        for name in self._quantised:
            layer = modules.get(name)  # another pipeline stage may have it
            if isinstance(layer, AdaptedLinear):
                layer.quantised = Quantised(layer.weight, self._settings.quantize, self._settings.double_quantization)
                layer.register_parameter("weight", None)

    def fill(self, model: nn.Module, device: str) -> None:
        """Compute and quantise the weights that `take_out` has replaced, with one whole weight at a time in memory."""
        with torch.no_grad(), seeded(device):
            for name in self._quantised:
                layer = dict(model.named_modules()).get(name)
                if isinstance(layer, AdaptedLinear) and layer.quantised is not None:
                    own = own_value(f"{name}.weight", layer.quantised.weight, self.initialise, self._seed, device)
                    layer.quantised.pack(own)

    def describe(self, model: nn.Module) -> str:
        """Return the line that a run logs, with the sizes of this rank's part."""
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        kind = "" if self._settings.quantize == "none" else f", base in {self._settings.quantize}"
        of = f" of {self._base.source}" if self._base else ""
        return f"adapters: rank {self._scale.rank} on {len(self._targets)} layers, {trained:,} parameters trained{kind}{of}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a reader of the checkpoint needs to apply the adapters."""
        return {
            "base": {"path": str(self._base.source.resolve()) if self._base else "", "digest": self._digest()},
            **vars(self._scale),
            "dropout": self._settings.dropout,
            "targets": self._targets,
            "modules_to_save": self._saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the base of a checkpoint.

        Raises:
            ToolkitError: the adapters were trained on another base.
        """
        if state["base"]["digest"] != self._digest():
            before, now = (path or f"initial values ({digest})" for path, digest in (
                (state["base"]["path"], state["base"]["digest"]),
                (str(self._base.source) if self._base else "", self._digest()),
            ))  # fmt: skip
            raise ToolkitError(
                f"the adapters of the checkpoint were trained on another base: expected {before}, got {now}",
                where="adapters.base",
                fix=f"set adapters.base = {state['base']['path']!r} and the seed of that run, or start a new run",
            )

    def _digest(self) -> str:
        return self._base.digest() if self._base else f"seed {self._seed}"

    def _read(self, name: str, tensor: Tensor) -> None:
        assert self._base is not None
        tensor.copy_(torch.from_numpy(self._base.numbers(name)))

    def _check_choice(self, model: nn.Module) -> None:
        if both := [name for name in self._targets if _is_below(name, self._saved)]:
            raise ToolkitError(
                f"{both[0]} is trained whole, so it cannot have an adapter as well",
                where="adapters.modules_to_save",
                fix=f"remove {both[0]} from adapters.targets or from adapters.modules_to_save",
            )
        if not self._targets:
            raise ToolkitError(
                f"{type(model).__name__} has no nn.Linear in its blocks",
                where="adapters.targets",
                fix="name the layers in adapters.targets",
            )
        tied = {name for names in tied_names(model) for name in names}
        if shared := [name for name in self._quantised if f"{name}.weight" in tied]:
            raise ToolkitError(
                f"the weight of {shared[0]} is tied to another module, so it cannot be quantised alone",
                where="adapters.targets",
                fix=f"remove {shared[0]} from adapters.targets, or untie it",
            )

    def _found_in_base(self, model: nn.Module) -> dict[str, str]:
        """Return the name in the base of each parameter that it has; a tied one may have another name there."""
        if self._base is None:
            return {}
        tied = {names[0]: names for names in tied_names(model)}
        found, lacking, differing = {}, [], []
        for name, parameter in model.named_parameters():
            names = [one for one in tied.get(name, [name]) if one in self._base.records]
            if not names and not _is_below(name, self._saved):
                lacking.append(name)
            elif names and (shape := tuple(self._base.records[names[0]].shape)) != tuple(parameter.shape):
                differing.append(both_shapes(name, shape, tuple(parameter.shape)))
            elif names:
                found[name] = names[0]
        if lacking or differing:
            raise ToolkitError(
                difference(lacking, [], differing),
                where=str(self._base.source),
                fix="set adapters.base to weights of this model, or list a new module in adapters.modules_to_save",
            )
        return found

    def _starting_values(self, model: nn.Module, config: ResolvedJob) -> dict[str, Tensor]:
        """Return the values of `adapters.source` by parameter name."""
        folder = config.job_directory / self._settings.source
        given = read_adapter(folder)
        if given.scale != self._scale:
            raise ToolkitError(
                f"expected adapters with {_in_words(self._scale)}, got {_in_words(given.scale)}",
                where=str(folder),
                fix=f"set {_in_words(given.scale)} in [adapters]",
            )
        if given.layers.keys() != set(self._targets):
            raise ToolkitError(
                difference(
                    lacking=sorted(set(self._targets) - given.layers.keys()),
                    extra=sorted(given.layers.keys() - set(self._targets)),
                ),
                where=str(folder),
                fix=f"set adapters.targets = {sorted(given.layers)[:3]!r:.200} and all others of the folder",
            )
        values = dict(given.saved)
        for name, (low, high) in given.layers.items():
            layer = model.get_submodule(name)
            values[f"{name}.lora_A"], values[f"{name}.lora_B"] = low, high
            wanted = (layer.in_features, layer.out_features)
            if (low.shape[1], high.shape[0]) != wanted:
                raise ToolkitError(
                    f"{name} has {wanted[0]} inputs and {wanted[1]} outputs, its adapter {low.shape[1]} and {high.shape[0]}",
                    where=str(folder),
                    fix="use adapters of this model",
                )
        return values


def _in_words(scale: Scale) -> str:
    return f"rank = {scale.rank}, alpha = {scale.alpha:g}, rank_stabilized = {str(scale.rank_stabilized).lower()}"


def _matching(patterns: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Return the names that a pattern matches, whole or from the end after a dot, in the order of the model.

    Raises:
        ToolkitError: a pattern matches no name.
    """
    found = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matched:
            ends = {name.rpartition(".")[2] for name in names}
            raise ToolkitError(
                f"{pattern!r} matches no {'linear layer' if where.endswith('targets') else 'module'} of the model",
                where=where,
                fix=f"use {' or '.join(nearest(pattern, ends) or sorted(ends)[:8])}",
            )
        found |= matched
    return [name for name in names if name in found]


def _is_below(name: str, modules: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in modules)
