"""The supervisor judges what nodes recorded, and commands show it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from toolkit.metrics.detectors import disk
from toolkit.metrics.memory_limits import requested_bytes
from toolkit.metrics.own import MeanLog
from toolkit.metrics.samples import MemorySample
from toolkit.metrics.verdicts import VerdictKind, read_verdicts
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import EXPOSED, STEP, WORK, WORK_CPU, Statistics, Window
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.supervise import observation as observation_module
from toolkit.supervise.node_state import NodeState, samples_in
from toolkit.supervise.observation import Observation
from toolkit.supervise.stacks import Culprit

SLOTS = 12


def same(value: float) -> Statistics:
    return Statistics(value, value, value, value, value)


def window(rank: int, slot: int, work_s: float, *, began_s: float) -> Window:
    """100 steps of 0.1 s; a rank waits for the slowest one."""
    metrics = {STEP: same(0.1), WORK: same(work_s), WORK_CPU: same(work_s), EXPOSED: same(0.1 - work_s)}
    return Window(rank, f"n{rank // 2}", began_s + 10 * slot, 10.0, 1 + 100 * slot, 100 + 100 * slot, 100, metrics)


@pytest.fixture
def attempt(run_directory):
    return claim_attempt(run_directory)


def record(attempt, slow: int | None) -> None:
    """Write the windows of four ranks on two nodes."""
    began_s = time.time() // 10 * 10 - 10 * SLOTS
    for first in (0, 2):
        file = WindowFile(attempt.windows_file(first), f"n{first // 2}")
        for slot in range(SLOTS):
            file.append(
                window(rank, slot, 0.09 if rank == slow else 0.05 + 0.0001 * rank, began_s=began_s)
                for rank in (first, first + 1)
            )


def test_a_slow_rank_is_named_once_with_its_node_and_a_change(attempt):
    record(attempt, slow=3)
    observation = Observation(attempt, lambda: 3600.0)
    observation.look()
    observation.look()  # nothing new
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert (verdict.kind, verdict.ranks, verdict.host, verdict.attempt) == (VerdictKind.STRAGGLER, (3,), "n1", 0)
    assert verdict.change and verdict.cost_s_per_hour > 600


def test_means_that_cannot_be_written_hide_no_fault(attempt, capsys):
    record(attempt, slow=3)
    (attempt.run.metrics / "means.jsonl").mkdir()
    observation = Observation(attempt, lambda: 3600.0, means=MeanLog(attempt.run.metrics, 0, {STEP: True}))
    observation.start()
    observation.close()
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert verdict.ranks == (3,)
    said = capsys.readouterr().out
    assert said.count("means.jsonl") == 1 and "Traceback" not in said


def test_ranks_of_another_pipeline_stage_are_no_standard(attempt):
    """Rank 3 has a longer stage of its own, which is not a fault."""
    began_s = time.time() // 10 * 10 - 10 * SLOTS
    file = WindowFile(attempt.windows_file(0), "n0")
    for slot in range(SLOTS):
        file.append(
            window(rank, slot, 0.09 if rank > 2 else 0.05 + 0.0001 * rank, began_s=began_s) for rank in range(4)
        )
    write_json(attempt.mesh, {"sizes": {"pp": 2, "shard": 2}, "stages": [0, 0, 0, 1]})
    Observation(attempt, lambda: float("inf")).look()
    assert not (attempt.run.metrics / "verdicts.jsonl").exists()
    attempt.mesh.unlink()
    Observation(attempt, lambda: float("inf")).look()
    assert (attempt.run.metrics / "verdicts.jsonl").exists()


def test_equal_ranks_have_no_verdict_and_no_file(attempt):
    record(attempt, slow=None)
    Observation(attempt, lambda: float("inf")).look()
    assert not (attempt.run.metrics / "verdicts.jsonl").exists()


def test_a_loss_that_is_not_a_number_is_named_at_once(attempt):
    line = {
        "step": 5, "steps": 9, "loss": None, "loss_hex": "nan", "lr": 0.1, "grad_norm": None, "samples": 5, "tokens": 5,
        "seconds": 0.1, "tokens_per_s": 1.0, "time": "2026-11-24T00:00:00.000+00:00", "attempt": 0, "world": 4,
    }  # fmt: skip
    (attempt.run.metrics / "train.jsonl").write_text(json.dumps(line) + '\n{"step": 6, "torn')
    Observation(attempt, lambda: float("inf")).look()
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert (verdict.kind, verdict.last_step) == (VerdictKind.LOSS_NOT_FINITE, 5)


def test_a_damaged_file_of_one_node_hides_no_fault_of_another(attempt):
    record(attempt, slow=3)
    attempt.windows_file(4).write_bytes(b"something else")
    Observation(attempt, lambda: 3600.0).look()
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert verdict.ranks == (3,)


def test_a_verdict_is_written_once_the_disk_has_space_again(attempt, monkeypatch, capsys):
    record(attempt, slow=3)
    observation = Observation(attempt, lambda: 3600.0)
    with monkeypatch.context() as full:
        full.setattr(observation_module, "VerdictLog", full_disk)
        observation.look()
    assert "rank 3 on node n1" in capsys.readouterr().out
    observation.look()
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert verdict.ranks == (3,)


def test_a_file_system_that_does_not_respond_once_hides_no_slow_rank(attempt, monkeypatch):
    record(attempt, slow=3)
    observation = Observation(attempt, lambda: 3600.0)
    with monkeypatch.context() as stale:
        stale.setattr(observation_module, "disk_sample", full_disk)
        observation.look()
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert verdict.ranks == (3,)


def test_a_trial_of_the_quota_is_rare_until_it_fails(attempt, monkeypatch):
    trials, answers = [], iter(["", "Disk quota exceeded", "", ""])
    monkeypatch.setattr(disk, "why_unwritable", lambda folder: trials.append(folder) or next(answers))
    observation = Observation(attempt, lambda: 3600.0)
    for expected in (1, 1, 2, 3, 3):
        if expected == 2:
            observation._trial_at = 0.0  # the period is over
        observation.look()
        assert len(trials) == expected
    (verdict,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert verdict.kind is VerdictKind.DISK


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_validation_is_a_pause_and_an_old_draft_is_none(attempt):
    observation = Observation(attempt, lambda: 3600.0)
    assert not observation._is_paused()
    attempt.validating.touch()
    assert observation._is_paused()
    attempt.validating.unlink()
    draft = attempt.run.checkpoints / "step-00000005.part-0-x"
    draft.mkdir(parents=True)
    assert observation._is_paused()
    os.utime(draft, (1, 1))
    assert not observation._is_paused()


def test_a_stall_is_raised_and_cleared_with_the_rank_that_the_stacks_show(attempt):
    began_s, calls = time.time() // 10 * 10 - 60, []
    file = WindowFile(attempt.windows_file(0), "n0")
    file.append(window(rank, 0, 0.05, began_s=began_s) for rank in range(2))

    def culprit():
        calls.append(1)
        return Culprit("rank 1 on node n0: load (train.py:3)", "elsewhere", (1,), "n0")

    observation = Observation(attempt, lambda: 3600.0, culprit=culprit)
    for _ in range(3):
        observation.look()
    file.append(window(rank, 6, 0.05, began_s=began_s) for rank in range(2))
    observation.look()
    raised, cleared = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert (raised.kind, raised.ranks, raised.host, raised.cause) == (VerdictKind.STALL, (1,), "n0", "elsewhere")
    assert raised.message.endswith(": rank 1 on node n0: load (train.py:3)") and len(calls) == 1
    assert (cleared.key, cleared.state) == (raised.key, "cleared")


def test_a_stall_is_raised_although_the_stacks_cannot_be_collected(attempt):
    WindowFile(attempt.windows_file(0), "n0").append([window(0, 0, 0.05, began_s=time.time() - 90)])

    def culprit():
        raise OSError(errno.EIO, "Input/output error")

    Observation(attempt, lambda: 3600.0, culprit=culprit).look()
    (raised,) = read_verdicts(attempt.run.metrics / "verdicts.jsonl")
    assert raised.kind is VerdictKind.STALL


def test_damaged_files_are_reported_once_and_end_nothing(attempt, capsys):
    attempt.windows_file(0).write_bytes(b"something else")
    attempt.node_state(2).write_text('{"host": 3}')
    observation = Observation(attempt, lambda: 1.0)
    for _ in range(3):
        observation.look()
        os.utime(attempt.node_state(2))
    assert capsys.readouterr().out.count("not a file of windows") == 1


@pytest.mark.parametrize(
    ("environ", "gib"),
    [
        ({"SLURM_MEM_PER_NODE": "3072"}, 3), ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2),
        ({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "2"}, 2), ({"SLURM_MEM_PER_NODE": "0"}, 0), ({}, 0),
    ],
)  # fmt: skip
def test_the_memory_that_a_job_requested_is_read_from_its_variables(environ, gib):
    assert requested_bytes(environ) == gib << 30


# A launcher whose child, the guard of rank 0, shares 200 MiB with its four children.
SHARES = """
import os, time
if os.fork() == 0:
    data = bytearray(os.urandom(200 << 20))
    for _ in range(4):
        if os.fork() == 0:
            sum(data[::4096])
            print(end=".", flush=True)
            time.sleep(600)
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def sharing(attempt):
    """Start the launcher, and record its child as the guard of rank 0."""
    process = subprocess.Popen([sys.executable, "-c", SHARES], stdout=subprocess.PIPE, start_new_session=True)
    text = ""
    while text.count(".") < 4 or "\n" not in text:
        text += os.read(process.stdout.fileno(), 100).decode()
    guard = int(text.replace(".", ""))
    attempt.rank_file(0).write_text(json.dumps({"rank": 0, "host": "n0", "pid": guard, "time": "x"}))
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def memory_of_node(attempt, launcher, root, environ) -> MemorySample:
    NodeState(attempt, "n0", launcher, 0, root, requested_bytes(environ)).write(None)
    (memory,) = [one for one in samples_in(attempt.node_state(0)) if isinstance(one, MemorySample)]
    return memory


def test_the_memory_that_a_job_requested_is_a_limit_of_its_nodes(attempt, sharing, tmp_path):
    """Slurm may kill a step above it without control groups, although the node has memory left."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    assert memory_of_node(attempt, sharing, tmp_path, {}).free_bytes == 60000000 << 10
    memory = memory_of_node(attempt, sharing, tmp_path, {"SLURM_MEM_PER_NODE": "512"})
    # Each of the five processes has them in its resident memory.
    assert 200 << 20 < memory.used_bytes < 300 << 20
    assert memory.used_bytes + memory.free_bytes == 512 << 20
    roomy = memory_of_node(attempt, sharing, tmp_path, {"SLURM_MEM_PER_NODE": "8192"})
    assert roomy.used_bytes + roomy.free_bytes == 8192 << 20


def test_the_use_of_a_cgroup_bounds_that_of_its_ranks(attempt, sharing, tmp_path):
    cgroup = tmp_path / "sys/fs/cgroup/job"
    for path, text in (
        ("proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n"), ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", f"{512 << 20}\n"), ("sys/fs/cgroup/job/memory.current", f"{250 << 20}\n"),
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    memory = memory_of_node(attempt, sharing, tmp_path, {"SLURM_MEM_PER_NODE": "512"})
    assert memory.free_bytes == 262 << 20 and 200 << 20 < memory.used_bytes <= 250 << 20
    (cgroup / "memory.max").write_text("max\n")  # the request counts again
    assert memory_of_node(attempt, sharing, tmp_path, {"SLURM_MEM_PER_NODE": "512"}).free_bytes > 200 << 20


def test_the_state_of_a_node_is_read_back_as_samples(attempt, tmp_path):
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "symbol_error").write_text("7\n")
    (counters / "link_downed").write_text("1\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    guard = os.getpid()
    attempt.rank_file(0).write_text(json.dumps({"rank": 0, "host": "n0", "pid": guard, "time": "x"}))
    NodeState(attempt, "n0", os.getppid(), 0, tmp_path).write(None)
    by_kind = {type(one).__name__: one for one in samples_in(attempt.node_state(0))}
    assert by_kind.keys() == {"MemorySample", "LinkSample", "ClockSample"}
    link, memory = by_kind["LinkSample"], by_kind["MemorySample"]
    assert (link.device, link.errors, link.downs) == ("mlx5_0/1", 7, 1)
    assert (memory.rank, memory.free_bytes) == (0, 600 * 1024)
    assert abs(by_kind["ClockSample"].offset_s) < 5
