"""A job as it is resolved for a cluster of its own, and what that cluster answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.site.load import load_site
from toolkit.slurm.limits import NodeShape, PartitionLimits
from toolkit.submission.preflight.cluster import Cluster

MAIN = PartitionLimits(
    name="main", state="UP", is_default=True, total_nodes=4, min_nodes=1, max_nodes=None, max_time_s=86400,
    default_time_s=600, max_cpus_per_node=None, max_memory_per_node_mib=None, default_memory_per_cpu_mib=None,
    default_memory_per_node_mib=None, gives_memory_by_gpu=False, gives_whole_nodes=False, allow_accounts=(), deny_accounts=(), allow_qos=(),
    deny_qos=(), allow_groups=(), qos="", billing_weights={},
)  # fmt: skip
NODES = NodeShape(4, "n[1-4]", 8, 16000, {"a100": 4}, frozenset({"ib", "nvme"}), is_usable=True)
SETTINGS = {"ClusterName": "here", "GresTypes": "gpu", "SelectType": "select/cons_tres", "MaxArraySize": "1001"}


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., ResolvedJob]:
    """Resolve a job: keys of [job], further tables, keys of the site file."""

    def resolve(keys: str = "", tables: str = "", site: str = "", entry: str = '["true"]') -> ResolvedJob:
        job = tmp_path / "work.toml"
        job.write_text(f"[job]\nentry = {entry}\n{keys}\n{tables}")
        file = tmp_path / "here.toml"
        file.write_text(f'name = "here"\ncontact = "help@here"\n{site}')
        return resolve_job(job, site=load_site(str(file), {}), environ={}, limits=False)

    return resolve


@pytest.fixture
def cluster() -> Callable[..., Cluster]:
    """A cluster with one partition of four equal nodes, with some things changed."""

    def make(
        shapes: list[NodeShape] | None = None, settings: dict[str, str] | None = None, **partition: object
    ) -> Cluster:
        main = replace(MAIN, **partition)
        return Cluster({**SETTINGS, **(settings or {})}, {main.name: main}, [NODES] if shapes is None else shapes)

    return make
