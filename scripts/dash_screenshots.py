"""Simulate runs with toolkit's own writers, and take the screenshots of docs/dash.md.

.venv/bin/python scripts/dash_screenshots.py simulate RUNS           write the simulated runs into a folder
.venv/bin/python scripts/dash_screenshots.py shots RUNS FOLDER       open their pages in chromium, and write PNG files
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from toolkit.metrics.checkpoints import SaveLog, SaveRecord
from toolkit.metrics.judge import Detectors
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.metrics.verdicts import VerdictLog
from toolkit.metrics.window_file import WindowFile
from toolkit.metrics.windows import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    LOSS,
    OPTIMIZER,
    RSS,
    STEP,
    TOKENS,
    WORK,
    WORK_CPU,
    Statistics,
    Window,
)  # fmt: skip
from toolkit.rundir.attempt_records import AttemptRecord, StartRecord
from toolkit.rundir.claims import claim_attempt, claim_start, process_start_ticks
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.rundir.states import Cause, Next, RunState
from toolkit.supervise.node_state import NodeState

TOOLKIT = [str(Path(sys.executable).with_name("toolkit"))]
SLOT_S = 10
STEP_S = 0.2


@dataclass(frozen=True)
class Scene:
    """A simulated run: `slow` maps ranks to the factor of their work from the slot `since` on."""

    name: str
    ranks: int
    slow: dict[int, float]
    since: int
    slots: int = 180
    per_node: int = 4
    is_running: bool = True
    is_judged: bool = True
    has_phases: bool = True
    seed: int = 1


SCENES = (
    Scene("train_lm", 4, {2: 1.35}, 75),
    Scene("train_wide", 64, {17: 1.2} | dict.fromkeys(range(40, 48), 1.12), 90, per_node=8),
    Scene(
        "train_vast",
        1024,
        {333: 1.3} | dict.fromkeys(range(640, 648), 1.15),
        300,
        slots=600,
        per_node=8,
        is_judged=False,
    ),
    Scene("train_before", 4, {}, 0, is_running=False, seed=5),
)


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def create(runs: Path, scene: Scene) -> RunDirectory:
    """Return a run as a submission on this machine leaves it; this process is its supervisor."""
    job = runs / f"{scene.name}.toml"
    job.write_text(f'[job]\nentry = ["true"]\nranks_per_node = {scene.ranks}\n', encoding="utf-8")
    command = [*TOOLKIT, "render", str(job), "--site", "local", "--runs", str(runs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (path,) = (runs / scene.name).glob("[0-9]*")
    run = RunDirectory(path)
    adopt(run)
    return run


def adopt(run: RunDirectory) -> None:
    """Make this process the supervisor of a local run, which is running while the process exists."""
    pid = os.getpid()
    write_json(run.submitted(0), {"job_id": f"local-{pid}", "start": 0, "time": iso(time.time())})
    shutil.rmtree(run.start(0), ignore_errors=True)
    claim_start(
        run,
        first=0,
        job_id=f"local-{pid}",
        host=socket.gethostname(),
        pid=pid,
        process_started=process_start_ticks(pid) or 0,
    )


def simulate(runs: Path, scene: Scene, now_s: float) -> RunDirectory:
    """Write the files of a run that has `scene.slots` windows until now."""
    run = create(runs, scene)
    began_s = now_s // SLOT_S * SLOT_S - SLOT_S * scene.slots
    first = claim_attempt(run)
    end_attempt(first, scene, began_s - 400, 300, "rank 1 on n0: exit code 1")
    attempt = claim_attempt(run)
    start_attempt(attempt, scene, began_s - 40)
    slots = list(windows_of(scene, began_s))
    for node in range(-(-scene.ranks // scene.per_node)):
        file = WindowFile(attempt.windows_file(node * scene.per_node), f"n{node}", bytes_per_rank=10_000_000)
        ranks = slice(node * scene.per_node, (node + 1) * scene.per_node)
        for slot in slots:
            file.append(slot[ranks])
    judge(run, scene, attempt, slots)
    last = write_logs(run, scene, attempt, slots)
    write_json(attempt.heartbeat, {"step": last, "time": iso(now_s)})
    NodeState(attempt, "n0", launcher=1, first_rank=0).write(None)
    (run.checkpoints / f"step-{last // 1500 * 1500:08}").mkdir()
    if not scene.is_running:
        end = AttemptRecord(
            Cause.COMPLETED,
            Next.END,
            True,
            RunState.COMPLETED,
            0,
            "all ranks exited with code 0",
            "the job is done",
            time=iso(now_s),
        )
        end.write(attempt)
    return run


def start_attempt(attempt: AttemptDirectory, scene: Scene, at_s: float) -> None:
    nodes = -(-scene.ranks // scene.per_node)
    StartRecord(0, "1", nodes, scene.ranks, iso(at_s), host="n0", launcher="srun").write(attempt)


def end_attempt(attempt: AttemptDirectory, scene: Scene, at_s: float, seconds: float, reason: str) -> None:
    start_attempt(attempt, scene, at_s)
    AttemptRecord(
        Cause.CRASHED,
        Next.RESTART,
        False,
        RunState.RUNNING,
        1,
        reason,
        "restart 1 of 3",
        seconds=seconds,
        time=iso(at_s + seconds),
    ).write(attempt)


def windows_of(scene: Scene, began_s: float) -> Iterator[list[Window]]:
    """Yield the windows of all ranks of each slot; a step lasts as long as its slowest rank works."""
    random = np.random.default_rng(scene.seed)
    bias = 1 + 0.01 * random.standard_normal(scene.ranks)
    step = 0
    for slot in range(scene.slots):
        work = 0.85 * STEP_S * bias * (1 + 0.012 * random.standard_normal(scene.ranks))
        if slot >= scene.since:
            work *= np.array([scene.slow.get(rank, 1.0) for rank in range(scene.ranks)])
        if slot == 30:
            work *= 1.25  # all ranks together
        pause_s = 3.0 if slot % 30 == 29 else 0.0  # a save
        step_s = float(work.max()) * 1.05
        steps = int((SLOT_S - pause_s) / step_s)
        loss = 1.8 + 2.4 * np.exp(-(step + 1) / 2500) + 0.03 * random.standard_normal()
        yield [
            window(
                scene, rank, began_s + SLOT_S * slot, step + 1, steps, float(work[rank]), step_s, pause_s / steps, loss
            )
            for rank in range(scene.ranks)
        ]
        step += steps


def window(
    scene: Scene,
    rank: int,
    began_s: float,
    first: int,
    steps: int,
    work: float,
    step_s: float,
    pause_s: float,
    loss: float,
) -> Window:
    values = {
        STEP: step_s + pause_s,
        WORK: work,
        WORK_CPU: 0.97 * work,
        EXPOSED: step_s - work,
        RSS: 6e9 + 2e7 * (rank % 5) + 2e5 * first / 50,
    }
    if scene.has_phases:
        values |= {DATA: 0.05 * work, FORWARD: 0.3 * work, BACKWARD: 0.55 * work, OPTIMIZER: 0.1 * work, TOKENS: 8192.0}
    metrics = {
        name: Statistics(value, 0.97 * value, 1.05 * value, value, 1.03 * value) for name, value in values.items()
    }
    metrics |= {LOSS: Statistics(loss, loss, loss, loss, loss)} if rank == 0 else {}
    return Window(rank, f"n{rank // scene.per_node}", began_s, SLOT_S, first, first + steps - 1, steps, metrics)


def judge(run: RunDirectory, scene: Scene, attempt: AttemptDirectory, slots: list[list[Window]]) -> None:
    """Write the verdicts of the supervisor's detectors; for a large run only on the ranks of some nodes, which is faster."""
    nodes = {rank // scene.per_node for rank in scene.slow} | set(range(6))
    detectors = Detectors(attempt.number)
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        for slot in slots:
            judged = slot if scene.is_judged else [one for one in slot if one.rank // scene.per_node in nodes]
            for verdict in detectors.observe(judged, now_s=slot[0].began_s + SLOT_S):
                log.write(replace(verdict, attempt=attempt.number))


def write_logs(run: RunDirectory, scene: Scene, attempt: AttemptDirectory, slots: list[list[Window]]) -> int:
    """Write the training log and the save log; return the last step."""
    with TrainLog(run.metrics / "train.jsonl") as train, SaveLog(run.metrics / "checkpoints.jsonl") as saves:
        for number, slot in enumerate(slots):
            one = slot[0]
            last, loss, step_s = one.first_step + one.steps - 1, one.mean(LOSS), one.mean(STEP)
            time_s, tokens = one.began_s + SLOT_S, 8192 * scene.ranks
            steps = round(1.5 * sum(slot[0].steps for slot in slots))
            train.write(
                TrainRecord(
                    last,
                    steps,
                    loss,
                    loss.hex(),
                    3e-4,
                    0.8,
                    last * scene.ranks,
                    last * tokens,
                    step_s,
                    tokens / step_s,
                    iso(time_s),
                    attempt.number,
                    scene.ranks,
                )
            )
            if number % 30 == 29:
                saves.write(
                    SaveRecord(last, "every_s", 3.0, 3.0, 4_000_000_000, None, None, iso(time_s), attempt.number)
                )
    return last


SHOTS = (  # file, scene, width, height, dark
    ("dash-4-ranks.png", "train_lm", 1000, 1080, False),
    ("dash-64-ranks-dark.png", "train_wide", 1000, 1180, True),
    ("dash-phone.png", "train_lm", 390, 1100, False),
    ("dash-1024-ranks.png", "train_vast", 1100, 2100, False),
    ("dash-runs.png", "", 1100, 500, False),
    ("dash-comparison.png", "train_lm train_before", 1100, 450, True),
    ("dash-report.png", "report train_before", 1100, 1150, True),
)


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """Run `toolkit dash` on a free port; yield its URL."""
    command = [*TOOLKIT, "dash", "--runs", str(runs), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def shots(runs: Path, folder: Path, only: str) -> None:
    from playwright.sync_api import sync_playwright

    ids = {path.parent.parent.name: path.parent.name for path in runs.glob("*/*/record.json")}
    for scene in SCENES:
        if scene.is_running and scene.name in ids:
            adopt(RunDirectory(runs / scene.name / ids[scene.name]))
    with served(runs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        base = url.partition("?")[0]
        for name, scene, width, height, is_dark in SHOTS:
            if only not in name or not all(one in ids for one in scene.removeprefix("report ").split()):
                continue
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if is_dark else "light"
            )
            page = context.new_page()
            problems: list[str] = []
            page.on("console", lambda message, found=problems: found.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error, found=problems: found.append(str(error)))
            if scene.startswith("report "):
                output = folder / "report.html"
                subprocess.run([*TOOLKIT, "report", ids[scene[7:]], "--runs", str(runs), "-o", str(output)], check=True)
                page.goto(output.as_uri())
            else:
                page.goto(url)
                began_s = time.monotonic()
                page.goto(base + "?" + "&".join(f"run={ids[one]}" for one in scene.split()))
                page.wait_for_selector(".uplot, tbody tr")
                print(f"{name}: first paint after {time.monotonic() - began_s:.1f} s")
            page.wait_for_timeout(700)
            if page.locator("canvas.heat").count():
                page.locator("canvas.heat").hover(position={"x": width * 0.75, "y": 60})
                page.wait_for_timeout(200)
            page.screenshot(path=folder / name)
            shrink(folder / name)
            print(f"{name}: {(folder / name).stat().st_size / 1000:.0f} kB", *problems, sep="\n")
            context.close()
        browser.close()


def shrink(path: Path) -> None:
    """Reduce a picture to 256 colors; Pillow comes with matplotlib."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["simulate", "shots"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs"))
    parser.add_argument("--only", default="", help="a part of the name of a scene or file")
    arguments = parser.parse_args()
    if arguments.action == "shots":
        shots(arguments.runs.resolve(), arguments.folder.resolve(), arguments.only)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for scene in SCENES:
        if arguments.only in scene.name:
            print(simulate(arguments.runs, scene, time.time()).path, flush=True)


if __name__ == "__main__":
    main()
