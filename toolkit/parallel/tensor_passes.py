"""The passes of a model that tensor parallel ranks have in pieces: its loss, and gradients of what each has whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from toolkit.errors import ToolkitError
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, Passes

_CHECKED_RUNS = 2  # the rehearsal, before the job seeds its streams, and the first step
_LOSS_APART = 0.03  # of the gradient of logits in bfloat16 that is taken by other sums
_APART = 0.05  # far above what a sum of bfloat16 in another order makes, and below what another mask of dropout does


class TensorPasses:
    """Makes a loss of logits that are split by vocabulary, sums what is left to sum, and looks that ranks agree.

    Args:
        passes: what passes micro-batches through `module`.
        group: the tensor parallel ranks.
    """

    def __init__(self, passes: Passes, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._passes = passes
        self._module = module
        self._group = group
        self._runs = 0

    def run(
        self, micro_batches: Sequence[MicroBatch], part_of: PartOf, heard: Heard, precision: torch.autocast
    ) -> None:
        def part_on_each_rank(outputs: Tensor, targets: Tensor) -> Tensor:
            if self._runs == 0 and isinstance(outputs, DTensor):
                _check_loss(part_of, outputs.detach()[:1], targets[:1])
            return _whole(part_of(outputs, targets))

        with loss_parallel():  # for the backward pass, too
            self._passes.run(micro_batches, part_on_each_rank, heard, precision)
        settle_gradients(self._module, self._group)
        if self._runs < _CHECKED_RUNS:
            self._runs += 1
            _check_alike(self._module, self._group)

    def prepare(self, once: Callable[[], None]) -> None:
        self._passes.prepare(once)


def _check_loss(part_of: PartOf, logits: Tensor, targets: Tensor) -> None:
    """torch knows the cross-entropy of split logits; of a log-softmax by itself it would give a wrong gradient."""
    gathered = _whole(logits).requires_grad_()
    wanted = part_of(gathered, targets)
    (wanted_gradient,) = torch.autograd.grad(wanted, gathered)
    if not wanted.isfinite() or not wanted_gradient.any():
        return  # a sample without a target
    split = logits.requires_grad_()
    try:
        found = _whole(part_of(split, targets))
        (gradient,) = torch.autograd.grad(found, split)
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
        raise  # of the machine, not of the loss
    except (RuntimeError, ValueError) as error:
        raise _refusal(f"torch cannot take this loss of them: {str(error).splitlines()[0]}") from error
    apart = (_whole(gradient) - wanted_gradient).norm() / wanted_gradient.norm()
    if not apart <= _LOSS_APART:  # which a NaN is not
        raise _refusal(f"its gradient is {float(apart):.0%} off")
    if not (found - wanted).abs() <= _LOSS_APART * wanted.abs():
        raise _refusal(f"it is {float(found):.6g} and not {float(wanted):.6g}")


def _refusal(what: str) -> ToolkitError:
    return ToolkitError(
        f"the loss of logits that are split by vocabulary is not that of whole ones: {what}",
        where="outline.tensor",
        fix='say "head_gathered" of the head, or take nn.functional.cross_entropy without label_smoothing',
    )


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def settle_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Lay gradients as their parameters lie. FSDP2 has done that with its own.

    Those of which every rank has the share of its piece of the sequence are summed in one message.
    """
    shares: dict[torch.dtype, list[tuple[nn.Parameter, DTensor]]] = defaultdict(list)
    for parameter in module.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == (Partial(),) and parameter.placements == (Replicate(),):
            shares[gradient.dtype].append((parameter, gradient))
        elif gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for pairs in shares.values():
        together = torch.cat([gradient.to_local().reshape(-1) for _, gradient in pairs])
        dist.all_reduce(together, group=group)
        parts = together.split([gradient.numel() for _, gradient in pairs])
        for (parameter, gradient), part in zip(pairs, parts, strict=True):
            whole = part.view(gradient.shape)
            parameter.grad = DTensor.from_local(whole, gradient.device_mesh, [Replicate()], run_check=False)


def _check_alike(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Ranks that have the whole of a parameter would drift apart, step by step, if its gradients were not one."""
    apart: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None or (isinstance(gradient, DTensor) and "tp" in (gradient.device_mesh.mesh_dim_names or ())):
            continue
        own = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).float()
        mean = own.clone()
        dist.all_reduce(mean, group=group)
        mean /= group.size()
        apart[name] = (own - mean).norm() / mean.norm().clamp_min(torch.finfo(torch.float32).tiny)
    if not apart:
        return
    largest = torch.stack(list(apart.values()))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    differing = [name for name, one in zip(apart, largest.tolist(), strict=True) if one > _APART]
    if differing:
        raise ToolkitError(
            f"the tensor parallel ranks have the whole of {differing[0]}, and each has another gradient of it",
            where="outline.tensor",
            fix="seed the ranks by DistributedModel.stream, so that they drop the same; give modules that work on a "
            'rank\'s own heads or features the word "piece"',
        )
