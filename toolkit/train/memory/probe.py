"""Compare the memory that a rank needs by forecast with what it uses, for `train.measure_memory`."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import first_line
from toolkit.metrics.memory_table import MEMORY_FILE
from toolkit.parallel.distribute import Part
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.outline import Outline
from toolkit.parallel.passes import MicroBatch
from toolkit.rundir.files import write_json
from toolkit.train.loop.step import LossOf
from toolkit.train.memory.forecast import Forecast, forecast
from toolkit.train.memory.meter import PHASES, meter_of
from toolkit.train.memory.tier import file_buffer_bytes
from toolkit.world.facts import World

__all__ = ["MemoryProbe"]

_STATIC = ("parameters", "quantised weights", "optimizer state", "buffers")
_PARTS = (*_STATIC, "gradients", "activations", "communication", "temporary", "fragmentation")


class MemoryProbe:
    """The forecast of a rank, and its meter, which is the profile of the model."""

    def __init__(
        self, world: World, mesh: Mesh, config: ResolvedJob, outline: Outline, loss_of: LossOf, micro_batch: MicroBatch
    ) -> None:
        self.meter = meter_of(world.device)
        self._world, self._mesh, self._config = world, mesh, config
        self._outline, self._loss_of, self._micro_batch = outline, loss_of, micro_batch
        self._forecast, self._why_not = Forecast({}, {}), ""
        self._static: dict[str, int] = {}
        self._rest = 0

    def expect(self, part: Part) -> None:
        """Forecast the memory of the model, or of the only stage of this rank, which is still on the meta device."""
        given = (self._world, self._mesh, self._config, self._outline, self._loss_of, self._micro_batch)
        try:
            self._forecast = forecast(part, *given)
        except RuntimeError as error:
            self._why_not = first_line(error)
        gc.collect()
        measured = meter_of(self._world.device)  # without what the forecast has loaded
        self.meter.used, self.meter.peak = measured.used, measured.peak
        self.meter.model = part.module

    def after_step(self, model: nn.Module, parts: Callable[[], Mapping[str, int]]) -> None:
        """Drop what the first step of this attempt showed, in which the optimizer creates its state."""
        if self._static:
            return
        copies = self._mesh.sizes["replicate"] * self._mesh.sizes["cp"]
        in_buckets = copies == self._world.size > 1  # DDP keeps them between steps
        kept = self.meter.gradients if in_buckets else 0
        self.meter.begin()
        self._static = {name: size for name, size in parts().items() if name in _STATIC}
        if self._config.train.offload_to:
            kept += file_buffer_bytes(model.parameters())
        self._rest = self.meter.used() - sum(self._static.values()) - kept

    def write(self) -> None:
        """Write the report of all ranks. Collective."""
        world, train = self._world, self._config.train
        ranks = [None] * world.size if world.rank == 0 else None
        dist.gather_object(self._of_rank(), ranks)
        if ranks is not None and world.run_dir is not None:
            size, mesh = train.micro_batch or train.batch // self._mesh.data_size, dict(self._mesh.sizes)
            head = {"schema_version": 1, "torch": str(torch.__version__), "mesh": mesh, "micro_batch": size}
            write_json(world.run_dir / "metrics" / MEMORY_FILE, head | {"ranks": ranks})

    def _of_rank(self) -> dict[str, Any]:
        meter, expected, world = self.meter, self._forecast, self._world
        found = {**self._static}
        if meter.peaks:  # of a step after the first one
            found |= {"gradients": meter.gradients, "activations": meter.activations}
        found["fragmentation"] = self._rest
        if torch.device(world.device).type == "cuda":
            found["fragmentation"] = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
        return {
            "rank": world.rank, "host": world.host, "device": torch.device(world.device).type, "why_not": self._why_not,
            "peak": _both(max(expected.peaks.values(), default=None), max(meter.peaks.values(), default=None)),
            "phases": {name: _both(expected.peaks.get(name), meter.peaks.get(name)) for name in PHASES},
            "parts": {name: _both(expected.parts.get(name), found.get(name)) for name in _PARTS},
        }  # fmt: skip


def _both(predicted: int | None, measured: int | None) -> dict[str, int | None]:
    return {"predicted": predicted, "measured": measured}
