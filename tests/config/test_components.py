"""Heterogeneous jobs: what each component has of its own, of [job] and of its partition, and what cannot be one."""

from __future__ import annotations

import re

import pytest

from toolkit.config.amend import amend_job
from toolkit.config.document import Flag
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site

TWO = """
[[component]]
ranks_per_node = 1
cpus_per_rank = 8
partition = "cpu"
[[component]]
nodes = 3
"""
JOB = 'account = "a"\nmem_gb_per_node = 16'


def test_a_component_has_its_own_values_then_those_of_job_then_those_of_its_partition(resolve, site) -> None:
    leader, other = resolve(JOB, TWO, site=site).components
    assert (leader.job.partition, leader.job.gpus_per_node, leader.job.ranks_per_node) == ("cpu", 0, 1)
    assert (leader.job.cpus_per_rank, leader.job.mem_gb_per_node, leader.job.constraint) == (8, 16, "")
    assert (other.job.partition, other.job.gpus_per_node, other.job.ranks_per_node) == ("gpu", 4, 4)
    assert (other.job.nodes, other.job.cpus_per_rank, other.job.constraint) == (3, 16, "a100")


def test_its_ranks_and_nodes_are_summed(resolve, site) -> None:
    job = resolve(JOB, TWO, site=site)
    assert (job.nodes, list(job.rank_counts)) == (4, [13])
    assert [one.job.nodes for one in job.components] == [1, 3]


def test_a_job_without_components_is_its_own_only_one(resolve, site) -> None:
    job = resolve('account = "a"\nnodes = "2-4"', site=site)
    assert job.components == (job,)
    assert (job.nodes, list(job.rank_counts)) == ("2-4", [8, 12, 16])


def test_what_is_wrong_is_told_with_the_component_and_its_line(resolve, site) -> None:
    with pytest.raises(
        ToolkitError, match=r"job\.toml:11:component\[1\]\.nodes: 9 nodes, but partition gpu .* at most 8"
    ):
        resolve(JOB, TWO.replace("3", "9"), site=site)
    with pytest.raises(ToolkitError, match=r"job\.toml:8:component\[0\]\.cpus_per_rank: 0 is rejected"):
        resolve(JOB, TWO.replace("8", "0"), site=site)
    with pytest.raises(ToolkitError, match=r"job\.toml:11:component\[1\]\.node: unknown key 'node'.*write 'nodes'"):
        resolve(JOB, TWO.replace("nodes", "node"), site=site)


@pytest.mark.parametrize(
    ("keys", "more", "message"),
    [
        (
            'nodes = "2-4"',
            TWO,
            r"job\.toml:5:job\.nodes: expected one number of nodes for component\[0\], got the range 2-4",
        ),
        ('array = "0-3"', TWO, "Slurm does not support arrays of heterogeneous jobs"),
        ("repeat = 3", TWO, "repeated jobs are submitted as an array"),
        ('nodelist = "n1"', TWO, "a node can be in only one component"),
        (
            "",
            TWO + '[parallel]\nreduction = "hierarchical"',
            "with equal numbers on each, got 4 nodes with 1 rank or 4 ranks each",
        ),
        ("", TWO + "[parallel]\nshard = 4", r"= 4 does not divide 13 ranks \(1 x 1 \+ 3 x 4\)"),
        ('sbatch = ["hetjob"]', "", r"'hetjob' is rejected: the components .* are tables .*write a \[\[component\]\]"),
        ('sbatch = ["-N1 : -N2"]', "", "is rejected: the components"),
        ("", "[component]\nnodes = 2", r"component: .* use tables \[\[component\]\]"),
        ("", "[components]\nnodes = 2", "'components' is not a valid key: the components of a heterogeneous job"),
        ("", TWO + 'sbatch = ["-N2"]', r"component\[1\]\.sbatch: '-N2' would override"),
    ],
)
def test_what_cannot_be_one(resolve, site, keys: str, more: str, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        resolve(f"{JOB}\n{keys}", more, site=site)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "job.nodes",
            "4",
            r"-N 4:job\.nodes: cannot set nodes for the 2 components of a heterogeneous job.*set component\[1\]\.nodes",
        ),
        ("job.ranks_per_node", 2, "cannot set ranks_per_node for the . components"),
        ("job.partition", "gpu", r"set component\[0\]\.partition"),
    ],
)
def test_a_flag_that_no_component_would_hear_is_refused(resolve, site, key: str, value: object, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        resolve(JOB, TWO, site=site, flags={key: Flag(value, "-N")})


def test_a_flag_for_what_job_says_is_heard(resolve, site) -> None:
    job = resolve(JOB, TWO, site=site, flags={"job.account": Flag("b", "-A")})
    assert {one.job.account for one in job.components} == {"b"}
    with pytest.raises(ToolkitError, match=r"the tables \[\[component\]\] can only be set in the job file"):
        resolve(JOB, TWO, site=site, settings=["component.nodes=2"])


def test_there_is_no_heterogeneous_job_without_slurm(resolve) -> None:
    with pytest.raises(ToolkitError, match=r"job\.toml:\d+:component: site local has no scheduler"):
        resolve(JOB, TWO, site=load_site("local"))


def test_a_record_gives_the_same_components_and_a_resume_keeps_them(resolve, site) -> None:
    job = resolve(JOB, TWO, site=site)
    again = ResolvedJob.from_json(job.to_json())
    assert again.components == job.components
    amended = amend_job(again, site=site, settings=["train.steps=7"])
    assert [one.job for one in amended.components] == [one.job for one in job.components]
    with pytest.raises(ToolkitError, match=re.escape("component[1].nodes")):
        amend_job(again, site=site, flags={"job.nodes": Flag(2, "-N")})
    place = amended.components[1].origin("job.nodes").place("job.nodes")
    assert place.endswith("job.toml:11:component[1].nodes")
