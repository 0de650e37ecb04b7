"""Adapters on every layout train as those of one process do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import launch
from parity import BOUND, LAYOUTS, MODEL, SAMPLED_CUT, SAMPLED_STEPS, Layout, difference, job_of, train

from toolkit.config.document import Flag
from toolkit.config.resolved import ResolvedJob

RANK = {"rank": 4, "alpha": 8.0, "dropout": 0.0}
QUANTISED = RANK | {"quantize": "nf4", "double_quantization": True}
WHOLE = RANK | {"rank_stabilized": True, "targets": ["attention_out", "perceptron_*"], "modules_to_save": ["norm"]}


def adapted(layout: Layout, adapters: dict[str, Any], **settings: Any) -> ResolvedJob:
    job = job_of(layout, **{"steps": SAMPLED_STEPS} | settings)
    return job.model_copy(update={"adapters": job.adapters.model_copy(update=adapters)})


def run(layout: Layout, run_dir: Path, adapters: dict[str, Any], attempt: int = 0, **settings: Any) -> Path:
    launch(train, layout.ranks, run_dir, adapted(layout, adapters, **settings), attempt=attempt, timeout_s=240)
    return run_dir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """The run of one process, made once for each table [adapters]."""
    folder = tmp_path_factory.mktemp("alone")
    made: dict[str, Path] = {}

    def run_alone(adapters: dict[str, Any], **settings: Any) -> Path:
        key = repr((adapters, settings))
        if key not in made:
            made[key] = run(Layout("alone", 1), folder / str(len(made)), adapters, **settings)
        return made[key]

    return run_alone
