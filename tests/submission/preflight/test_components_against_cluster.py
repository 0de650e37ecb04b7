"""A heterogeneous job against a cluster: each component by itself, and all of them together."""

from __future__ import annotations

import pytest

from toolkit.runs.record.job import request_of
from toolkit.submission.preflight.nodes import against_nodes
from toolkit.submission.preflight.shape import check_dependency, check_sums

TWO = "[[component]]\nnodes = 2\n[[component]]\nnodes = {}\n"


def test_a_component_that_no_node_can_hold_is_named(resolved, cluster) -> None:
    job = resolved("", TWO.format(1) + "cpus_per_rank = 9\n")
    first, second = [list(against_nodes(one, request_of(one), cluster())) for one in job.components]
    assert first == []
    assert [one.where.rpartition("/")[2] for one in second] == ["work.toml:8:component[1].cpus_per_rank"]


@pytest.mark.parametrize(("nodes", "refused"), [(2, False), (3, True)])
def test_components_of_one_partition_need_its_nodes_together(resolved, cluster, nodes: int, refused: bool) -> None:
    job = resolved("", TWO.format(nodes))
    found = list(check_sums(job, [request_of(one) for one in job.components], cluster()))
    said = ["2 + 3 = 5 nodes in partition main, which has 4: components cannot share nodes"] if refused else []
    assert [one.what for one in found] == said
    assert all(one.where.endswith("work.toml:7:component[1].nodes") for one in found)


def test_what_neither_the_component_nor_job_says_is_told_of_the_component(resolved) -> None:
    job = resolved("cpus_per_rank = 4\n", TWO.format(1))
    places = [job.components[1].origin(key).place(key) for key in ("job.mem_gb_per_node", "job.cpus_per_rank")]
    assert places[0] == "component[1].mem_gb_per_node"
    assert places[1].endswith("work.toml:3:job.cpus_per_rank")


def test_a_singleton_would_wait_for_its_own_components(resolved) -> None:
    (found,) = check_dependency(resolved("", TWO.format(1)), ["--dependency=singleton"])
    assert found.where.endswith("work.toml:4:component")
    assert "--after RUN" in found.fix
    assert list(check_dependency(resolved(), ["--dependency=singleton"])) == []
    assert list(check_dependency(resolved("", TWO.format(1)), ["--dependency=afterok:7"])) == []
