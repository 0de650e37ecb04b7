"""The shipped training job on every layout of ranks, compared with one process: its losses, gradients and parameters."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import launch

from toolkit.checkpoint.contents.differences import tensor_differences
from toolkit.checkpoint.contents.stored_tensors import StoredTensors
from toolkit.checkpoint.format.manifest_file import read_manifest
from toolkit.config.document import Flag
from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.metrics.training import read_train_log

STEPS, CUT = 6, 3
# Of the sample that `make test` runs. A mistake shows in the first step, or in the second, which moments begin with.
SAMPLED_STEPS, SAMPLED_CUT = 3, 2
MODEL = {"layers": 4, "width": 32, "heads": 4, "context": 16, "dropout": 0.0, "max_bytes": 100_000}
TRAIN = {
    "steps": STEPS,
    "batch": 16,
    "micro_batch": 2,
    "lr": 3e-3,
    "warmup_steps": 2,
    "schedule": "constant",
    "seed": 7,
}
# Of float32, where sums are taken in another order; of bfloat16, whose epsilon is 65536 times as large; of gradients that
# are exchanged in 8 bits, which differ by 1 %, and whose small numbers AdamW makes large in its first steps.
BOUND, BOUND_BF16, BOUND_INT8 = 2e-5, 2e-2, 5e-2
# Blocks of FSDP2's units have small gradients of queries and keys beside large ones; AdamW takes full steps along their rounding.
BOUND_INT8_SHARDS = 2e-1


# Of train_moe, in addition.
EXPERTS = {"experts": 8, "expert_hidden": 32, "z_loss": 0.01}


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and their table [parallel]. With `has_experts`, the job is train_moe, not train_lm.

    With `is_compressed`, gradients are exchanged as int8.
    """

    name: str
    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    is_compressed: bool = False


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("replicate 2", 2),
        Layout("replicate 4", 4),
        Layout("replicate 8", 8),
        *(
            Layout(f"shard {ranks} zero {zero}", ranks, {"shard": ranks, "zero": zero})
            for ranks in (2, 4, 8)
            for zero in (1, 2, 3)
        ),
        Layout("shard 3 zero 3", 3, {"shard": 3}),
        Layout("shard 4 by size", 4, {"shard": 4, "wrap": "size", "wrap_parameters": 4000}),
        *(
            Layout(f"replicate {copies} x shard {shard} zero {zero}", copies * shard, {"shard": shard, "zero": zero})
            for copies, shard in ((2, 2), (2, 4), (4, 2))
            for zero in (1, 2, 3)
        ),
        Layout("tp 2", 2, {"tp": 2}),
        Layout("tp 4", 4, {"tp": 4}),
        Layout("tp 2, sequence", 2, {"tp": 2, "sequence": True}),
        Layout("tp 4, sequence", 4, {"tp": 4, "sequence": True}),
        Layout("replicate 2 x tp 2", 4, {"tp": 2}),
        Layout("replicate 2 x tp 4, sequence", 8, {"tp": 4, "sequence": True}),
        *(Layout(f"shard 2 zero {zero} x tp 2", 4, {"shard": 2, "zero": zero, "tp": 2}) for zero in (1, 2, 3)),
        Layout("replicate 2 x shard 2 zero 3 x tp 2, sequence", 8, {"shard": 2, "tp": 2, "sequence": True}),
        *(
            Layout(f"pp {ranks} {schedule}", ranks, {"pp": ranks, "schedule": schedule})
            for ranks, schedule in (
                (2, "gpipe"),
                (2, "1f1b"),
                (2, "interleaved"),
                (2, "zero_bubble"),
                (4, "1f1b"),
                (4, "gpipe"),
            )
        ),
        Layout("pp 2 x replicate 2", 4, {"pp": 2}),
        Layout("pp 4 x replicate 2", 8, {"pp": 4}),
        Layout("pp 2 interleaved x replicate 2", 4, {"pp": 2, "schedule": "interleaved"}),
        *(Layout(f"pp 2 x shard 2 zero {zero}", 4, {"pp": 2, "shard": 2, "zero": zero}) for zero in (1, 2, 3)),
        Layout("pp 2 x replicate 2 x shard 2 zero 3", 8, {"pp": 2, "shard": 2}),
        Layout("pp 2 x tp 2", 4, {"pp": 2, "tp": 2}),
        Layout("pp 2 x tp 2, sequence", 4, {"pp": 2, "tp": 2, "sequence": True}),
        Layout("pp 2 x replicate 2 x tp 2", 8, {"pp": 2, "tp": 2}),
        Layout("pp 2 x shard 2 zero 3 x tp 2", 8, {"pp": 2, "shard": 2, "tp": 2}),
        Layout(
            "pp 2 zero_bubble x shard 2 zero 1 x tp 2",
            8,
            {"pp": 2, "shard": 2, "zero": 1, "tp": 2, "schedule": "zero_bubble"},
        ),
        Layout("pp 2 x tp 2, untied", 4, {"pp": 2, "tp": 2}, {"tied": False}),
        *(
            Layout(f"cp {ranks} {method}", ranks, {"cp": ranks, "context": method})
            for ranks in (2, 4)
            for method in ("ring", "heads")
        ),
        Layout("replicate 2 x cp 2 ring", 4, {"cp": 2, "context": "ring"}),
        *(
            Layout(f"shard 2 zero {zero} x cp 2 ring", 4, {"shard": 2, "zero": zero, "cp": 2, "context": "ring"})
            for zero in (1, 2, 3)
        ),
        Layout("replicate 2 x shard 2 zero 3 x cp 2 heads", 8, {"shard": 2, "cp": 2}),
        Layout("cp 2 heads x tp 2", 4, {"cp": 2, "tp": 2}),
        Layout("cp 2 ring x tp 4", 8, {"cp": 2, "tp": 4}),
        Layout("cp 2 ring x tp 2, sequence", 4, {"cp": 2, "tp": 2, "sequence": True, "context": "ring"}),
        Layout("pp 2 x cp 2 ring", 4, {"pp": 2, "cp": 2, "context": "ring"}),
        Layout("pp 2 interleaved x cp 2 heads", 4, {"pp": 2, "cp": 2, "schedule": "interleaved"}),
        Layout("pp 2 x shard 2 zero 3 x cp 2 ring", 8, {"pp": 2, "shard": 2, "cp": 2, "context": "ring"}),
        Layout("pp 2 x cp 2 ring x tp 2", 8, {"pp": 2, "cp": 2, "tp": 2, "context": "ring"}),
        *(
            Layout(f"{name} x ep {parallel['ep']}", ranks, parallel, has_experts=True)
            for name, ranks, parallel in (
                ("shard 2", 2, {"shard": 2, "ep": 2}),
                ("shard 4 zero 1", 4, {"shard": 4, "ep": 4, "zero": 1}),
                ("replicate 2 x shard 2", 4, {"shard": 2, "ep": 2}),
                ("cp 2 ring", 2, {"cp": 2, "ep": 2, "context": "ring"}),
                ("shard 2 x cp 2 heads", 4, {"shard": 2, "cp": 2, "ep": 4}),
                ("shard 2 x tp 2", 4, {"shard": 2, "ep": 2, "tp": 2}),
                ("pp 2 x shard 2", 4, {"pp": 2, "shard": 2, "ep": 2}),
                ("pp 2 x cp 2 ring", 4, {"pp": 2, "cp": 2, "ep": 2, "context": "ring"}),
            )
        ),
        *(
            Layout(f"{name}, int8", ranks, parallel, is_compressed=True)
            for name, ranks, parallel in (
                ("replicate 2", 2, {}),
                ("replicate 4", 4, {}),
                ("shard 2 zero 1", 2, {"shard": 2, "zero": 1}),
                ("shard 2 zero 3", 2, {"shard": 2}),
                ("replicate 2 x shard 2 zero 3", 4, {"shard": 2}),
                ("replicate 2 x tp 2", 4, {"tp": 2}),
                ("pp 2 x replicate 2", 4, {"pp": 2}),
            )
        ),
    )
}

# What a layout is tried with, beside the losses and parameters of plain steps: overrides of [train].
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one pass": {"micro_batch": 0},
    "clipped": {"clip_norm": 0.05},
    "bf16": {"precision": "bf16"},
    "recomputed": {"recompute": "every"},
    "compiled": {"compile": True, "recompute": "every"},
}


def variants_of(layout: Layout) -> list[str]:
    """A pipeline has no steps of one micro-batch; tp, pp and cp part the graphs of torch.compile.

    In bf16, tokens at the edge of a choice take another expert, whose gradients then differ by more than rounding. What
    compression adds to a layout does not depend on the computation.
    """
    left_out = {"pp": ("one pass", "compiled"), "tp": ("compiled",), "cp": ("compiled",), "ep": ("bf16",)}
    here = [name for name in VARIANTS if not any(name in left_out.get(key, ()) for key in layout.parallel)]
    return [name for name in here if not layout.is_compressed or name in ("plain", "one pass")]


def compared_with(variant: str) -> str:
    """The variant that one process runs, with which this one is compared: compiled blocks with those that are not."""
    return "plain" if variant == "compiled" or variant not in VARIANTS else variant


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of a loss, of a gradient's norm, and of a tensor of the model after the last step.

    A tensor's is the norm of the difference over its own norm.
    """

    loss: float
    gradient: float
    parameter: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameter)


def job_of(layout: Layout, **train: Any) -> ResolvedJob:
    tables = {
        "train": TRAIN | train,
        "args": MODEL | (EXPERTS if layout.has_experts else {}) | layout.args,
        "parallel": layout.parallel,
        "checkpoint": {"every_steps": 100, "keep_last": 10},
        "gradient_compression": {"algorithm": "int8", "min_elements": 512} if layout.is_compressed else {},
    }
    flags = {f"{table}.{key}": Flag(value, "test") for table, keys in tables.items() for key, value in keys.items()}
    flags["job.ranks_per_node"] = Flag(layout.ranks, "test")
    return resolve_job(
        shipped_jobs()["train_moe" if layout.has_experts else "train_lm"], site=None, environ={}, flags=flags
    )


def train(world: Any, config: ResolvedJob) -> None:
    from toolkit.jobs import train_lm, train_moe

    (train_moe if "experts" in config.args else train_lm).main(world, config)


def run(layout: Layout, run_dir: Path, attempt: int = 0, **settings: Any) -> Path:
    """Train to the last step, from the newest checkpoint in `run_dir` where there is one; returns `run_dir`."""
    launch(train, layout.ranks, run_dir, job_of(layout, **settings), attempt=attempt, timeout_s=240)
    return run_dir


def run_in_two(first: Layout, then: Layout, run_dir: Path, cut: int = CUT, **settings: Any) -> Path:
    """The first `cut` steps on one layout, the others on another, or on the same."""
    run(first, run_dir, **settings | {"steps": cut})
    return run(then, run_dir, attempt=1, **settings)


def difference(found: Path, wanted: Path, steps: int = STEPS) -> Difference:
    """Between two runs of the same `steps`."""
    of_losses, of_norms = 0.0, 0.0
    records = {folder: list(read_train_log(folder / "metrics" / "train.jsonl")) for folder in (found, wanted)}
    assert [record.step for record in records[found]] == list(range(1, steps + 1)), "every step is recorded once"
    for one, other in zip(records[found], records[wanted], strict=True):
        of_losses = max(of_losses, abs(one.loss - other.loss) / abs(other.loss))
        of_norms = max(of_norms, abs(one.grad_norm - other.grad_norm) / other.grad_norm)
    return Difference(of_losses, of_norms, _of_parameters(found, wanted, steps))


def _of_parameters(found: Path, wanted: Path, steps: int) -> float:
    with stored(found, steps) as a, stored(wanted, steps) as b:
        keys = sorted(key for key in a.manifest.tensors.keys() | b.manifest.tensors.keys() if key.startswith("model."))
        assert keys, "the checkpoint has a model"
        largest = 0.0
        for one in tensor_differences(a, b, keys):
            assert one.what == "values" and one.numbers is not None, f"{one.key}: {one.what}"
            largest = max(largest, one.numbers.relative_norm)
    return largest


def stored(run_dir: Path, step: int) -> StoredTensors:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    return StoredTensors(folder, read_manifest(folder))


def bound_of(variant: str, layout: Layout) -> float:
    """The largest difference that a run of this variant may show."""
    if layout.is_compressed:
        return BOUND_INT8_SHARDS if layout.parallel.get("shard") == layout.ranks else BOUND_INT8
    return BOUND_BF16 if VARIANTS.get(variant, {}).get("precision") == "bf16" else BOUND


def forget(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
