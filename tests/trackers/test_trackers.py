"""`observe.trackers`: real packages receive the metrics of a run, and a run never depends on them."""

from __future__ import annotations

import math
import os
import signal

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toolkit.rundir.claims import read_claim
from toolkit.trackers.sender import LONGEST_REASON, reason_of

TRAINS = """
import os, time
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.rundir.files import utc_now

def main(world, config):
    attempt = int(os.environ["TOOLKIT_ATTEMPT"])
    with TrainLog(world.run_dir / "metrics" / "train.jsonl") as log:
        for step in range(1 + 2 * attempt, 6):
            loss = float("nan") if step == 4 else 6 / step
            log.write(TrainRecord(step, 5, loss, loss.hex(), 0.1, 1.0, step, step, 1.0, 1.0, utc_now(), attempt, 1))
            if (attempt, step) == (0, 3):
                raise ValueError("a crash")
    files = lambda: [*world.run_dir.glob("trackers/*.json"), *world.run_dir.glob("slurm-*.out")]
    while not any(os.environ["AWAITED"] in path.read_text() for path in files()):  # importing a package takes long
        time.sleep(0.1)
"""
LOSSES = [(1, 6.0), (2, 3.0), (3, 2.0), (3, 2.0), (4, math.nan), (5, 1.2)]  # the second attempt repeats step 3


@pytest.fixture
def trains(toolkit, monkeypatch):
    """Submit a run with trackers and variables of its environment, and wait for it."""

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a real store without a server

    def submit(*trackers: str, awaited: str = "sent", **variables: str):
        variables["AWAITED"] = awaited
        (toolkit.folder / "trains.py").write_text(TRAINS)
        job, lines = (
            toolkit.folder / "trains.toml",
            "".join(f"{name} = '{value}'\n" for name, value in variables.items()),
        )
        job.write_text(
            f"[job]\nentry = 'trains.py:main'\n[observe]\ntrackers = {list(trackers)}\n[env.vars]\n{lines}[args]\nwidth = 3\n"
        )
        run = toolkit.submit(job, "--wait")
        return run, next(run.path.glob("slurm-*.out")).read_text()

    return submit


def alike(seen: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    return [step for step, _ in seen] == [step for step, _ in expected] and all(
        b == pytest.approx(a, nan_ok=True) for (_, a), (_, b) in zip(expected, seen, strict=True)
    )


def test_tensorboard_has_every_step_of_both_attempts(trains):
    run, log = trains("tensorboard")
    events = EventAccumulator(str(run.trackers / "tensorboard")).Reload()
    assert alike([(one.step, one.value) for one in events.Scalars("train/loss")], LOSSES), log


def test_metrics_of_a_script_of_its_own_are_sent_with_their_steps(toolkit):
    script = "import toolkit, time\nfor n in range(1, 6):\n    toolkit.record('loss', 6 / n)\n    if n == 3: toolkit.record('acc', 0.5)\n"
    (toolkit.folder / "own.py").write_text(script + "    toolkit.step(n)\n    time.sleep(1.2)\n")
    job = toolkit.folder / "own.toml"
    job.write_text("[job]\nentry = 'own.py'\n[observe]\ntrackers = ['tensorboard']\n")
    events = EventAccumulator(str(toolkit.submit(job, "--wait").trackers / "tensorboard")).Reload()
    assert alike([(one.step, one.value) for one in events.Scalars("train/loss")], [(n, 6 / n) for n in range(1, 6)])
    assert alike([(one.step, one.value) for one in events.Scalars("train/acc")], [(3, 0.5)])


def test_mlflow_has_the_history_the_parameters_and_the_end(trains, toolkit):
    store = f"file:{toolkit.folder}/mlruns"
    run, log = trains("mlflow", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    client = MlflowClient(store)
    (sent,) = client.search_runs([client.get_experiment_by_name("trains").experiment_id])
    history = [(one.step, one.value) for one in client.get_metric_history(sent.info.run_id, "train/loss")]
    assert alike(history, LOSSES), log
    assert (sent.info.run_name, sent.info.status, sent.data.params["args.width"]) == (run.run_id, "FINISHED", "3")


def test_wandb_records_offline_without_a_key_and_says_so(trains):
    run, log = trains("wandb", WANDB_API_KEY="", NETRC="/dev/null")
    assert "wandb: recording offline" in log and "wandb sync" in log
    (record,) = run.trackers.rglob("*.wandb")
    assert b"train/loss" in record.read_bytes()


def test_a_cancelled_run_tells_its_tracker_so(toolkit, wait_until, monkeypatch):
    """`toolkit cancel` signals the processes of trackers, too."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file:{toolkit.folder}/mlruns"
    (toolkit.folder / "long.py").write_text(
        "import toolkit, time\nfor n in range(600):\n    toolkit.record('loss', n)\n    toolkit.step(n)\n    time.sleep(0.5)\n"
    )
    job = toolkit.folder / "long.toml"
    job.write_text(
        f"[job]\nentry = 'long.py'\n[observe]\ntrackers = ['mlflow']\n[env.vars]\nMLFLOW_ALLOW_FILE_STORE = 'true'\nMLFLOW_TRACKING_URI = '{store}'\n"
    )
    run, client = toolkit.submit(job), MlflowClient(store)
    wait_until(lambda: (run.trackers / "mlflow.json").exists() and "sent" in (run.trackers / "mlflow.json").read_text())
    os.killpg(int(read_claim(run, 0).job_id.removeprefix("local-")), signal.SIGTERM)
    assert toolkit("wait", run.run_id).code == 143
    (sent,) = client.search_runs([client.get_experiment_by_name("long").experiment_id])
    log = next(run.path.glob("slurm-*.out")).read_text()
    assert (sent.info.status, "starting it again" in log) == ("KILLED", False), log


def test_a_password_in_a_url_is_not_logged(trains):
    _, log = trains("mlflow", awaited="does not accept", MLFLOW_TRACKING_URI="http://me:hunter2secret@127.0.0.1:9")
    assert "mlflow does not accept metrics" in log and "hunter2secret" not in log


def test_every_message_of_a_tracker_hides_addresses_and_secrets():
    error = ValueError("https://me:pa:ss@host/api and http://host:5000/x failed with key-12345\nand more")
    assert reason_of(error, ["key-12345"]) == "https://***@host/api and http://host:5000/x failed with ***"
    assert "key" not in reason_of(ValueError("x" * (LONGEST_REASON - 3) + "key-12345"), ["key-12345"])


def test_a_dead_service_costs_the_run_nothing_and_receives_the_metrics_later(trains, toolkit, monkeypatch):
    run, log = trains(
        "mlflow", awaited="does not accept", MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_ALLOW_FILE_STORE="true"
    )
    assert toolkit("wait", run.run_id).code == 0
    assert "mlflow does not accept metrics" in log and f"`toolkit metrics send {run.run_id}` sends the rest" in log
    assert toolkit("metrics", "send", run.run_id).code == 1
    store = f"file:{toolkit.folder}/mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    for _ in range(2):  # the second time there is nothing to send
        toolkit.ok("metrics", "send", run.run_id)
        client = MlflowClient(store)
        (sent,) = client.search_runs([client.get_experiment_by_name("trains").experiment_id])
        assert len(client.get_metric_history(sent.info.run_id, "train/loss")) == len(LOSSES)


def test_a_tracker_that_is_not_installed_is_named_once(trains, toolkit):
    (toolkit.folder / "shadow").mkdir()
    (toolkit.folder / "shadow" / "wandb.py").write_text("raise ImportError('no module')\n")
    run, log = trains("wandb", awaited="is not installed", PYTHONPATH=str(toolkit.folder / "shadow"))
    assert toolkit("wait", run.run_id).code == 0
    assert log.count('wandb: wandb is not installed; fix: pip install "toolkit[wandb]"') == 1
    assert "starting it again" not in log


def test_metrics_of_an_active_run_are_sent_by_its_own_processes_only(toolkit, wait_until):
    run = toolkit.submit(toolkit.job("sleep 60", more="[observe]\ntrackers = ['tensorboard']\n"))
    wait_until(lambda: (run.attempt(0).rank_file(0)).exists())
    refused = toolkit("metrics", "send", run.run_id)
    assert (refused.code, "sends its metrics to tensorboard itself" in refused.err) == (2, True)
    toolkit.ok("cancel", run.run_id)
    no_tracker = toolkit.submit(toolkit.job("true", name="none"), "--wait")
    assert "expected --tracker" in toolkit("metrics", "send", no_tracker.run_id).err
