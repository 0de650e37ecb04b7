"""A run as its ranks, nodes and supervisor record it, written with their own writers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from step_windows import window

from toolkit.metrics import windows
from toolkit.metrics.checkpoints import SaveLog, SaveRecord
from toolkit.metrics.samples import GpuSample, LinkSample, MemorySample
from toolkit.metrics.training import TrainLog, TrainRecord
from toolkit.metrics.validation import ValidationLog, ValidationRecord
from toolkit.metrics.verdicts import Severity, Verdict, VerdictKind, VerdictLog, raise_verdict
from toolkit.metrics.window_file import WindowFile
from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import AttemptDirectory, RunDirectory

METRICS = {
    windows.DATA: 0.01, windows.FORWARD: 0.05, windows.BACKWARD: 0.1, windows.EXPOSED: 0.02, windows.OPTIMIZER: 0.01,
    windows.SAVE: 0.0, windows.WORK_CPU: 0.15, windows.RSS: 2e9, windows.DEVICE: 3e9, "reward/mean": 0.5,
}  # fmt: skip


def utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def straggler(at: float, kind: VerdictKind = VerdictKind.STRAGGLER) -> Verdict:
    return raise_verdict(
        kind, Severity.WARNING, "rank 1 on node n0 is slow", "look at n0", time_s=at, ranks=[1], host="n0",
        cost_s_per_hour=360.0, evidence={"excess": 0.3},
    )  # fmt: skip


def add_verdicts(run: RunDirectory, verdicts: Sequence[Verdict]) -> None:
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        for one in verdicts:
            log.write(one)


def record_steps(attempt: AttemptDirectory, steps: int = 4, *, loss: float = 2.5, began_s: float = 0.0) -> None:
    """`train.jsonl` of an attempt."""
    with TrainLog(attempt.run.metrics / "train.jsonl") as log:
        for step in range(1, steps + 1):
            log.write(
                TrainRecord(
                    step, 100, loss, loss.hex(), 0.1, 1.5, 8 * step, 64 * step, 0.2, 320.0, utc(began_s + 0.2 * step),
                    attempt.number, 8, 1e12, 0.4,
                )
            )  # fmt: skip


def record_all(run: RunDirectory, *, ranks: int = 8, per_node: int = 4) -> AttemptDirectory:
    """Write every record that the exporter reads: those of `ranks` ranks, of which the last has the most work."""
    now, attempt = time.time(), claim_attempt(run)
    for first in range(0, ranks, per_node):
        host = f"n{first // per_node}"
        local = range(first, min(ranks, first + per_node))
        file = WindowFile(attempt.windows_file(first), host)
        for slot in (0, 1):
            own = {rank: {**METRICS, windows.WORK: 0.1 + 0.001 * rank, windows.BYTES: 4096} for rank in local}
            file.append([window(rank, slot, host=host, **own[rank]) for rank in local])
        state = {
            "host": host, "time_s": now,
            "memory": [asdict(MemorySample(now, host, rank, "host", 1e9, 4e9)) for rank in local],
            "gpus": [asdict(GpuSample(now, host, 0, (), 0.9, 61.0, 90.0, (), 3))],
            "links": [asdict(LinkSample(now, host, "mlx5_0/1", 7, 1))],
        }  # fmt: skip
        write_json(attempt.node_state(first), state)
    record_steps(attempt, began_s=now)
    with ValidationLog(run.metrics / "validation.jsonl") as validations:
        validations.write(ValidationRecord(4, 8, {"top-1": 0.75}, False, utc(now), 0))
    with SaveLog(run.metrics / "checkpoints.jsonl") as saves:
        saves.write(SaveRecord(2, "every_steps", 1.0, 2.0, 1000, None, None, utc(now), 0))
        saves.write(SaveRecord(4, "every_steps", 1.0, None, None, "disk full", None, utc(now), 0))
    add_verdicts(run, [straggler(now)])
    (run.metrics / "alerts.jsonl").write_text('{"rule": "slow", "state": "firing", "severity": "warning"}\n')
    return attempt
