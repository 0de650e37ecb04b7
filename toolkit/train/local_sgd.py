"""Train replicas on their own, and exchange parameters every few steps: local SGD and DiLoCo.

"average" (S. U. Stich, arXiv:1805.09767) continues from the mean of the parameters. "diloco" (A. Douillard et al.,
arXiv:2311.08105) treats the change since the last exchange as a gradient, averages it, and takes a step of SGD with Nesterov
momentum from the parameters of the last exchange. Fragments (arXiv:2501.18512) spread an exchange over several steps.
"""

import sys
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from toolkit.comm.communicator import Communicator
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.comm.sent_bytes import SentBytes
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError, counted
from toolkit.world.facts import World

__all__ = ["LocalSgd", "fragments_of"]


class LocalSgd:
    """The exchanges of a run. All ranks make the same calls in the same order.

    Call `begin` after a resume and `after_step` after each step. Between exchanges, replicas differ; `merge` makes them equal
    for a validation or a save, which leaves the outer step unchanged: the mean change of the parameters stays the same.

    Attributes:
        compression: compresses the changes of parameters, if there is one.
        outer: the state of the outer steps by kind and parameter, equal on all ranks: "kept", the parameters of the last
            exchange in fp32, and "momentum".
    """

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, config: ResolvedJob) -> None:
        """Exchange the trained parameters of a whole model as [local_sgd] configures; rank 0 prints that. Collective."""
        self._settings, self._model, self._optimizer = config.local_sgd, model, optimizer
        self._communicator = Communicator(world, timeout_s=float(config.restart.collective_timeout_s))
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._fragments = fragments_of(self._trained, self._settings.fragments)
        self._are_equal = False  # the parameters and buffers of all ranks
        kinds = ("kept", "momentum") if self._settings.algorithm == "diloco" else ()
        own = self._trained.items()
        self.outer = {kind: {name: torch.zeros_like(one, dtype=torch.float32) for name, one in own} for kind in kinds}
        self.compression = None
        if config.gradient_compression.algorithm != "none":
            self.compression = GradientCompression(config.gradient_compression, self._trained, config.train.seed)
            self.compression.kept.peers = self._communicator.peers
        if world.rank == 0:
            sys.stderr.writelines(f"{line}\n" for line in self._lines(config.train.steps))

    def _lines(self, steps: int) -> list[str]:
        """Return what is exchanged when, and warnings."""
        settings, ranks, compression = self._settings, self._communicator.size, self.compression
        what = f"{'changes of parameters' if self.outer else 'parameters'} averaged over {counted(ranks, 'rank')}"
        when = f" in {settings.fragments} fragments, each at its own step" if settings.fragments > 1 else ""
        line = f"local SGD ({settings.algorithm}): {what} every {counted(settings.every, 'step')}{when}"
        exchanges = (steps + settings.every - settings.every // settings.fragments) // settings.every
        if not exchanges:
            line += f"; a run of {counted(steps, 'step')} averages only before validations and saves"
        if compression is None or ranks == 1:  # a single rank sends nothing
            return [line]
        warnings = compression.warnings("sgd", exchanges)
        notes = [f"gradient compression: {one} (docs/compression.md)" for one in warnings]
        return [f"{line}; {compression.describe(ranks)}", *notes]

    def begin(self, *, is_new: bool) -> None:
        """Continue from the parameters and buffers of rank 0; with `is_new`, also begin the outer steps there."""
        self._broadcast([*(one.detach() for one in self._trained.values()), *self._buffers()])
        self._are_equal = True
        if is_new:
            self._restart(self._trained)

    def take(self, missing: Collection[str]) -> str:
        """Continue with `outer` after a load; return a message if the checkpoint lacks part of it, else "".

        Args:
            missing: the names that the checkpoint lacks, as in "momentum.head.weight".
        """
        lacking = {name.partition(".")[2] for name in missing}
        self._restart(lacking)
        return f"diloco starts without the momentum of {counted(len(lacking), 'parameter')}" if lacking else ""

    def _restart(self, names: Collection[str]) -> None:
        for name in names if self.outer else ():
            self.outer["kept"][name].copy_(self._trained[name].detach())
            self.outer["momentum"][name].zero_()

    def after_step(self, step: int) -> int:
        """Exchange the fragments that are due after optimizer step `step`; return the bytes that this rank sent."""
        settings = self._settings
        places = [number * settings.every // settings.fragments for number in range(settings.fragments)]
        self._are_equal = False
        if step % settings.every not in places:
            return 0
        with SentBytes() as sent:
            self._exchange(self._fragments[places.index(step % settings.every)])
            if settings.fragments == 1:
                self._broadcast(self._buffers())
                self._are_equal = True
        return sent.total

    def merge(self, *, with_optimizer: bool = False) -> None:
        """Make parameters and buffers equal on all ranks, for a save also the optimizer state."""
        if not self._are_equal:
            self._average([one.detach() for one in self._trained.values()])
            self._broadcast(self._buffers())
            self._are_equal = True
        if with_optimizer:
            self._average(self._moments())

    def _moments(self) -> list[Tensor]:
        """Return the optimizer state without counters of steps, which are equal on all ranks. Collective."""
        states = [self._optimizer.state.get(one, {}) for one in self._trained.values()]
        device = next(iter(self._trained.values())).device
        filled = torch.tensor([[bool(state), not state] for state in states], dtype=torch.int32, device=device)
        on_any = self._communicator.all_reduce(filled, "max").tolist()
        if lacking := [name for name, found in zip(self._trained, on_any, strict=True) if all(found)]:
            raise ToolkitError(
                f"local SGD requires a gradient of every parameter on all ranks, but some ranks had none of {lacking[0]}",
                where="local_sgd.algorithm",
                fix='freeze the parameter, or use it in every step; or set algorithm = "none" and parallel.unused_parameters = true',
            )
        return [one for state in states for name, one in state.items() if name != "step" and isinstance(one, Tensor)]

    @torch.no_grad()
    def _exchange(self, names: list[str]) -> None:
        parameters = {name: self._trained[name].detach() for name in names}
        if not self.outer:
            self._average(list(parameters.values()))
            return
        changes = {name: self.outer["kept"][name] - one for name, one in parameters.items()}
        if self.compression is None:
            self._average(list(changes.values()))
        elif names:
            self._communicator.start.reduce_compressed(self.compression, names, list(changes.values())).wait()
        for name, change in changes.items():
            kept, momentum = self.outer["kept"][name], self.outer["momentum"][name]
            momentum.mul_(self._settings.outer_momentum).add_(change)
            kept.sub_(change.add_(momentum, alpha=self._settings.outer_momentum), alpha=self._settings.outer_lr)
            parameters[name].copy_(kept)

    def _average(self, tensors: list[Tensor]) -> None:
        self._communicator.all_reduce_many(tensors, "avg")

    def _broadcast(self, tensors: list[Tensor]) -> None:
        if tensors:
            self._communicator.broadcast_many(tensors, [0] * len(tensors))

    def _buffers(self) -> list[Tensor]:
        """Return the buffers of checkpoints; as with DDP, those of rank 0 apply."""
        saved = self._model.state_dict().keys()
        return [one for name, one in self._model.named_buffers() if name in saved]


def fragments_of(parameters: Mapping[str, Tensor], number: int) -> list[list[str]]:
    """Return the names in `number` groups of about equal size, in the order of the model; a group may be empty."""
    total = max(1, sum(one.numel() for one in parameters.values()))
    groups: list[list[str]] = [[] for _ in range(number)]
    begin = 0
    for name, one in parameters.items():
        groups[min(number - 1, (2 * begin + one.numel()) * number // (2 * total))].append(name)
        begin += one.numel()
    return groups
