"""What a job may cost: hours of nodes and GPUs over all tasks, and Slurm's billing."""

from __future__ import annotations

import pytest

from toolkit.config.request import resolve_job
from toolkit.runs.record.job import request_of
from toolkit.site.load import load_site
from toolkit.submission.preflight.cost import billing_of, cost_of, in_words


@pytest.fixture
def cost(tmp_path):
    def resolve(keys, more="", site=""):
        job, file = tmp_path / "work.toml", tmp_path / "here.toml"
        job.write_text(f'[job]\nentry = ["true"]\n{keys}\n{more}')
        file.write_text(f'name = "here"\n{site}')
        resolved = resolve_job(job, site=load_site(str(file), {}), environ={}, limits=False)
        return cost_of(resolved, request_of(resolved))

    return resolve


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('nodes = 4\nranks_per_node = 4\ngpus_per_node = 4\ntime = "2:00:00"\nrequeue = false',
         "requests at most 8 node-hours, 32 GPU-hours (4 nodes x 0-02:00:00)"),
        ('nodes = "2-4"\nranks_per_node = 8\ntime = "30"\nrequeue = false', "requests at most 2 node-hours, 16 CPU-hours (4 nodes x 0-00:30:00)"),
        ('array = "0-9%2"\ntime = "60"\nrequeue = false', "requests at most 10 node-hours, 10 CPU-hours (1 node x 10 tasks x 0-01:00:00)"),
        ('repeat = 10\ntime = "60"', "requests at most 10 node-hours, 10 CPU-hours (1 node x 10 repeated jobs x 0-01:00:00)"),
        ('time = "60"', "requests at most 1 node-hours, 1 CPU-hours (1 node x 0-01:00:00); if it has not finished by then, it is requeued and uses as much again"),
        ('array = "0-1"\ntime = "60"', "requests at most 2 node-hours, 2 CPU-hours (1 node x 2 tasks x 0-01:00:00); a task that has not finished by then is requeued and uses its part again"),
        ('nodes = 2\ngpus_per_node = 1\ntime = "UNLIMITED"', "requests 2 nodes, 2 GPUs without a time limit"),
        ("", "requests 1 node without a time limit"),
        ('sbatch = ["--gres=gpu:2"]\ntime = "60"\nrequeue = false', "requests at most 1 node-hours, 2 GPU-hours (1 node x 0-01:00:00)"),
    ],
)  # fmt: skip
def test_before_a_job(cost, keys, words):
    assert in_words(cost(keys)) == words


def test_the_partitions_longest_time_counts_where_none_is_given(cost):
    site = "[partitions.main]\ndefault = true\nmax_time = '2:00:00'\n"
    assert cost("nodes = 3", site=site).node_hours == 6


def test_a_run_that_may_not_go_on_after_its_walltime(cost):
    assert not cost('time = "60"', "[restart]\nwalltimes = 0\n").goes_on


def test_billing_as_slurm_counts_it():
    tres = {"cpu": 16.0, "mem": 65536.0, "gres/gpu": 2.0, "node": 1.0}
    weights = {"cpu": 1.0, "mem": 0.25 / 1024, "gres/gpu": 10.0}
    assert billing_of(tres, weights, most_alone=False) == 16 + 16 + 20
    assert billing_of(tres, weights, most_alone=True) == 20
