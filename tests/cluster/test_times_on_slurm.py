"""Slurm is the judge of how a time is read."""

from __future__ import annotations

import subprocess

import pytest

from toolkit.slurm.times import parse_slurm_time

pytestmark = pytest.mark.cluster

FORMS = ["90", "90:00", "0:30", "0:90:0", "1-", "1-12", "1-12:30", "1-12:30:15", "UNLIMITED", "infinite"]
REFUSED = ["2h", "1-2-3", "12:", "1:2:3:4", "1-:5", "1-2:"]


@pytest.mark.parametrize("text", FORMS)
def test_slurm_gives_the_limit_that_we_read(cluster, text):
    """Slurm rounds a limit up to whole minutes. The job is held, so it never runs."""
    job = cluster.run("sbatch", "-H", "--parsable", "-o", "/dev/null", "-t", text, "--wrap", "true").strip()
    limit = cluster.run("squeue", "-h", "-o", "%l", "-j", job).strip()
    cluster.run("scancel", job)
    ours, theirs = parse_slurm_time(text), parse_slurm_time(limit)
    assert theirs == (None if ours is None else -(-ours // 60) * 60)


@pytest.mark.parametrize("text", REFUSED)
def test_slurm_refuses_what_we_refuse(cluster, text):
    answer = subprocess.run(
        ["sbatch", "-H", "-o", "/dev/null", "-t", text, "--wrap", "true"],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode != 0
    assert "Invalid --time specification" in answer.stderr
    with pytest.raises(ValueError, match="is not a valid Slurm time"):
        parse_slurm_time(text)
