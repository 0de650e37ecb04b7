"""The size that toolkit found for `train.micro_batch = "auto"`, in a file of the run, with the layout that it is for."""

from pathlib import Path
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json

__all__ = ["layout_of", "with_found_micro_batch"]

_OF_MEMORY = (
    "batch", "optimizer", "precision", "recompute", "recompute_every", "recompute_above_mb", "activation_budget_gb", "offload",
    "offload_to", "offload_activations_as", "compile", "compile_mode", "channels_last", "average_decay",
)  # fmt: skip


def layout_of(job: ResolvedJob) -> dict[str, Any]:
    """Return what the size depends on: ranks, mesh, data types, model."""
    train = job.train.model_dump(mode="json")
    tables = {"parallel": job.parallel.model_dump(mode="json"), "train": {name: train[name] for name in _OF_MEMORY}}
    others = {"args": job.args, "adapters": job.adapters.model_dump(mode="json")}
    if job.gradient_compression.algorithm != "none":
        others["gradient_compression"] = job.gradient_compression.model_dump(mode="json")
    if job.local_sgd.algorithm != "none":
        others["local_sgd"] = job.local_sgd.model_dump(mode="json")
    return {"ranks": list(job.rank_counts), **tables, **others}


def with_found_micro_batch(job: ResolvedJob, file: Path | None) -> ResolvedJob:
    """Return the job with the size in the file in place of "auto".

    Raises:
        ToolkitError: the file has no size for the layout of the job.
    """
    if not job.train.is_auto:
        return job
    found = read_json(file) if file is not None and file.exists() else {}
    if found.get("layout") != layout_of(job):
        raise ToolkitError(
            f"toolkit has found no micro-batch for this {'layout' if found else 'run'}", where='train.micro_batch = "auto"',
            fix="start it with `toolkit run` or `toolkit resume --here`, on Slurm in an allocation, or set a number",
        )  # fmt: skip
    return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": found["micro_batch"]})})
