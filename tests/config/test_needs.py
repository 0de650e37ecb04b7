"""Keys that would be taken and do nothing are refused with the key that they need; a flag takes along what it turns off."""

from __future__ import annotations

import pytest

from toolkit.config.amend import amend_job
from toolkit.config.needs import NEEDS
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


@pytest.fixture
def resolve_here(resolve):
    """Resolve a job of eight ranks on this machine with the lines of further tables, settings and variables."""

    def with_tables(more: str, *settings: str, **variables: str) -> ResolvedJob:
        return resolve("ranks_per_node = 8", more, site=load_site("local"), settings=settings, environ=variables)

    return with_tables


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "[train]\nlr_reference_batch = 32",
            'train.lr_reference_batch: 32 has no effect with lr_scaling = "none". '
            'Fix: set lr_scaling = "linear", or remove lr_reference_batch',
        ),
        (
            "[train]\nrecompute_every = 2",
            'train.recompute_every: 2 has no effect with recompute = "none". '
            'Fix: set recompute = "every", or remove recompute_every',
        ),
        ("[train]\nmin_lr_ratio = 0.0\nschedule = 'constant'", 'has no effect with schedule = "constant". Fix: set schedule = "cosine"'),
        ("[train]\nmomentum = 0.95", 'train.momentum: 0.95 has no effect with optimizer = "adamw". Fix: set optimizer = "sgd" or "muon"'),
        ("[train]\nbetas = [0.8, 0.9]\noptimizer = 'sgd'", 'train.betas: [0.8, 0.9] has no effect with optimizer = "sgd"'),
        ("[train]\nguard_window = 32", 'train.guard_window: 32 has no effect with guard = "off". Fix: set guard = "skip" or "roll_back"'),
        ("[train]\nprofile_from = 3", "train.profile_from: 3 has no effect with profile_steps = 0. Fix: set profile_steps, or"),
        ("[parallel]\nsequence = true", "parallel.sequence: true has no effect with tp = 1. Fix: set tp = 2 or more, or remove sequence"),
        ("[parallel]\nstages_per_rank = 3", "parallel.stages_per_rank: 3 has no effect with pp = 1. Fix: set pp = 2 or more"),
        ('[parallel]\nschedule = "interleaved"', 'parallel.schedule: "interleaved" has no effect with pp = 1'),
        ('[parallel]\nreduce_type = "fp32"', 'parallel.reduce_type: "fp32" has no effect with shard = 1 and tp = 1 and pp = 1. Fix: set shard = 2'),
        ('[parallel]\nshard = 2\nbucket_mb = "measured"', 'parallel.bucket_mb: "measured" has no effect with shard = 2. Fix: set shard = 1'),
        ('[parallel]\ntp = 2\nreduction = "flat"', 'parallel.reduction: "flat" has no effect with tp = 2. Fix: set tp = 1'),
        ("[data]\nworkers = 0\nprefetch = 4", 'data.prefetch: 4 has no effect with workers = 0. Fix: set workers = "auto"'),
        ("[data]\nbroken_limit = 0.5", 'data.broken_limit: 0.5 has no effect with broken = "fail". Fix: set broken = "skip"'),
    ],
)  # fmt: skip
def test_a_key_without_what_it_needs_is_refused_where_it_stands(resolve_here, more, said):
    with pytest.raises(ToolkitError) as refused:
        resolve_here(more)
    assert said in str(refused.value) and "job.toml:" in refused.value.where


def test_all_of_them_are_said_at_once(resolve_here):
    with pytest.raises(ToolkitError) as refused:
        resolve_here("[train]\nguard_limit = 3\nrecompute_above_mb = 1.0\n[data]\nbroken_limit = 0.5")
    said = [one.where.rpartition(":")[2] for one in (refused.value, *refused.value.others)]
    assert said == ["train.recompute_above_mb", "train.guard_limit", "data.broken_limit"]


@pytest.mark.parametrize(
    "more",
    [
        '[train]\nlr_scaling = "linear"\nlr_reference_batch = 32\nrecompute = "every"\nrecompute_every = 2\nguard = "skip"\nguard_limit = 3',
        "[train]\nrecompute_every = 1\nguard_window = 64\n[parallel]\nsequence = false\n[data]\nprefetch = 2",
        '[parallel]\ntp = 2\nsequence = true\nwrap = "size"\nwrap_parameters = 10\ngather_type = "bf16"',
        '[parallel]\nshard = 8\nreduction = "flat"',
        "[parallel]\nbucket_mb = 10\nunused_parameters = true",
    ],
)  # fmt: skip
def test_with_what_it_needs_or_as_the_default_written_out_it_is_taken(resolve_here, more):
    resolve_here(more)


def test_a_higher_layer_takes_along_what_needs_the_value_that_it_sets(resolve_here):
    file = '[train]\nguard = "skip"\nguard_window = 32\n[parallel]\ntp = 2\nsequence = true'
    resolve_here(file, "train.guard=off", "parallel.tp=1")
    resolve_here(file, TOOLKIT_TRAIN_GUARD="off")
    with pytest.raises(
        ToolkitError, match=r"--set train.guard_window=16:train.guard_window: 16 has no effect with guard"
    ):
        resolve_here(file, "train.guard_window=16", TOOLKIT_TRAIN_GUARD="off")


def test_every_need_is_of_keys_that_are_there_and_is_unmet_by_some_default_or_met(resolve_here):
    job = resolve_here("")
    for need in NEEDS:
        table = getattr(job, need.table)
        assert {*need.keys, *need.others} <= set(type(table).model_fields)
        assert isinstance(need.met(table), bool)


def test_what_a_resume_turns_off_takes_along_what_an_earlier_start_set(resolve_here):
    site = load_site("local")
    first = resolve_here("", "train.early_stop_patience=1", "train.early_stop_min_delta=5", "train.validate_every=1")
    assert amend_job(first, site=site, settings=["train.early_stop_patience=0"]).train.early_stop_patience == 0
    with pytest.raises(ToolkitError, match=r"6\.0 has no effect with early_stop_patience = 0"):
        amend_job(first, site=site, settings=["train.early_stop_patience=0", "train.early_stop_min_delta=6"])
