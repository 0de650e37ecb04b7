"""`toolkit run` and the allocation around it: what it takes from there, and what it refuses before srun does."""

from __future__ import annotations

import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import utc_now, write_json
from toolkit.submission.foreground import show_output

# As `salloc -N 2 --ntasks-per-node 2 -c 2` sets them, seen on Slurm 22.05.
ALLOCATION = {
    "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}  # fmt: skip


@pytest.mark.parametrize("named", ["flag", "variable"])
def test_a_cluster_without_an_allocation_is_refused(toolkit, monkeypatch, named: str) -> None:
    words = ["--site", "devcluster"] if named == "flag" else []
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster" if named == "variable" else "local")
    said = toolkit("run", toolkit.job("true"), *words, "-N", 2, "--ntasks-per-node", 3)
    assert said.code == 2
    assert "site devcluster is a Slurm cluster, but this process is not in an allocation" in said.err
    assert "salloc -N 2 --ntasks-per-node 3 toolkit run" in said.err
    assert not list(toolkit.runs.glob("*/*"))


def test_the_named_site_is_not_ignored(toolkit, monkeypatch) -> None:
    monkeypatch.setenv("TOOLKIT_SITE", "mars")
    assert toolkit("run", toolkit.job("true")).code == 4
    monkeypatch.delenv("TOOLKIT_SITE")
    assert toolkit("run", toolkit.job("true")).code == 0  # nobody named one: this machine


@pytest.fixture
def allocation(toolkit, monkeypatch):
    """An allocation whose site is the dev cluster; a run there is caught before it starts."""
    from toolkit.submission import foreground

    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")
    started = []

    class CaughtError(Exception):
        pass

    def catch(_run, job, _start):
        started.append((job.job.nodes, job.job.ranks_per_node))
        raise CaughtError

    monkeypatch.setattr(foreground, "start_here", catch)

    def shape(*words):
        started.clear()
        with pytest.raises(CaughtError):
            toolkit("run", toolkit.job("true"), *words)
        return started[0]

    return shape


def test_jobs_in_turn_are_none_of_one_allocations(toolkit, allocation) -> None:
    said = toolkit("run", toolkit.job("true"), "--repeat", 3)
    told = (
        "toolkit: --repeat 3:job.repeat: expected one job in this allocation, got 3 repeated jobs. Fix: `toolkit submit"
    )
    assert said.code == 2 and said.err.startswith(told), said
    assert allocation("--repeat", 1) == (2, 2)


def test_nodes_and_tasks_are_the_allocations(allocation, monkeypatch) -> None:
    assert allocation() == (2, 2)
    assert allocation("--ntasks-per-node", 1) == (2, 1)
    assert allocation("-n", 8) == (2, 4)
    assert allocation("--set", "job.ranks_per_node=3") == (2, 3)
    monkeypatch.delenv("SLURM_NTASKS")  # `salloc -N 2 --exclusive`: only CPUs were counted
    assert allocation() == (2, 1)


def test_an_allocation_that_is_too_small_is_refused_with_numbers(toolkit, allocation, monkeypatch) -> None:
    said = toolkit("run", toolkit.job("true"), "--ntasks-per-node", 3, "-c", 2)
    assert said.code == 2
    assert "3 ranks x 2 CPUs = 6 CPUs per node, but the allocation 77 has 4" in said.err
    assert "Fix: --ntasks-per-node 2, or `salloc -N 2 --ntasks-per-node 3 -c 2 toolkit run ...`" in said.err
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8,4")  # the smaller node counts
    assert toolkit("run", toolkit.job("true"), "--ntasks-per-node", 5).code == 2
    said = toolkit("run", toolkit.job("true"), "-N", 3)
    assert (said.code, "allocation 77 has 2 nodes" in said.err) == (2, True)


def test_lines_are_numbered_by_the_ranks_that_the_attempt_has(run_directory) -> None:
    """A resume or a range may change them from attempt to attempt; a late log changes nothing."""
    import subprocess

    for ranks in (2, 1):
        attempt = claim_attempt(run_directory)
        begun = {"start": 0, "job_id": "1", "nodes": 1, "ranks": ranks, "time": utc_now()}
        write_json(attempt.start_file, begun)
        attempt.log_file(0).write_text(f"of {ranks}\n")
    lines: list[str] = []
    with subprocess.Popen(["true"]) as supervisor:
        show_output(run_directory, supervisor, lines.append, lines.append)
    assert lines == ["[0] of 2\n", "of 1\n"]


def test_a_step_around_us_is_left_behind() -> None:
    """`srun --pty bash`: its one task, its CPU mask and its PMIx are not the ranks'."""
    from toolkit.submission.allocation import environment_of_allocation, nodes_of_allocation, tasks_per_node

    step = {
        "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NNODES": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_PROCID": "0", "PMIX_RANK": "0", "PMI_RANK": "0",
    }  # fmt: skip
    inside = environment_of_allocation({**ALLOCATION, **step, "HOME": "/h", "SLURM_CPUS_PER_TASK": "2"})
    kept = {name: ALLOCATION[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_CPUS_PER_NODE")}
    whole = {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}  # for Open MPI
    assert inside == {**kept, **whole, "HOME": "/h", "SLURM_CPUS_PER_TASK": "2", "SLURM_OVERLAP": "1"}
    assert (nodes_of_allocation(inside, None), tasks_per_node(inside)) == ("2", None)


@pytest.mark.parametrize("more", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_sallocs_own_shell_is_no_step(more: dict[str, str]) -> None:
    from toolkit.submission.allocation import environment_of_allocation, tasks_per_node

    inside = environment_of_allocation({**ALLOCATION, **more, "SLURM_ARRAY_TASK_ID": "3"})
    assert inside == {**ALLOCATION, **more}
    assert tasks_per_node(inside) == "2"
