"""Slurm is the judge of which tasks an array has."""

from __future__ import annotations

import pytest

from toolkit.slurm.array import parse_array
from toolkit.slurm.refusals import refusal_of

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("text", ["0-9%2", "0-15:4", "1,3,5-7", "07", "0-4:2,1-3:2%3"])
def test_slurm_makes_the_tasks_that_we_read(cluster, text):
    """Slurm writes what is pending as a list of its own, which must name the same tasks. The job is held."""
    job = cluster.run("sbatch", "-H", "--parsable", "-o", "/dev/null", "-a", text, "--wrap", "true").strip()
    shown = cluster.run("squeue", "-h", "-r", "-o", "%K", "-j", job).split()
    limit = cluster.run("scontrol", "-o", "show", "job", job).partition("ArrayTaskThrottle=")[2]
    cluster.run("scancel", job)
    ours = parse_array(text)
    assert sorted(map(int, shown)) == sorted(ours)
    assert (int(limit.split()[0]) if limit else None) == ours.at_once


def test_a_number_too_large_for_the_cluster_is_refused_with_the_fix(cluster):
    with pytest.raises(AssertionError) as refused:
        cluster.run("sbatch", "-H", "-o", "/dev/null", "-a", "0-2000000", "--wrap", "true")
    assert "MaxArraySize" in refusal_of(str(refused.value))[1]
