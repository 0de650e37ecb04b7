"""Steps and metrics in the real output of programs, which arrives in pieces: `observe.step_line`."""

import math
import random
from pathlib import Path

import pytest

from toolkit.config.presets import presets
from toolkit.metrics.ring import RingReader, rings_of
from toolkit.rank.step_lines import StepRecords
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json

OUTPUT = Path(__file__).parent / "output"
# By program: its patterns, the name of a preset or a list; the last step; the number of steps; the last value of each metric.
PROGRAMS = {
    "nanogpt": ("nanogpt", 12, None, {"loss": 10.8132, "train_loss": 10.8028, "val_loss": 10.82}),
    "hf": ("hf", 40, 40, {"loss": 3.673, "eval_loss": 3.668}),
    "lightning": ("lightning", 60, None, {"loss": 6.29e-12, "val_loss": 1.45e-11, "epoch": 2.0}),
    "deepspeed": ("deepspeed", 36, None, {"loss": 2.3125, "skipped": 0.0, "lr": 2.1731931451279077e-06}),
    "megatron": ("megatron", 126, 250000, {"loss": 2.491047, "lr": 9.45e-06, "grad_norm": 0.24}),
    "litgpt": ("litgpt", 2, None, {"loss": 10.562, "val_loss": 10.601}),
    "tqdm": ([r"\| (?P<step>\d+)/(?P<total>\d+) \[.*loss=(?P<loss>[\d.]+)"], 40, 40, {"loss": 0.075}),
    "rich": ([r"^training \S+ (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)"], 30, 30, {"loss": 0.1}),
    "keras": ([r"^\s*(?P<step>\d+)/(?P<total>\d+) .* - loss: (?P<loss>[\d.]+)"], 40, None, {"loss": 1.3765}),
    "sklearn": ([r"Iteration (?P<step>\d+), loss = (?P<loss>\S+)"], 8, None, {"loss": 0.66192354}),
    "R": ([r"\[\d+\] iteration (?P<step>\d+)", r"deviance = (?P<deviance>\S+)"], 6, None, {"deviance": 1e-06}),
    "c": ([r"^step (?P<step>\d+)/(?P<total>\d+)", r"loss = (?P<loss>\S+)  lr = (?P<lr>\S+)"], 8, 8, {"loss": 1.7678, "lr": 1e-3}),
}  # fmt: skip


def ring_of(attempt):
    (path,) = rings_of(attempt.run.run_id, attempt.number, 0)
    steps = RingReader(path).new()
    path.unlink()
    return steps


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_steps_and_metrics_of_a_program_are_read(run_directory, capsys, name):
    patterns, step, total, metrics = PROGRAMS[name]
    patterns = presets()[patterns].step_line if isinstance(patterns, str) else patterns
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.touch()
    records = StepRecords(attempt, log, {"step_line": patterns})
    text, pieces = (OUTPUT / f"{name}.txt").read_bytes(), random.Random(name)
    while text:
        size = pieces.randint(1, 600)
        with log.open("ab") as stream:
            stream.write(text[:size])
        text = text[size:]
        records.read(is_over=not text)
    beat = read_json(attempt.heartbeat)
    assert (beat["step"], beat.get("total"), beat["saves"]) == (step, total, False)
    steps = ring_of(attempt)
    assert steps.numbers()[-1] == step
    assert steps.numbers() == sorted(steps.numbers())
    found = {one: steps.values(one)[-1] for one in metrics}
    assert found == pytest.approx(metrics, rel=1e-6)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "bar", ["Validation DataLoader 0:  40%|##   | 4/10 [00:09<", "Testing DataLoader 1: | 4/? [00:09<"]
)
def test_the_bar_of_a_validation_shows_that_the_program_runs(run_directory, bar):
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.write_text(
        "Sanity Checking DataLoader 0:  50%|##   | 1/2 [00:01<\nValidation DataLoader 0:  50%|##   | 1/2 [00:01<\n"
    )
    records = StepRecords(attempt, log, {"step_line": presets()["lightning"].step_line, "record": False})
    records._read(100.0, is_over=False)
    assert not attempt.heartbeat.exists()
    times = []
    for now, line in ((200.0, "Epoch 0:  15%|#   | 3/20 [00:01<"), (300.0, bar), (400.0, "saved")):
        with log.open("a") as stream:
            stream.write(line + "\n")
        records._read(now, is_over=False)
        times.append(read_json(attempt.heartbeat)["time"])
    assert [times.count(time) for time in times] == [1, 2, 2]
    assert read_json(attempt.heartbeat)["step"] == 3


def test_numbers_that_are_not_finite_reach_the_ring(run_directory):
    attempt = claim_attempt(run_directory)
    log = attempt.log_file(0)
    log.write_bytes((OUTPUT / "R.txt").read_bytes())
    StepRecords(attempt, log, {"step_line": PROGRAMS["R"][0]}).read(is_over=True)
    values = ring_of(attempt).values("deviance")
    assert math.isnan(values[3])
    assert values[4] == -math.inf
