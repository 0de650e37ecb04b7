"""Split matrices over the ranks of `tp`, and optionally the sequence between them, with torch's parallel styles.

Without `[parallel] sequence`, every rank has the whole residual stream, (batch, context, width), and outputs of "row"
modules are summed over ranks. With it, a rank has (batch, context / tp, width): "column" gathers its input, "row"
scatters its sum, and norms and dropout work on a slice. V. Korthikanti et al., "Reducing Activation Recomputation",
2022, arXiv:2205.05198.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from toolkit.errors import ToolkitError
from toolkit.parallel.materialise import set_parameter, tied_names
from toolkit.parallel.outline import Outline
from toolkit.parallel.tensor_plan import Split, unplanned


class PieceDraws:
    """Hooks that give each rank its own random numbers while modules work on its slice of a tensor.

    Args:
        device_type: the device type of the rank's tensors.
        place: the index of the rank among those with slices of the same tensors.
    """

    def __init__(self, device_type: str, place: int) -> None:
        self._device_type = device_type
        self._place = place
        self._common: Tensor | None = None  # common state of all ranks, kept while this rank draws its own numbers

    @property
    def on_pieces(self) -> bool:
        return self._common is not None

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Start a block with the common random state, even if the previous block did not call `leave`.

        A recomputed block may end early; torch then restores the generators.
        """
        self._common = None

    def enter(self, module: nn.Module, *_: Any) -> None:
        if self._common is not None or not module.training:
            return
        generator = self._generator()
        # Advance the state, so that the next call of `enter` finds another one.
        torch.rand(1, device=generator.device, generator=generator)
        self._common = generator.get_state()
        words = hashlib.sha256(self._common.numpy().tobytes() + self._place.to_bytes(8, "little")).digest()
        generator.manual_seed(int.from_bytes(words[:8], "little") >> 1)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self._common is not None:
            self._generator().set_state(self._common)
            self._common = None

    def _generator(self) -> torch.Generator:
        if self._device_type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator


_SEQUENCE = Shard(-2)  # the context dimension of (batch, context, width) and (context, width)


def split_tensors(
    model: nn.Module, outline: Outline, plan: Mapping[str, Split], mesh: DeviceMesh, sequence: bool
) -> None:
    """Split `model`, which is on the meta device, over the one-dimensional `mesh`, without communication.

    Args:
        plan: the result of `tensor_plan`; it may name modules that this rank's pipeline stage lacks.

    Raises:
        ToolkitError: tied parameters would be split in different ways.
    """
    modules = dict(model.named_modules())
    present = {name: split for name, split in plan.items() if name in modules}
    tied = tied_names(model)
    for name, split in present.items():
        style = _style(split.word, sequence)
        if style is not None:
            _split_module(modules[name], mesh, style, split.word)
    _tie_again(model, tied)
    for name, split in present.items():
        if split.word == "head":
            modules[name].register_forward_hook(_gather_to_evaluate)
        elif split.word.startswith("embedding") and sequence:
            modules[name].register_forward_pre_hook(partial(_check_context, mesh.size()))
    _draw_apart(model, outline, present, PieceDraws(mesh.device_type, mesh.get_local_rank()), sequence)


def _split_module(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle, word: str) -> None:
    """Split one module; its attribute `split_dims` lists parameters that torch's style does not know."""
    dims: Mapping[str, int | None] = getattr(module, "split_dims", {}).get(word, {})
    own = {name: module._parameters.pop(name, None) for name in dims}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    # No broadcast from a source rank: values are equal on all ranks, or not allocated yet.
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name in frozen:  # torch's styles for norms return trainable parameters
        module.get_parameter(name).requires_grad_(False)
    for name, parameter in own.items():
        if parameter is not None:
            placement = Replicate() if (dim := dims[name]) is None else Shard(dim)
            part = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _style(word: str, sequence: bool) -> ParallelStyle | None:
    stream = _SEQUENCE if sequence else Replicate()
    match word:
        case "column":
            return ColwiseParallel(input_layouts=stream)
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "embedding":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        case "embedding_column":
            return ColwiseParallel(output_layouts=stream)
        case "head":
            return ColwiseParallel(input_layouts=stream, use_local_output=False)
        case "head_gathered":
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
        case "piece":
            return SequenceParallel(use_local_output=True)
        case "norm":
            return SequenceParallel(sequence_dim=-2, use_local_output=True) if sequence else None
    raise AssertionError(word)


def _tie_again(model: nn.Module, tied: Iterable[list[str]]) -> None:
    """Tie parameters again, because splitting creates a new one for each name."""
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            if _layout(other) != _layout(parameter):
                raise ToolkitError(
                    f"{first} and {name} are the same parameter, but the Outline of the model splits them differently",
                    where="outline.tensor",
                    fix='split both by rows, as "embedding" and "head" (or "head_gathered"), or untie them',
                )
            set_parameter(model, name, parameter)


def _layout(parameter: nn.Parameter) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _draw_apart(
    model: nn.Module, outline: Outline, plan: Mapping[str, Split], draws: PieceDraws, sequence: bool
) -> None:
    """Draw equal random numbers on all ranks for the whole residual stream, and different ones for slices."""
    if sequence:
        model.register_forward_pre_hook(draws.enter)
        model.register_forward_hook(draws.leave, always_call=True)
        return
    modules = dict(model.named_modules())
    for block in outline.blocks_of(model):
        block.register_forward_pre_hook(draws.begin)
    for name, split in plan.items():
        if split.word == "column":
            modules[name].register_forward_hook(draws.enter)
        elif split.word == "row":
            modules[name].register_forward_pre_hook(draws.leave)
    for name in unplanned(model, plan):
        if name in modules:
            modules[name].register_forward_pre_hook(partial(_refuse_on_pieces, draws, name))
    for name, split in plan.items():
        if split.word == "norm":
            modules[name].register_forward_pre_hook(partial(_refuse_on_pieces, draws, name))


def _refuse_on_pieces(draws: PieceDraws, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Reject a module whose gradient would differ on every rank, because it sees only a slice."""
    if draws.on_pieces:
        raise ToolkitError(
            f"{name} is replicated on every rank, but its inputs are different heads or features on each rank",
            where="outline.tensor",
            fix=f'set the style of {name} to "piece"',
        )


def _gather_to_evaluate(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    """Gather logits for evaluation; only the training loss supports split logits."""
    return logits.full_tensor() if isinstance(logits, DTensor) and not module.training else logits


def _check_context(ranks: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    context = inputs[0].shape[-1]
    if context % ranks:
        below = context // ranks * ranks
        raise ToolkitError(
            f"a sequence length of {context} is not divisible by {ranks} tensor-parallel ranks",
            where="parallel.sequence",
            fix=f"use a length of {f'{below} or ' if below else ''}{below + ranks}, or set parallel.sequence to false",
        )
