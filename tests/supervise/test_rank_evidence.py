"""Failures that no rank reports: its log or its stack shows them."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.states import Cause
from toolkit.supervise.failures import AttemptEnd, first_failure, silent_end, with_hang
from toolkit.supervise.launchers import find_mpirun
from toolkit.supervise.rank_evidence import complete_fix, find_in_ranks
from toolkit.supervise.symptoms import COLLECTIVE_MISMATCH, COMPILE_LOCK, MPI_IN_CHILD, RENDEZVOUS, match_symptom

MISMATCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 4_000_000))
"""
SPAWNED = """
import subprocess, sys
from mpi4py import MPI
MPI.COMM_WORLD.Get_rank()
subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], check=True)
"""
WAITS = """
from torch.utils.file_baton import FileBaton
def main(world, config):
    FileBaton(config.args["lock"]).wait()
"""
GLOO = "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. Is there a distributed collective mismatch in your code?"


@pytest.fixture
def attempt(run_directory):
    return claim_attempt(run_directory)


def failed(attempt, rank, reason, kind, code):
    record = {
        "rank": rank,
        "host": f"n{rank}",
        "kind": kind,
        "reason": reason,
        "exit_code": code,
        "time": "2026-11-20T00:00:05.000Z",
    }
    write_json(attempt.error_file(rank), record)


def test_ranks_that_call_a_collective_with_different_sizes_are_told_so(supervise, local_job):
    job = supervise(local_job("mismatch.py", files={"mismatch.py": MISMATCH}))
    assert job.wait() != 0
    end = job.end()
    assert (end["symptom"], end["rank"]) == ("collective_mismatch", None)
    assert "rank 1 at mismatch.py:5: dist.all_reduce(" in end["reason"]
    assert "collective mismatch in your code" in end["evidence"][0][1]


def test_a_mismatch_is_found_above_the_native_stack_that_open_mpi_prints(attempt):
    failed(attempt, 0, "killed by SIGABRT", "signal", 134)
    stack = [f"[node1:7] [{frame:2}] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7f]" for frame in range(80)]
    attempt.log_file(0).write_text("\n".join([GLOO, "[node1:7] *** Process received signal ***", *stack]))
    end = first_failure(attempt)
    assert end.symptom == "collective_mismatch" and end.last_lines == [GLOO]


def test_a_rank_that_raises_before_its_peers_disagree_is_the_cause(attempt):
    failed(attempt, 1, "ValueError: bad batch", "exception", 1)
    failed(attempt, 0, "killed by SIGABRT", "signal", 134)
    attempt.log_file(0).write_text(GLOO)
    assert (first_failure(attempt).rank, first_failure(attempt).symptom) == (1, "exception")


@pytest.mark.skipif(find_mpirun("", {}) is None, reason="no mpirun beside this Python")
def test_mpi_that_a_child_process_starts_again_is_named_and_not_tried_again(supervise, local_job):
    job = local_job("spawned.py", launcher="mpirun", files={"spawned.py": SPAWNED})
    job["restart"]["crashes"] = 3
    job = supervise(job)
    assert job.wait() != 0
    end = job.end()
    assert (end["symptom"], end["next"], len(job.run.attempt_numbers())) == ("mpi_in_child", "end", 1)
    assert "PMIU_write error" in end["evidence"][0][1] and "mpi4py.rc.initialize" in end["fix"]


def test_ranks_that_vanish_are_explained_by_what_their_children_printed(attempt):
    write_json(attempt.rank_file(0), {"rank": 0, "host": "n0", "pid": 1, "time": ""})
    attempt.log_file(0).write_text("*** An error occurred in MPI_Init_thread\n*** on a NULL communicator\n")
    end = silent_end(attempt, 1, 137)
    assert (end.symptom, end.evidence) == (
        "mpi_in_child",
        [("logs/rank-0.log", "*** An error occurred in MPI_Init_thread")],
    )


@pytest.mark.evidence
def test_a_rank_that_waits_for_the_lock_of_a_compilation_names_the_file(supervise, local_job, tmp_path):
    lock = tmp_path / "extensions" / "addone" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    job = local_job("waits.py:main", ranks=1, files={"waits.py": WAITS})
    job["args"] = {"lock": str(lock)}
    job["restart"] |= {"stall_s": 60, "crashes": 0}
    job["env"] = {**(job.get("env") or {}), "vars": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}}
    job = supervise(job)
    assert job.wait() == 125
    end = job.end()
    assert (end["cause"], end["symptom"], end["rank"]) == ("stalled", "compile_lock", 0)
    assert str(lock) in end["fix"] and "file_baton.py" in end["evidence"][0][1]


def test_a_stalled_rank_in_torchs_wait_for_a_lock_is_blamed(attempt, tmp_path, monkeypatch):
    lock = tmp_path / "addone" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    frame = '  File "/venv/site-packages/torch/utils/file_baton.py", line 50 in wait'
    attempt.stack_file(1).write_text(
        f'Current thread 0x7f (most recent call first):\n{frame}\n  File "a.py", line 3 in <module>\n'
    )
    end = with_hang(AttemptEnd(Cause.STALLED, "no step for 900 s", 125, fix="raise restart.stall_s"), attempt)
    assert (end.rank, end.symptom, end.evidence) == (1, "compile_lock", [("errors/rank-00001.stack", frame.strip())])
    assert end.fix.endswith(f"remove its lock file: {lock}")
    attempt.stack_file(1).write_text(
        'Current thread 0x7f (most recent call first):\n  File "a.py", line 3 in <module>\n'
    )
    assert with_hang(end, attempt) is end


def test_the_line_of_a_node_log_names_its_rank(attempt):
    attempt.node_log("n0").write_text("[64] loss 0.3\n[70] *** An error occurred in MPI_Init_thread\n")
    found = find_in_ranks(attempt, [MPI_IN_CHILD])
    assert found is not None and (found.rank, found.file) == (70, "logs/node-n0.log")
    assert find_in_ranks(attempt, [COLLECTIVE_MISMATCH]) is None


def test_only_logs_with_a_wanted_line_are_searched_line_by_line(attempt, monkeypatch):
    """The supervisor handles no stop while it reads the logs of thousands of ranks."""
    for rank in range(8):
        attempt.log_file(rank).write_text("step 7 loss 0.3\nRuntimeError: CUDA out of memory\n" * 100)
    attempt.log_file(5).write_text("step 7\n\x1b[31m*** An error occurred in MPI_Init_thread\x1b[0m\nstep 8\n")
    searched = []
    match = lambda lines: searched.append(len(lines)) or match_symptom(lines)  # noqa: E731
    monkeypatch.setattr("toolkit.supervise.rank_evidence.match_symptom", match)
    found = find_in_ranks(attempt, [COMPILE_LOCK, MPI_IN_CHILD])
    assert found is not None and (found.rank, found.line) == (5, "*** An error occurred in MPI_Init_thread")
    assert searched == [3]


@pytest.mark.parametrize(
    ("lines", "endpoint"),
    [
        ([], "the endpoint is $HEAD:29512"),
        (["DistNetworkError: The client socket has timed out after 9 ms while trying to connect to (node2, 29512)."],
         "the endpoint is node2:29512"),
    ],
)  # fmt: skip
def test_a_failed_rendezvous_names_its_endpoint(attempt, lines, endpoint):
    attempt.run.batch_script.write_text("#!/bin/bash\nsrun torchrun --nnodes=2 --rdzv-endpoint=$HEAD:29512 train.py\n")
    assert complete_fix(RENDEZVOUS, attempt, lines).endswith(endpoint)


def test_the_oldest_lock_of_the_default_folder_is_named_first(attempt, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    locks = [tmp_path / "torch_extensions" / "py311_cpu" / name / "lock" for name in ("new", "old")]
    for age, lock in enumerate(locks):
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 60 * age,) * 2)
    assert complete_fix(COMPILE_LOCK, attempt).endswith(f"{locks[1]}, {locks[0]}")


@pytest.mark.skipif(
    not (Path(sys.executable).with_name("torchrun").exists() or shutil.which("torchrun")), reason="no torchrun"
)
def test_a_torchrun_whose_peer_never_comes_is_a_failed_rendezvous(supervise, local_job):
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
               "--rdzv-conf=join_timeout=3", "work.py"]  # fmt: skip
    job = supervise(local_job(command, ranks=1, files={"work.py": ""}))
    assert job.wait() == 1
    end = job.end()
    assert end["symptom"] == "rendezvous" and "RendezvousTimeoutError" in end["evidence"][0][1]
    assert end["fix"].endswith("this job has 1 node, and the endpoint is localhost:0")
