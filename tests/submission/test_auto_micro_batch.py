"""`train.micro_batch = "auto"`: found at the first start, reused by later ones, found again for another layout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ENTRY = """
from pathlib import Path

from toolkit.config.found_micro_batch import with_found_micro_batch
from toolkit.metrics.training import TrainLog, TrainRecord

def main(world, config):
    config = with_found_micro_batch(config, world.run_dir / "micro_batch.json")
    size = config.train.micro_batch
    if config.args["hangs"]:
        __import__("time").sleep(600)
    if size > config.args["most"]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
    with TrainLog(world.run_dir / "metrics" / "train.jsonl") as log:
        for step in (1, 2):
            log.write(TrainRecord(
                step=step, steps=2, loss=1.0, loss_hex=(1.0).hex(), lr=0.1, grad_norm=1.0, samples=step, tokens=step,
                seconds=0.5, tokens_per_s=1.0, time="2026-01-01T00:00:00.000+00:00", attempt=0, world=1,
            ))
    print(f"micro-batch {size}")
"""
JOB = '[job]\nentry = "entry.py:main"\n[restart]\ncrashes = 0\n[train]\nbatch = 2\nmicro_batch = "auto"\n[args]\nmost = 1\nhangs = false\n'


@pytest.fixture
def job(toolkit):
    (toolkit.folder / "entry.py").write_text(ENTRY)
    (toolkit.folder / "job.toml").write_text(JOB)
    return str(toolkit.folder / "job.toml")


def test_the_size_is_found_once_for_a_layout(toolkit, job):
    result = toolkit("run", job, "--site", "local")
    assert result.code == 0 and "micro-batch 1" in result.out, result.err
    assert (
        "micro_batch 2, 4 steps: does not fit" in result.err
        and "train.micro_batch = 1, found by 3 trials" in result.err
    )
    (run,) = [path.parent for path in toolkit.folder.rglob("micro_batch.json")]
    assert not (run / "trials").exists(), "only the run itself remains"
    again = toolkit("resume", "last", "--here")
    assert "micro-batch 1" in again.out and "found for this layout at" in again.err and "trial" not in again.err
    refused = toolkit("resume", "last", "--set=args.most=2")
    assert refused.code == 2 and "has found no micro-batch for this layout" in refused.err
    changed = toolkit("resume", "last", "--here", "--set=args.most=2")
    assert "micro-batch 2" in changed.out and "finding train.micro_batch again: changed args" in changed.err
    assert json.loads((run / "micro_batch.json").read_text())["micro_batch"] == 2


@pytest.mark.evidence
def test_narrower_activations_need_a_size_of_their_own(toolkit, job):
    toolkit.ok("run", job, "--site", "local", "--set=train.offload=activations")
    refused = toolkit("resume", "last", "--set=train.offload_activations_as=bf16")
    assert refused.code == 2 and "has found no micro-batch for this layout" in refused.err


def test_a_job_that_does_not_fit_does_not_start(toolkit, job):
    result = toolkit("run", job, "--site", "local", "--set=args.most=0")
    assert (
        result.code == 1
        and "not even one sample per rank fits into memory" in result.err
        and "train.offload" in result.err
    )


def test_slurm_gets_no_job_without_a_size(toolkit, job):
    result = toolkit("submit", job, "--site", "perlmutter", "--set=job.account=a", "--set=job.time=1:00:00")
    assert result.code == 2 and "found no micro-batch" in result.err and "in an allocation" in result.err
    ranged = toolkit("run", job, "--site", "local", "--set=job.nodes='1-2'")
    assert ranged.code == 2 and "cannot be combined with nodes = 1-2" in ranged.err


def test_ctrl_c_in_the_search_leaves_no_run(toolkit, terminal, job):
    command = [str(Path(sys.executable).with_name("toolkit")), "run", job, "--site", "local", "--set=args.hangs=true"]
    window = terminal(command, cwd=toolkit.folder, env=dict(os.environ))
    window.until("finding train.micro_batch")
    # Not rglob, which fails if a folder disappears while it looks into all of them.
    while not list(toolkit.folder.glob("runs/job/*/trials/job/*/attempts/000/start.json")):
        window.until("")
    window.interrupt()
    assert window.wait(timeout_s=240) == 130  # a rank that has started has 120 s to save
    assert "search interrupted; removed run" in window.screen
    assert not list(toolkit.folder.rglob("record.json"))
