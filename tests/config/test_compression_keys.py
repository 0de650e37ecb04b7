"""The table [gradient_compression]: what it excludes is refused by name, with the reason, before a job starts."""

import pytest
import torch

from toolkit.comm.compression.reducer import GradientCompression
from toolkit.config.amend import amend_job, vary_job
from toolkit.config.document import Flag
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.config.layout_checks import check_layout
from toolkit.config.needs import NEEDS
from toolkit.config.request import resolve_job
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


def job(*settings: str, ranks: int = 4, site=None):
    settings = (f"job.ranks_per_node={ranks}", *settings)
    return resolve_job(shipped_jobs()["train_lm"], site=site, environ={}, settings=list(settings))


def compressed(algorithm: str, *settings: str, ranks: int = 4):
    return job(f"gradient_compression.algorithm={algorithm}", *settings, ranks=ranks)


REFUSED = [
    ("top_k", ["parallel.shard=4"], "gradient_compression.algorithm",
     "with shard = 4 FSDP2 scatters gradients, but top_k is an exchange of whole gradients"),
    ("int8", ["parallel.shard=4", "gradient_compression.error_feedback=on"], "gradient_compression.error_feedback",
     "error feedback requires whole gradients, but with shard = 4 FSDP2 scatters them"),
    ("int8", ["parallel.shard=4", "gradient_compression.dense_steps=9"], "gradient_compression.dense_steps", "no effect on the reduce-scatter"),
    ("int8", ["parallel.shard=2", "parallel.tp=2"], "gradient_compression.algorithm", "would round shared parameters differently"),
    ("int8", ["parallel.tp=4"], "gradient_compression.algorithm", "no two ranks have the same part of the model"),
    ("powersgd", ["parallel.tp=2"], "gradient_compression.algorithm", "powersgd factorises whole matrices, but with shard = 1 and tp = 2"),
    ("int8", ["parallel.tp=2", "parallel.gather_type=bf16"], "gradient_compression.algorithm", "belong to FSDP2"),
    ("bf16", ["parallel.shard=4", "parallel.reduce_type=bf16"], "gradient_compression.algorithm", "sends as few bytes as bf16"),
    ("auto", ["parallel.tp=2"], "gradient_compression.algorithm", "could choose different algorithms"),
    ("auto", ["gradient_compression.error_feedback=on"], "gradient_compression.error_feedback", "for `powersgd` only"),
    ("int8", ["parallel.shard=2", "parallel.cp=2"], "gradient_compression.algorithm", "cp = 2 averages gradients together with the shards"),
    ("int8", ["parallel.shard=2", "train.offload=gradients"], "gradient_compression.algorithm", "gradients that are offloaded"),
    ("int8", ["parallel.reduction=measured"], "gradient_compression.algorithm", 'reduction = "measured" sums gradients in steps'),
    ("int8", ["parallel.reduction=hierarchical", "job.nodes=2", "job.ranks_per_node=2"], "gradient_compression.algorithm",
     'reduction = "hierarchical" sums gradients in steps'),
    ("int8", ["train.lr_scaling=adaptive", "train.lr_reference_batch=8", "train.micro_batch=4"], "gradient_compression.algorithm",
     "AdaScale compares the gradients"),
    ("sign", ["gradient_compression.error_feedback=on"], "gradient_compression.error_feedback", '"sign" loses more than the gradient has'),
    ("terngrad", ["gradient_compression.error_feedback=on"], "gradient_compression.error_feedback", '"terngrad" loses more'),
    ("ef21", ["gradient_compression.error_feedback=off"], "gradient_compression.error_feedback", '"ef21" is itself a form of error feedback'),
    ("top_k", ["parallel.unused_parameters=true"], "gradient_compression.error_feedback", "parameters without a gradient"),
    ("top_k", ["gradient_compression.momentum=0.9"], "gradient_compression.momentum", 'got optimizer = "adamw" with momentum 0.9'),
    ("top_k", ["gradient_compression.momentum=0.9", "gradient_compression.error_feedback=off"], "gradient_compression.momentum",
     "which requires error feedback"),
    ("auto", ["parallel.unused_parameters=true"], "gradient_compression.policy", "error feedback of powersgd"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "settings", "place", "message"), REFUSED)
def test_combinations_that_cannot_work_are_refused(algorithm, settings, place, message):
    with pytest.raises(ToolkitError) as caught:
        check_layout(compressed(algorithm, *settings))
    assert message in caught.value.message
    assert place in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("int8", []), ("int8", ["parallel.unused_parameters=true"]), ("int4", ["gradient_compression.rounding=stochastic"]),
     ("int8", ["parallel.cp=2"]), ("int8", ["parallel.shard=4"]), ("top_k", ["parallel.shard=2"]), ("int8", ["parallel.tp=2"]),
     ("top_k", ["parallel.pp=2", "train.micro_batch=4"]), ("powersgd", ["parallel.pp=2", "train.micro_batch=4"]), ("powersgd", ["gradient_compression.rank=2"]), ("none", ["parallel.shard=4"]),
     ("top_k", ["gradient_compression.momentum=0.9", "train.optimizer=sgd", "train.momentum=0"]),
     ("int8", ["gradient_compression.error_feedback=on", "gradient_compression.residual_type=bf16"])],
)  # fmt: skip
def test_other_combinations_are_accepted(algorithm, settings):
    check_layout(compressed(algorithm, *settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=int8", "rank=2"], '2 has no effect with algorithm = "int8". Fix: set algorithm = "powersgd", or remove rank'),
        (["algorithm=int8", "policy=aggressive"], '"aggressive" has no effect with algorithm = "int8". Fix: set algorithm = "auto", or remove policy'),
        (["algorithm=natural", "block=64"], '64 has no effect with algorithm = "natural". Fix: set algorithm = "int8", or remove block'),
        (["algorithm=auto", "policy=conservative", "rank=2"], '2 has no effect with policy = "conservative". Fix: set policy = "aggressive", or remove rank'),
        (["algorithm=int8", "residual_type=bf16"], '"bf16" has no effect with algorithm = "int8". Fix: set error_feedback = "on", or remove residual_type'),
        (["algorithm=powersgd", "error_feedback=off", "residual_decay=0.5"],
         '0.5 has no effect with algorithm = "powersgd" and error_feedback = "off". Fix: set error_feedback = "on", or remove residual_decay'),
        (["algorithm=sign", "residual_decay=0.5"], '0.5 has no effect with algorithm = "sign". Fix: set algorithm = "powersgd", or remove residual_decay'),
        (["algorithm=int8", "residual_saved=exact"], '"exact" has no effect with algorithm = "int8". Fix: set algorithm = "powersgd", or remove residual_saved'),
        (["rank=8"], '8 has no effect with algorithm = "none". Fix: set algorithm, or remove rank'),
        (["error_feedback=on", "residual_type=bf16"], '"bf16" has no effect with algorithm = "none". Fix: set algorithm, or remove residual_type'),
    ],
)  # fmt: skip
def test_a_key_that_the_algorithm_does_not_use_is_refused(settings, message):
    with pytest.raises(ToolkitError) as refused:
        job(*(f"gradient_compression.{one}" for one in settings), site=load_site("local"))
    key = settings[-1].partition("=")[0]
    errors = [str(one) for one in (refused.value, *refused.value.others)]
    assert [one for one in errors if f"gradient_compression.{key}: {message}" in one] and len(errors) == len(
        set(errors)
    )


def test_every_key_needs_an_algorithm():
    needed = {key for need in NEEDS if need.table == "gradient_compression" for key in need.keys}
    assert needed == GradientCompressionTable.model_fields.keys() - {"algorithm"}


def test_another_algorithm_of_a_resume_takes_along_the_keys_of_the_one_before():
    site = load_site("local")

    def resumed(recorded, *settings: str):
        return amend_job(recorded, site=site, settings=[f"gradient_compression.{one}" for one in settings])

    first = compressed("powersgd", "gradient_compression.rank=8", "gradient_compression.residual_type=bf16")
    for name in ("int8", "none"):
        second = resumed(first, f"algorithm={name}")
        assert resumed(second, "dense_steps=0").gradient_compression.algorithm == name, "the next resume, too"
        assert next(vary_job(second, site, [{"train.lr": Flag(0.1, "test")}])).train.lr == 0.1
    with pytest.raises(ToolkitError, match='7 has no effect with algorithm = "int8"'):
        resumed(first, "algorithm=int8", "rank=7")


def test_the_momentum_of_the_algorithm_before_is_not_used():
    sgd = ("train.optimizer=sgd", "train.momentum=0", "gradient_compression.momentum=0.9")
    settings = ["gradient_compression.algorithm=int8"]
    amended = amend_job(compressed("top_k", *sgd), site=load_site("local"), settings=settings)
    table = amended.gradient_compression
    assert table.momentum == 0.9 and not GradientCompression(table, {"one": torch.zeros(64, 64)}).kept.kinds


def test_a_sweep_may_have_a_task_without_the_algorithm_of_its_keys():
    base = compressed("int8", "gradient_compression.block=64")
    rows = [{"gradient_compression.algorithm": Flag(name, "test")} for name in ("none", "int4")]
    tasks = list(vary_job(base, load_site("local"), rows))
    assert [one.gradient_compression.algorithm for one in tasks] == ["none", "int4"]


@pytest.mark.parametrize(
    ("setting", "fix"),
    [("algorithm=zip", 'use one of "none", "bf16"'), ("block=12", "a multiple of 8"), ("density=0", "more than 0"), ("levels=200", "at most 127"),
     ("residual_decay=1.5", "at most 1")],
)  # fmt: skip
def test_values_out_of_range_are_refused(setting, fix):
    with pytest.raises(ToolkitError) as caught:
        job(f"gradient_compression.{setting}")
    assert fix in caught.value.fix
