"""Signals to what a launcher left behind: never to somebody else's process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from toolkit.errors import OwnFailureError
from toolkit.rundir.layout import AttemptDirectory
from toolkit.supervise.launch import launch
from toolkit.supervise.launchers import end_session, srun_of_groups, srun_on_every_node
from toolkit.supervise.shape import Component, Shape, shape_of_job


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "100"], start_new_session=True)


def test_a_number_that_is_another_process_by_now_is_left_alone() -> None:
    other, gone = start_sleeper(), subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    gone.pid = other.pid  # as the kernel may give it away again
    end_session(gone)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    end_session(other)
    assert other.returncode is not None


def test_what_an_ended_launcher_left_in_its_session_is_ended() -> None:
    launcher = subprocess.Popen(["bash", "-c", "sleep 100 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    left = int(launcher.stdout.readline())
    launcher.wait()
    end_session(launcher)
    with pytest.raises(ProcessLookupError):
        while os.getpgid(left) == launcher.pid:
            pass  # until its zombie is collected


def test_a_group_that_may_not_be_signalled_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = start_sleeper()
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", _refuse)
        patch.setattr("toolkit.supervise.launchers.END_S", 0.1)
        end_session(sleeper)
    end_session(sleeper)


def _refuse(_group: int, _number: int) -> None:
    raise PermissionError("Operation not permitted")


def test_one_component_needs_no_word_of_groups() -> None:
    assert srun_of_groups([["--nodes=2"]], ["true"]) == ["srun", "--nodes=2", "true"]


def test_every_node_of_all_components_is_in_one_step() -> None:
    argv = srun_on_every_node((1, 2), ["hostname"])
    first, second = argv[1 : argv.index(":")], argv[argv.index(":") + 1 :]
    assert first[:3] == ["--het-group=0", "--nodes=1", "--ntasks=1"]
    assert second[:3] == ["--het-group=1", "--nodes=2", "--ntasks=2"]
    assert argv[-1] == "hostname"


def test_a_rank_is_in_the_component_that_it_is_counted_in() -> None:
    tables = [{"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 8}, {"nodes": 2, "ranks_per_node": 2}]
    job = {"job": {"nodes": 1}, "resolved_components": [{"job": table} for table in tables]}
    shape = shape_of_job(job)
    assert (shape.nodes, shape.ranks) == (3, 5)
    assert [shape.component_of(rank).cpus_per_rank for rank in range(5)] == [8, 0, 0, 0, 0]
    assert shape_of_job({"job": {"nodes": "2-4", "ranks_per_node": 2}}, 3) == Shape((Component(3, 2),))


@pytest.mark.parametrize(
    ("nodes", "entry", "given", "mpi"),
    [
        (["n2", "n10"], "train.py:main", "pmix", "pmix"),  # as Slurm sorts
        (["n10", "n2"], "train.py:main", "pmix", "none"),
        (["n10", "n2"], "train.py:main", "pmi2", "none"),
        (["n10", "n2"], ["./a.out"], "pmix", "pmix"),  # may need it, and then fails with a reason
        ([], "train.py:main", "pmix", "pmix"),
    ],
)
def test_where_slurm_cannot_number_the_nodes_our_ranks_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str], entry: object, given: str, mpi: str
) -> None:
    heard: list[str] = []
    monkeypatch.setattr("toolkit.supervise.launch.launch_srun", lambda *_, mpi, **__: heard.append(mpi))
    job = {"job": {"entry": entry}, "launcher": {"mpi": given}}
    launch("srun", job, Shape.of(2, 1), {}, AttemptDirectory(tmp_path), nodes=nodes)
    assert heard == [mpi]


def test_a_program_that_would_wait_for_ever_in_mpi_is_not_started(tmp_path: Path) -> None:
    job = {"job": {"entry": ["./a.out"]}, "launcher": {"mpi": "pmi2"}}
    with pytest.raises(
        OwnFailureError,
        match=r"nodes of the components \(n10, n2\) are not sorted by name, so MPI_Init would never return with pmi2",
    ) as refused:
        launch("srun", job, Shape.of(2, 1), {}, AttemptDirectory(tmp_path), nodes=["n10", "n2"])
    assert "nodelist in each [[component]]" in refused.value.fix
