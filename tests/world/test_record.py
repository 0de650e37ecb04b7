"""`toolkit.record` and `toolkit.step` in a script: what a rank records, and that nothing happens elsewhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from ring_rows import rows_of

import toolkit
from toolkit.errors import ToolkitError
from toolkit.metrics.ring import RingReader, rings_of
from toolkit.metrics.windows import MOST_USER_METRICS
from toolkit.rundir.files import write_json
from toolkit.world import record as record_module
from toolkit.world.record import recorder_of_rank


@pytest.fixture
def rank(run_directory, tmp_path, monkeypatch):
    """This process is rank 3 of a run; a function returns what it has recorded."""
    job = tmp_path / "resolved.json"
    write_json(job, {"observe": {"record": True}})
    monkeypatch.setenv("TOOLKIT_RUN_DIR", str(run_directory.path))
    monkeypatch.setenv("TOOLKIT_ATTEMPT", "0")
    monkeypatch.setenv("TOOLKIT_RANK", "3")
    monkeypatch.setenv("TOOLKIT_RESOLVED_JOB", str(job))
    record_module._say_once.cache_clear()
    recorder_of_rank.cache_clear()

    def rows() -> list[dict[str, float]]:
        recorder = recorder_of_rank()
        if recorder is not None:
            recorder.write()
        return [row for path in rings_of(run_directory.run_id, 0, 3) for row in rows_of(RingReader(path).new())]

    yield rows
    recorder_of_rank.cache_clear()
    for path in rings_of(run_directory.run_id, 0):
        path.unlink()


def test_steps_have_times_on_a_rank_other_than_0(rank):
    for number in (1, 1, 2, 3, 3):
        toolkit.step(number)
    assert [row["step"] for row in rank()] == [2, 3]
    assert all(row["step_s"] > 0 for row in rank())


def test_a_metric_belongs_to_the_step_in_which_it_is_recorded(rank):
    toolkit.step(0)
    toolkit.record("reward", 1)
    toolkit.record("reward", np.float32(2.5))
    toolkit.record("loss", math.nan)
    toolkit.step(1)
    toolkit.record("eval/accuracy", 10**300)
    toolkit.step(2)
    first, second = rank()
    assert first["reward"] == 2.5
    assert math.isnan(first["loss"])
    assert "reward" not in second
    assert second["eval/accuracy"] > 1e38


def test_the_first_step_and_what_follows_the_last_one_have_no_length_but_values(rank):
    toolkit.record("loss", 9.0)
    toolkit.record("data_s", 0.5)
    toolkit.step(5)
    toolkit.step(6)
    toolkit.record("test/acc", 0.5)
    recorder_of_rank().write(is_last=True)
    recorder_of_rank().write(is_last=True)
    first, second, third = rank()
    assert {name: first[name] for name in first if name != "ended_s"} == {"step": 5, "loss": 9.0}
    assert (second["step"], second["data_s"]) == (6, 0.5) and "loss" not in second
    assert {name: third[name] for name in third if name != "ended_s"} == {"step": 6, "test/acc": 0.5}


def test_of_too_many_metrics_the_first_16_are_kept(rank, capsys):
    toolkit.step(0)
    for number in range(MOST_USER_METRICS + 5):
        toolkit.record(f"m{number}", number)
    toolkit.step(1)
    (row,) = rank()
    assert {name for name in row if name.startswith("m") and name[1:].isdigit()} == {
        f"m{number}" for number in range(MOST_USER_METRICS)
    }
    assert "'m16' is not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward", "3", "expected a number"),
        ("reward", None, "expected a number"),
        ("reward", np.zeros(2), "expected a number"),
        ("reward", SimpleNamespace(device=SimpleNamespace(type="cuda")), "a tensor on cuda"),
        ("two words", 1.0, "not a valid name"),
        ("x" * 64, 1.0, "not a valid name"),
        (7, 1.0, "not a valid name"),
        ("step_s", 1.0, "toolkit measures this itself"),
    ],
)
@pytest.mark.parametrize("in_run", [True, False])
def test_a_wrong_metric_is_refused(request, name, value, message, in_run):
    if in_run:
        request.getfixturevalue("rank")
    with pytest.raises(ToolkitError, match=message):
        toolkit.record(name, value)


def test_outside_of_a_run_nothing_is_recorded(monkeypatch):
    monkeypatch.delenv("TOOLKIT_RUN_DIR", raising=False)
    recorder_of_rank.cache_clear()
    toolkit.record("reward", 1.0)
    toolkit.step(1)
    assert recorder_of_rank() is None
    recorder_of_rank.cache_clear()


@pytest.mark.parametrize("job", [{"observe": {"record": False}}, None])
def test_a_job_can_turn_the_recorder_off(rank, tmp_path, job):
    if job is None:
        (tmp_path / "resolved.json").unlink()
    else:
        write_json(tmp_path / "resolved.json", job)
    toolkit.step(1)
    toolkit.step(2)
    assert rank() == []


def test_a_full_node_does_not_end_the_script(rank, monkeypatch, capsys):
    monkeypatch.setattr("toolkit.metrics.ring._folders", lambda: ())
    toolkit.step(1)
    toolkit.record("reward", 1.0)
    assert "cannot record the steps of this rank" in capsys.readouterr().err


def test_a_child_process_leaves_the_ring_of_its_rank_alone(rank):
    toolkit.step(0)
    child = os.fork()
    if child == 0:
        toolkit.step(50)
        toolkit.step(60)
        os._exit(0 if recorder_of_rank() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    toolkit.step(1)
    assert [row["step"] for row in rank()] == [1]


def test_a_second_program_of_a_rank_records_after_the_first_one(rank, run_directory):
    program = "import toolkit\nfor n in range({}): toolkit.step(n)\nfrom toolkit.world.record import recorder_of_rank as r\nr().write()"
    for steps in (3, 5):
        subprocess.run([sys.executable, "-c", program.format(steps)], check=True)
        (path,) = rings_of(run_directory.run_id, 0, 3)
        assert len(RingReader(path).new()) == steps - 1
