"""Adapt the model of a job as the table [adapters] configures: freeze it, add adapters, and load or quantise its base.

`build` and `initialise` of a `Design` do all of that, so every parallel strategy treats an adapted model as any other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.checkpoint.convert.adapters import BaseWeights
from toolkit.checkpoint.convert.export_safetensors import CONVERTIBLE
from toolkit.checkpoint.loading.planner import both_shapes, difference
from toolkit.config.adapters import check_adapters
from toolkit.config.resolved import ResolvedJob
from toolkit.config.table import nearest
from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import Initialise, Read, own_value, parameters_on_meta, tied_names
from toolkit.parallel.outline import Outline
from toolkit.train.adapters.files import read_adapter
from toolkit.train.adapters.layers import AdaptedLinear, Quantised, Scale, adapted_layers
from toolkit.train.blocks import is_below

__all__ = ["Adapters", "reader_of"]

_ANGLES = ".rotary_emb.inv_freq"  # buffers in files of old releases of transformers; models compute them


class Adapters:
    """The adapters of a run. As an object with a state, it records its base in checkpoints and rejects another one."""

    def __init__(
        self, config: ResolvedJob, build: Callable[[], nn.Module], initialise: Initialise, outline: Outline
    ) -> None:
        check_adapters(config)
        given = self._settings = config.adapters
        self._seed, self._build, self._initialise = config.train.seed, build, initialise
        self._scale = Scale(given.rank, given.alpha, given.rank_stabilized)
        self._base = BaseWeights(config.job_directory / given.base) if given.base else None
        with parameters_on_meta(0):
            model = build()
        modules, blocks = dict(model.named_modules()), f"{outline.blocks}.*"
        self._saved = _matching(given.modules_to_save, [name for name in modules if name], "adapters.modules_to_save")
        # Only the exact class: a subclass may never call `forward`, such as the projection of nn.MultiheadAttention.
        linear = [name for name, module in modules.items() if type(module) is nn.Linear]
        linear = [name for name in linear if not is_below(name, self._saved)]
        if not given.targets and not any(fnmatchcase(name, blocks) for name in linear):
            raise ToolkitError(
                f"expected nn.Linear layers to adapt in {outline.blocks}, got none",
                where="adapters.rank",
                fix="set adapters.rank = 0 to train all weights, or name other layers in adapters.targets",
            )
        self._targets = _matching(given.targets or [blocks], linear, "adapters.targets")
        self._quantised = [name for name in linear if name in self._targets or fnmatchcase(name, blocks)]
        if given.quantize == "none":
            self._quantised = []
        self._read_base = self._reader(model)
        self._start: dict[str, Tensor] = {}
        if given.source:
            with parameters_on_meta(0):
                self._start = self._starting_values(self.build(), config)

    def build(self) -> nn.Module:
        """Return the model with adapters, frozen except these and `modules_to_save`."""
        model = self._build().requires_grad_(False)
        for name in {*self._targets, *self._quantised}:
            layer = AdaptedLinear.of(model.get_submodule(name))
            if name in self._targets:
                layer.add(self._scale, self._settings.dropout)
        for name in self._saved:
            model.get_submodule(name).requires_grad_(True)
        for name, buffer in model.named_buffers():
            if self._base is not None and name in self._base.records:
                buffer.copy_(torch.from_numpy(self._base.numbers(name)))
        return model

    def initialise(self, name: str, tensor: Tensor) -> None:
        """Set the initial values of a parameter: those of `source`, of `base`, else of the job; B is 0."""
        if name in self._start:
            tensor.copy_(self._start[name])
        elif name.endswith(".lora_A"):
            nn.init.kaiming_uniform_(tensor, a=sqrt(5))
        elif name.endswith(".lora_B"):
            nn.init.zeros_(tensor)
        elif (found := self.read(name, (0,) * tensor.dim(), tensor.shape)) is not None:
            tensor.copy_(found)
        else:
            self._initialise(name, tensor)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor | None:
        """Return a part of a value of `base`; None if it lacks this value, or `source` has another one."""
        return None if name in self._start else self._read_base(name, offset, shape)

    def take_out(self, part: nn.Module) -> None:
        """Replace the weights of layers to quantise, after the tensor-parallel split and before they use memory."""
        for name, layer in adapted_layers(part):
            if name in self._quantised:
                layer.quantised = Quantised(layer.weight, self._settings.quantize, self._settings.double_quantization)
                layer.register_parameter("weight", None)

    def fill(self, model: nn.Module, device: str) -> None:
        """Compute and quantise the weights that `take_out` has replaced, with one whole weight at a time in memory."""
        with torch.no_grad():
            for name, layer in adapted_layers(model):
                if layer.quantised is not None:
                    weight = layer.quantised.weight
                    own = own_value(f"{name}.weight", weight, self.initialise, self._seed, device, self.read)
                    layer.quantised.pack(own)

    def describe(self, model: nn.Module) -> str:
        """Return the line that a run logs."""
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        kind = "" if self._settings.quantize == "none" else f", base in {self._settings.quantize}"
        return f"adapters: rank {self._scale.rank} on {len(self._targets)} layers, {trained:,} parameters trained{kind}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a reader of the checkpoint needs to apply the adapters."""
        path, digest = "", f"initial values of seed {self._seed}"
        if self._base:
            path, digest = str(self._base.source.resolve()), self._base.digest
        return {
            "base": {"path": path, "digest": digest},
            "quantize": self._settings.quantize,
            **vars(self._scale),
            "factor": self._scale.factor,
            "dropout": self._settings.dropout,
            "targets": self._targets,
            "modules_to_save": self._saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise a ToolkitError if the adapters of a checkpoint were trained on another base, or another form of it."""
        before, now, scale = state["base"], self.state_dict()["base"], self._scale
        kind, own = state["quantize"], self._settings.quantize
        expected, found = (f"{one['path']} ({one['digest']:.24})" for one in (before, now))
        for name, is_other, message, fix in (
            ("alpha", state["factor"] != scale.factor, f"with a factor of {state['factor']:g}, got {scale.factor:g} from {scale}",
             f"set {Scale(state['rank'], state['alpha'], state['rank_stabilized'])}"),
            ("quantize", kind != own, f'on a base with quantize = "{kind}", got "{own}"', f'set adapters.quantize = "{kind}"'),
            ("base", before["digest"] != now["digest"], f"on another base: expected {expected}, got {found}",
             f'set adapters.base = "{before["path"]}" and the seed of that run'),
        ):  # fmt: skip
            if is_other:
                message, fix = f"the adapters were trained {message}", f"{fix}, or start a new run"
                raise ToolkitError(message, where=f"adapters.{name}", fix=fix)

    def _reader(self, model: nn.Module) -> Read:
        """Return the function that reads values of the base."""
        shared = {name for names in tied_names(model) for name in names}
        if both := [name for name in self._quantised if f"{name}.weight" in shared]:
            message = f"the weight of {both[0]} is tied to another module, so it cannot be quantised alone"
            fix = f"remove {both[0]} from adapters.targets, or untie it"
            raise ToolkitError(message, where="adapters.targets", fix=fix)
        fix = "set adapters.base to weights of this model, or list a new module in adapters.modules_to_save"
        return reader_of(self._base, model, fix, self._saved) if self._base else lambda name, offset, shape: None

    def _starting_values(self, model: nn.Module, config: ResolvedJob) -> dict[str, Tensor]:
        """Return the values of `adapters.source` by parameter name."""
        folder = config.job_directory / self._settings.source
        given = read_adapter(folder)
        if given.scale != self._scale:
            message = f"expected adapters with {self._scale}, got {given.scale}"
            raise ToolkitError(message, where=str(folder), fix=f"set {given.scale} in [adapters]")
        wanted = {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
        values = given.values
        fix = "set adapters.targets and modules_to_save as in adapter_config.json of this folder"
        _compare(wanted, {name: tuple(one.shape) for name, one in values.items()}, str(folder), fix, ())
        return values


def reader_of(base: BaseWeights, model: nn.Module, fix: str, without: Collection[str] = ()) -> Read:
    """Return a function that reads values of `model` from `base`; a tied parameter may have any of its names there.

    Raises a ToolkitError if names or shapes differ, except in the modules `without`.
    """
    tied = {names[0]: names for names in tied_names(model)}
    wanted, records = {name: tuple(one.shape) for name, one in model.named_parameters()}, base.records
    names = {name: one for name in wanted for one in tied.get(name, [name]) if one in records}
    found = {name: records[one].shape for name, one in names.items()}
    shared = {name for names in tied.values() for name in names}
    known = {*names.values(), *shared, *(name for name, _ in model.named_buffers())}
    known |= {one for one in records if one.endswith(_ANGLES) or is_below(one, without)}
    found |= {one: records[one].shape for one in records if one not in known}
    _compare(wanted, found, str(base.source), fix, without)
    if strange := [one for one in names.values() if records[one].dtype not in CONVERTIBLE]:
        raise ToolkitError(
            f"expected weights in {', '.join(CONVERTIBLE)}, got {records[strange[0]].dtype} in {strange[0]}",
            where=str(base.source),
            fix="use unquantised weights, with adapters.quantize",
        )

    def read(name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor | None:
        return torch.from_numpy(base.numbers(names[name], offset, shape)) if name in names else None

    return read


def _compare(
    wanted: Mapping[str, Any], found: Mapping[str, Any], where: str, fix: str, without: Collection[str]
) -> None:
    lacking = sorted(name for name in wanted.keys() - found.keys() if not is_below(name, without))
    extra, common = sorted(found.keys() - wanted.keys()), sorted(wanted.keys() & found.keys())
    differing = [both_shapes(name, found[name], wanted[name]) for name in common if found[name] != wanted[name]]
    if lacking or extra or differing:
        raise ToolkitError(difference(lacking, extra, differing), where=where, fix=fix)


def _matching(patterns: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Return the names that a pattern matches, whole or from the end after a dot, in the order of the model."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matched:
            ends = {end for name in names if not (end := name.rpartition(".")[2]).isdigit()}
            message = f"{pattern!r} matches no {'linear layer' if where.endswith('targets') else 'module'} of the model"
            fix = f"use {' or '.join(nearest(pattern, ends) or sorted(ends)[:8])}"
            raise ToolkitError(message, where=where, fix=fix)
        found |= matched
    return [name for name in names if name in found]
