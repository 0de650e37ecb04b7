"""A resume changes some values of a recorded job; the rest stays, and what followed follows anew."""

import pytest

from toolkit.config.amend import amend_job, move_job
from toolkit.config.document import Flag, Origin
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


def test_a_resume_on_another_shape(resolve, site):
    recorded = resolve('account = "a"\nnodes = 2', "[train]\nbatch = 64\n[args]\nwidth = 8", site=site)
    amended = amend_job(recorded, site=site, settings=["args.depth=3"], flags={"job.nodes": Flag(4, "-N")})
    assert (amended.job.nodes, amended.args) == (4, {"width": 8, "depth": 3})
    assert amended.origin("job.nodes") == Origin("flag", "-N 4")
    assert amended.train == recorded.train
    assert amend_job(recorded, site=site) == recorded


def test_tables_that_were_set_as_one_stay(resolve, site):
    recorded = resolve('account = "a"', site=site)
    whole = amend_job(recorded, site=site, settings=['env.vars={A="1", B="2"}'])
    again = amend_job(whole, site=site, settings=["env.vars.B=3"])
    assert again.env.vars == {"A": "1", "B": "3"}
    assert amend_job(again, site=site).env.vars == again.env.vars


def test_what_followed_from_the_partition_follows_anew(resolve, site):
    recorded = resolve('account = "a"', site=site)
    assert (recorded.job.qos, recorded.job.ranks_per_node) == ("regular", 4)
    amended = amend_job(recorded, site=site, flags={"job.partition": Flag("cpu", "-p")})
    assert (amended.job.qos, amended.job.gpus_per_node, amended.job.ranks_per_node) == ("", 0, 1)
    assert amended.partition_limits == site.partitions["cpu"]
    assert amended.job.name == "job"
    sharded = resolve('account = "a"', "[parallel]\nshard = 4", site=site)
    assert (sharded.parallel.zero, amend_job(sharded, site=site, settings=["parallel.shard=1"]).parallel.zero) == (3, 0)


def test_a_job_of_another_site_has_what_that_site_says_and_keeps_its_own(resolve, site):
    local = load_site("local")
    recorded = resolve('account = "a"\nnodes = 1', "[train]\nsteps = 9", site=site)
    moved = amend_job(move_job(recorded, local, {}), site=local)
    wanted = resolve('account = "a"\nnodes = 1', "[train]\nsteps = 9", site=local)
    assert moved == wanted
    assert amend_job(move_job(moved, site, {}), site=site) == recorded


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"job.nodes": Flag("x", "-N")}, "-N x:job.nodes: expected a number or a range of nodes, got 'x'. Fix: "),
        ({"job.nodes": Flag(9, "-N")}, "-N 9:job.nodes: 9 nodes, but partition gpu of cluster allows at most 8. "),
        ({"job.nodes": Flag(3, "-N")}, "samples is not divisible by 12 data ranks. Fix: set batch = 60 or 72"),
    ],
)
def test_a_shape_that_cannot_be(resolve, site, flags, message):
    recorded = resolve('account = "a"', "[train]\nbatch = 64", site=site)
    with pytest.raises(ToolkitError) as caught:
        amend_job(recorded, site=site, flags=flags)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["checkpoint.source", "adapters.base"])
def test_a_path_of_a_resume_is_relative_to_the_current_folder(resolve, site, tmp_path, monkeypatch, key):
    recorded = resolve('account = "a"', site=site)
    monkeypatch.chdir(tmp_path)
    rank = ["adapters.rank=2"] if key == "adapters.base" else []
    table, name = key.split(".")
    amended = amend_job(recorded, site=site, settings=[f"{key}=other/step-00000001", *rank])
    assert getattr(getattr(amended, table), name) == str(tmp_path / "other" / "step-00000001")
