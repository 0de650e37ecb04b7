"""Run the passes of a tensor-parallel model: its loss on split logits, and the gradients of replicated parameters."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from toolkit.errors import ToolkitError
from toolkit.parallel.passes import Heard, MicroBatch, PartOf, Passes

__all__ = ["settle_gradients"]

_CHECKED_RUNS = 2  # check the rehearsal, before random streams are seeded, and the first step
_LOSS_APART = 0.03  # relative tolerance for gradients of bfloat16 logits that are summed in another order
_APART = 0.05  # relative tolerance: far above the effect of reordered bfloat16 sums, below that of another dropout mask


class TensorPasses:
    """Computes the loss of split logits, sums the remaining gradients, and checks that ranks agree.

    Args:
        passes: runs micro-batches through `module`.
        group: the tensor-parallel ranks.
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

        with loss_parallel():  # the backward pass needs this context, too
            self._passes.run(micro_batches, part_on_each_rank, heard, precision)
        settle_gradients(self._module, self._group)
        if self._runs < _CHECKED_RUNS:
            self._runs += 1
            _check_alike(self._module, self._group)

    def prepare(self, once: Callable[[], None]) -> None:
        self._passes.prepare(once)


def _check_loss(part_of: PartOf, logits: Tensor, targets: Tensor) -> None:
    """Check the loss of split logits: torch supports cross-entropy, but returns a wrong gradient for log-softmax."""
    gathered = _whole(logits).requires_grad_()
    wanted = part_of(gathered, targets)
    (wanted_gradient,) = torch.autograd.grad(wanted, gathered)
    if not wanted.isfinite() or not wanted_gradient.any():
        return  # nothing to compare, for example because all targets are the ignored index
    split = logits.requires_grad_()
    try:
        found = _whole(part_of(split, targets))
        (gradient,) = torch.autograd.grad(found, split)
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
        raise  # the machine failed, not the loss
    except (RuntimeError, ValueError) as error:
        raise _refusal(f"torch cannot compute this loss on them: {str(error).splitlines()[0]}") from error
    apart = (_whole(gradient) - wanted_gradient).norm() / wanted_gradient.norm()
    if not apart <= _LOSS_APART:  # false for NaN
        raise _refusal(f"its gradient differs by {float(apart):.0%}")
    if not (found - wanted).abs() <= _LOSS_APART * wanted.abs():
        raise _refusal(f"expected {float(wanted):.6g}, got {float(found):.6g}")


def _refusal(what: str) -> ToolkitError:
    return ToolkitError(
        f"the loss of logits split by vocabulary differs from that of whole logits: {what}",
        where="outline.tensor",
        fix='set the style of the head to "head_gathered", or use nn.functional.cross_entropy without label_smoothing',
    )


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def settle_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give gradients the placement of their parameters; FSDP2 has already done so for its parameters.

    Gradients from slices of the sequence are summed in one all-reduce per dtype.
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
    """Reject gradients of a replicated parameter that differ between ranks, because the ranks would diverge."""
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
            f"the gradients of the replicated parameter {differing[0]} differ between tensor-parallel ranks",
            where="outline.tensor",
            fix="seed the ranks by DistributedModel.stream, so that their dropout is equal; use the style 'piece' for "
            "modules that work on a rank's own heads or features",
        )
