"""The training loop as a generator, which performs steps, saves and stops, and yields records."""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Protocol

from torch import Tensor

from toolkit.errors import ToolkitError
from toolkit.metrics.step_profile import CHECKPOINT, COMMUNICATION, DATA, VALIDATION
from toolkit.metrics.training import TrainRecord
from toolkit.parallel.experts.migration import Migration
from toolkit.parallel.replica_check import check_replicas, replica_group
from toolkit.train.data.broken import BrokenShare
from toolkit.train.data.order import passes_of, share, split
from toolkit.train.guard import StepDecision
from toolkit.train.local_sgd import LocalSgd
from toolkit.train.loop.kernels import KernelSteps
from toolkit.train.loop.profiling import ProfiledSteps, ProfileSettings
from toolkit.train.loop.recording import RecordedSteps
from toolkit.train.loop.step import OptimizerStep, Stepped
from toolkit.train.loop.validations import Validations
from toolkit.train.optim.adascale import AdaScale
from toolkit.train.optim.rate_scaling import LearningRate
from toolkit.train.state import TrainingState
from toolkit.train.state.saves import Saves
from toolkit.world.facts import World

# Returns the samples with these global indices: inputs and targets, both of shape (len(samples), tokens).
TakeSamples = Callable[[range], tuple[Tensor, Tensor]]


class LoopSettings(ProfileSettings, Protocol):
    """The keys of `[train]` that the loop reads."""

    steps: int
    log_every: int
    check_replicas_every: int
    compile: bool


def training_steps(
    world: World,
    settings: LoopSettings,
    state: TrainingState,
    step: OptimizerStep,
    take_samples: TakeSamples,
    saves: Saves | None,
    validations: Validations | None = None,
    broken: BrokenShare | None = None,
    migration: Migration | None = None,
    local_sgd: LocalSgd | None = None,
) -> Iterator[TrainRecord]:
    """Run optimizer steps from `state.step` to `settings.steps`; yield a record every `log_every` steps.

    The loop validates as `validations` requires, and ends early if it requests that. A bad step changes no weights; a
    roll-back continues from the newest checkpoint. The loop saves as `saves` requires, at the end, on request, and if
    any rank received a stop request. The record of a step precedes its save: with `log_every` 1, the records contain
    every step that a checkpoint contains. `local_sgd` exchanges parameters after its steps.

    Raises:
        ToolkitError: the guard's limit is exceeded, there is no checkpoint to roll back to, `broken` exceeds its
            limit, or replicas differ.
    """
    mark, mesh, profile = _Mark(state.step), step.model.mesh, step.model.profile
    profiled, kernels = ProfiledSteps(world, settings, step), KernelSteps(world)
    recorded = RecordedSteps(world.device, profile, profiled.steps, is_compiled=settings.compile)
    passes = passes_of(settings.batch, mesh.data_size, settings.micro_batch)
    replicas, equal_at = replica_group(mesh) if settings.check_replicas_every else None, 0
    if settings.check_replicas_every and replicas is None and world.rank == 0:
        sys.stderr.write("no replicas to compare (train.check_replicas_every): no two ranks have the same parameters\n")
    while state.step < settings.steps and not _is_over(step.schedule, validations):
        recorded.begin(state.step + 1)
        profiled.begin(state.step + 1)
        kernels.begin(state.step + 1)
        samples = share(state.samples, settings.batch, mesh.data_rank, mesh.data_size)
        with profile.phase(DATA):
            micro_batches = [take_samples(part) for part in split(samples, settings.micro_batch, passes)]
        tokens = _tokens(micro_batches[0][0])
        profiled.took(len(micro_batches), settings.batch * tokens)
        # Like `World.should_stop`, but the stop requests are reduced together with the loss: on shared cores, a
        # separate all-reduce costs more than everything else that this loop adds. A request is read at the start of a
        # step and takes effect at its end.
        asked = saves.asked() if saves else world.stop_asked(state.step)
        skipped = broken.new() if broken else 0
        with recorded.counting_bytes():
            stepped = step.take(micro_batches, asked, skipped=skipped, step=state.step + 1, samples=state.samples)
        if broken:
            broken.add(settings.batch, int(stepped.skipped))
        if stepped.decision.action != "go_on":
            recorded.logged(len(samples) * tokens, float(stepped.loss), float(stepped.grad_norm))
        if stepped.decision.action != "go_on" and _goes_back(world, state, stepped.decision, saves):
            mark = _Mark(state.step)
            continue
        state.step += 1
        state.samples += settings.batch
        for line in migration.after_step(state.step) if migration else ():
            if mesh.data_rank == mesh.place["cp"] == mesh.place["tp"] == 0:
                sys.stderr.write(f"step {state.step}: {line}\n")
        if local_sgd is not None:
            with profile.phase(COMMUNICATION):
                recorded.exchanged(local_sgd.after_step(state.step))
        if replicas is not None and state.step % settings.check_replicas_every == 0:
            check_replicas(step.model.module, replicas, state.step, equal_at)
            equal_at = state.step
        last = state.step == settings.steps or _is_finished(step.schedule)
        if last or state.step % settings.log_every == 0:
            record = _record(world, settings, state, stepped, tokens, mark)
            recorded.logged(len(samples) * tokens, record.loss, record.grad_norm)
            if stepped.experts is not None and step.model.experts is not None:
                recorded.balanced(step.model.experts.load(stepped.experts))
            if step.model.compression is not None:
                recorded.compressed(step.model.compression.measures())
            yield record
            mark = _Mark(state.step)
        if validations and validations.is_due(state.step):
            with profile.phase(VALIDATION):
                last = validations.after_step(state) or last
            mark = _Mark(state.step)
        stop = world.stop_agreed(0 if last else int(stepped.asked))  # a run that completes does not count as stopped
        began_s = time.perf_counter()
        with profile.phase(CHECKPOINT):
            saved = saves is not None and saves.after_step(stepped.loss, stop=stop, last=last)
        if saved:
            recorded.saved(time.perf_counter() - began_s)
            mark = _Mark(state.step)
        if stop or last:
            break
    recorded.close()
    profiled.end()
    kernels.begin(float("inf"))


def _goes_back(world: World, state: TrainingState, decision: StepDecision, saves: Saves | None) -> bool:
    """Apply and log the guard's decision; return True if the run went back to a checkpoint.

    Raises:
        ToolkitError: the decision is to roll back, and there is no checkpoint.
    """
    line, goes_back = decision.line, decision.action == "roll_back"
    if goes_back:
        if saves is None or not saves.roll_back(decision.next_sample):
            raise ToolkitError(
                f"{decision.why}: no checkpoint to roll back to",
                where="train.guard",
                fix='save earlier, with a smaller checkpoint.every_steps, or set train.guard = "skip"',
            )
        line = f"{decision.why}: rolling back to the checkpoint of step {state.step} and continuing from sample {state.samples}"
    if world.rank == 0:
        sys.stderr.write(line + "\n")
    return goes_back


def _is_over(schedule: LearningRate, validations: Validations | None) -> bool:
    """Return True if the run ended before its last step; a resume may start in this state."""
    return _is_finished(schedule) or (validations is not None and validations.is_over)


def _is_finished(schedule: LearningRate) -> bool:
    """Return True if the schedule has ended; AdaScale counts steps of the reference batch, so it may end early."""
    return isinstance(schedule, AdaScale) and schedule.finished


def _tokens(inputs: Tensor) -> int:
    """Return the number of tokens of a sample; one that is not a row of tokens counts as one."""
    return inputs.shape[1] if inputs.dim() == 2 and not inputs.is_floating_point() else 1


class _Mark:
    """The start of the current time measurement; validations and saves move it, so that their time does not count."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._at = time.monotonic()

    def seconds_per_step(self, step: int) -> float:
        return (time.monotonic() - self._at) / (step - self._step)


def _record(
    world: World, settings: LoopSettings, state: TrainingState, stepped: Stepped, tokens_per_sample: int, mark: _Mark
) -> TrainRecord:
    loss, grad_norm = float(stepped.loss), float(stepped.grad_norm)
    seconds = mark.seconds_per_step(state.step)
    return TrainRecord(
        step=state.step,
        steps=settings.steps,
        loss=loss,
        loss_hex=loss.hex(),
        lr=stepped.rate,
        grad_norm=grad_norm,
        samples=state.samples,
        tokens=state.samples * tokens_per_sample,
        seconds=seconds,
        tokens_per_s=settings.batch * tokens_per_sample / seconds,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        attempt=world.attempt,
        world=world.size,
    )
