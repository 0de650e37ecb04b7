"""The presets of memory: what they set, what wins over them, and where their values come from."""

from __future__ import annotations

import pytest

from toolkit.config.document import Flag
from toolkit.config.memory_presets import preset_values
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.config.train import ParallelTable, TrainTable

PRESETS = TrainTable.model_fields["memory"].annotation.__args__


def resolved(ranks: int = 2, **keys: object):
    flags = {"job.ranks_per_node": Flag(ranks, "-n")} | {
        name.replace("__", "."): Flag(value, "--set") for name, value in keys.items()
    }
    return resolve_job(shipped_jobs()["train_lm"], site=None, environ={}, flags=flags)


@pytest.mark.parametrize("memory", PRESETS)
@pytest.mark.parametrize(
    "layout",
    [{"ranks": 1}, {"ranks": 2}, {"ranks": 2, "parallel__shard": 2}, {"ranks": 2, "parallel__tp": 2},
     {"ranks": 2, "parallel__pp": 2}, {"ranks": 2, "parallel__pp": 2, "parallel__schedule": "zero_bubble"},
     {"ranks": 1, "train__precision": "fp16"}],
    ids=str,
)  # fmt: skip
def test_every_preset_fits_every_layout(memory, layout):
    job = resolved(train__memory=memory, **layout)
    assert job.train.memory == memory
    if memory == "none":
        assert (job.train.recompute, job.train.offloaded) == ("none", frozenset())


def test_the_values_of_a_preset_and_where_they_come_from():
    job = resolved(train__memory="extreme", parallel__shard=2)
    assert (job.parallel.zero, job.train.recompute) == (3, "every")
    assert job.train.micro_batch == 2, "that of train_lm.toml"
    assert job.train.offloaded == {"optimizer", "gradients"}
    for key in ("parallel.zero", "train.recompute", "train.offload"):
        assert job.origin(key).detail == 'train.memory = "extreme"'


def test_keys_of_the_job_win():
    job = resolved(train__memory="aggressive", parallel__shard=2, parallel__zero=1, train__recompute="none")
    assert (job.parallel.zero, job.train.recompute) == (1, "none")
    assert job.train.offloaded == {"optimizer"}


def test_without_one_of_its_own_the_job_gets_the_micro_batch_of_the_preset():
    train, parallel = TrainTable(memory="extreme"), ParallelTable(shard=2)
    assert preset_values(train, parallel, 2, ())["train"]["micro_batch"] == 1
    assert "micro_batch" not in preset_values(train, ParallelTable(pp=2), 2, ())["train"], "it may not fit the schedule"


def test_replicas_keep_their_gradients():
    assert resolved(train__memory="extreme").train.offloaded == {"optimizer"}


def test_config_show_names_the_preset(toolkit):
    said = toolkit.ok("config", "show", "train_lm", "--origin", "--set", "train.memory=balanced", "--site", "local")
    (line,) = [line for line in said.splitlines() if "recompute " in line]
    assert '"selective"' in line and 'train.memory = "balanced"' in line
