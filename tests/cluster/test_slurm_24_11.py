"""Five tests of the others, on one cluster of Slurm 24.11; `make evidence` runs all tests on each release."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import RELEASE, running_cluster
from session_cluster import RunningCluster
from test_continuation import test_a_run_is_requeued_on_request_and_has_saved  # noqa: F401
from test_devcluster import test_jobs_are_recorded_with_accounting, test_mpi_ranks_find_each_other_over_the_bridge  # noqa: F401
from test_explain_on_slurm import test_out_of_memory  # noqa: F401
from test_main_job import test_eight_ranks_on_four_nodes  # noqa: F401
from test_status_on_slurm import test_names_and_comments_of_any_kind_with_accounting_off_and_on  # noqa: F401

from toolkit.devcluster.layout import ClusterSpec

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(RELEASE != "", reason="all tests run on this release")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("-newer", ClusterSpec(4, 4, "", True, subnet="", slurm="24.11")) as layout:
        yield RunningCluster(layout)


@pytest.fixture(scope="module")
def accounting_cluster(cluster: RunningCluster) -> RunningCluster:
    return cluster
