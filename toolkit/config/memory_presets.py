"""What `train.memory` sets, for jobs that do not set these keys themselves."""

from collections.abc import Collection
from typing import Any

from toolkit.config.train import ParallelTable, TrainTable

__all__ = ["preset_values"]

# By preset, from the fastest to the one that needs the least memory. `zero` applies with parallel.shard > 1.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "conservative": {"zero": 1},
    "balanced": {"zero": 2, "recompute": "selective"},
    "aggressive": {"zero": 3, "recompute": "every", "offload": ["optimizer"]},
    "extreme": {"zero": 3, "recompute": "every", "offload": ["optimizer", "gradients"], "micro_batch": 1},
}


def preset_values(
    train: TrainTable, parallel: ParallelTable, ranks: int, stated: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the values that the preset sets, by table; keys in `stated`, such as "train.recompute", override it.

    Settings that the layout of the job does not support are omitted.
    """
    values = dict(PRESETS[train.memory])
    if parallel.shard == 1:
        values.pop("zero", None)
    if values.get("recompute") == "selective" and parallel.pp > 1 and parallel.schedule == "zero_bubble":
        values["recompute"] = "every"
    reduces_at_once = (parallel.shard == 1 and ranks > 1) or max(parallel.tp, parallel.pp) > 1
    needs_all = train.precision == "fp16" or train.lr_scaling == "adaptive"
    if "offload" in values and (reduces_at_once or needs_all):
        values["offload"] = [part for part in values["offload"] if part != "gradients"]
    if parallel.pp > 1:  # the number of micro-batches must fit the schedule
        values.pop("micro_batch", None)
    of_parallel = {"zero": values.pop("zero")} if "zero" in values else {}
    tables = {"train": values, "parallel": of_parallel}
    return {
        table: {key: value for key, value in found.items() if f"{table}.{key}" not in stated}
        for table, found in tables.items()
    }
