"""Advise what to change in a run, keep the advice in `metrics/advice.jsonl`, and measure what earlier changes gained."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from statistics import fmean
from typing import Any, Self

from toolkit.checkpoint.advice import interval_advice
from toolkit.errors import CheckFailedError, NotFoundError, ToolkitError
from toolkit.metrics import step_profile, windows
from toolkit.metrics.blocks import BlockBuilder
from toolkit.metrics.limits import limit
from toolkit.metrics.records import RecordLog, read_records
from toolkit.metrics.step_advice import Advice, advise, advise_on_shares, less_communication
from toolkit.metrics.typed_json import read_typed
from toolkit.metrics.verdicts import Severity, VerdictKind
from toolkit.metrics.window_file import WindowReader
from toolkit.observe.readings import RunReadings
from toolkit.rundir.attempt_records import StartRecord
from toolkit.rundir.files import utc_now
from toolkit.rundir.layout import AttemptDirectory, RunDirectory
from toolkit.runs.efficiency.count import efficiency_of
from toolkit.runs.record.job import jobs_of_starts
from toolkit.supervise.launch import is_unmanaged
from toolkit.terminal.talk import say

__all__ = ["advise_on", "measured_gains", "record_advice"]

_MOST_SHOWN, _RECENT = 5, 60  # changes; windows of each rank
_EASE = {"low": 1.0, "medium": 0.5, "high": 0.25}  # what a gain counts, by effort
_TABLES = ("job", "env", "checkpoint", "data", "train", "parallel", "gradient_compression", "args")
_PHASES = (windows.DATA, windows.FORWARD, windows.BACKWARD, windows.EXPOSED, windows.BUBBLE, windows.OPTIMIZER)
_RULES = {VerdictKind.STARVATION: step_profile.DATA, VerdictKind.SLOW_SAVE: step_profile.CHECKPOINT}


@dataclass(frozen=True)
class AdviceRecord:
    """Advice on an attempt. `is_applied`: `--apply` printed the command that applies it to the next one."""

    time: str
    attempt: int
    is_applied: bool
    advice: Advice

    def to_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Self:
        try:
            record: Self = read_typed(json.loads(line), cls, "", what="a record", fix="")
        except ToolkitError as error:
            raise ValueError(error.message) from None
        return record


def advise_on(run: RunDirectory) -> list[Advice]:
    """Return at most five changes for the next attempt, the critical and those with the largest gain first.

    Raises:
        CheckFailedError: no rank of the newest attempt has recorded its steps.
    """
    readings = RunReadings(run)
    readings.update()
    for problem in readings.problems:
        say(f"omitted: {problem}")
    attempt = run.last_attempt()
    if attempt is None or not readings.windows:
        raise CheckFailedError(
            f"run {run.run_id} has recorded no windows of steps", where=str(run.path if attempt is None else attempt.windows),
            fix="wait until its ranks have made steps for 10 s, name a task of an array, or set observe.record = true",
        )  # fmt: skip
    keys, found = _keys_of(attempt), dict[str, Advice]()
    sources = (
        _of_windows(readings, keys),
        interval_advice(run.path),
        _of_verdicts(readings, keys),
        _of_files(readings, keys),
    )
    for one in chain.from_iterable(sources):
        known = found.setdefault(one.rule, one)
        found[one.rule] = replace(known, evidence=one.evidence | known.evidence)
    ordered = sorted(found.values(), key=lambda one: (one.severity != "critical", -one.gain * _EASE[one.effort]))
    return ordered[:_MOST_SHOWN]


def _of_windows(readings: RunReadings, keys: Mapping[str, Any]) -> Iterator[Advice]:
    """Yield advice on the phases. The slowest rank waits only for the communication itself, so its wait counts."""
    ranks = [windows.merge(one[-_RECENT:]) for one in readings.windows.values()]
    if not (step_s := fmean(window.mean(windows.STEP) for window in ranks)):
        return
    seconds = max(sum(window.seconds for window in one) for one in readings.windows.values())
    of = {name: fmean(window.mean(name) for window in ranks) / step_s for name in _PHASES}
    shares = {
        step_profile.DATA: of[windows.DATA], step_profile.OPTIMIZER: of[windows.OPTIMIZER],
        step_profile.BUBBLE: of[windows.BUBBLE],
        step_profile.COMMUNICATION: min(window.mean(windows.EXPOSED) for window in ranks) / step_s,
        step_profile.CHECKPOINT: sum(one.waited_s for one in readings.saves if one.attempt == readings.attempt) / seconds,
    }  # fmt: skip
    if of[windows.FORWARD] and not keys["train.validate_every"]:
        shares[step_profile.REST] = 1 - sum(of.values()) - shares[step_profile.CHECKPOINT]
    mesh = {name: int(keys[f"parallel.{name}"]) for name in ("tp", "pp", "shard", "replicate")}
    size = keys["train.micro_batch"]
    has_passes = size != "auto" and 0 < size < keys["train.batch"]
    is_compressed = keys["gradient_compression.algorithm"] != "none"
    hosts = {window.host for window in ranks}
    less = less_communication(mesh, len(hosts), has_passes=has_passes, is_compressed=is_compressed)
    changes = {step_profile.COMMUNICATION: less}
    if "data.workers" not in keys:
        changes[step_profile.DATA] = "speed up the code that reads the samples, or let it read them in advance"
    for one in advise_on_shares(shares, keys, changes):
        source = "checkpoints.jsonl" if one.rule == step_profile.CHECKPOINT else "windows"
        yield replace(one, evidence=one.evidence | {"step_s": step_s}, source=source)


def _of_verdicts(readings: RunReadings, keys: Mapping[str, Any]) -> Iterator[Advice]:
    """Yield advice on raised verdicts, and without a gain on severe ones that were cleared."""
    for one in {one.key: one for one in readings.verdicts if one.attempt == readings.attempt}.values():
        is_over = one.state == "cleared"
        if one.kind is VerdictKind.SAVE_SHARE or (is_over and one.severity is Severity.INFO):
            continue  # the saves themselves give their share
        settings = ("job.bind=auto",) if one.cause == "neighbours" and keys["job.bind"] == "none" else ()
        yield Advice(
            _RULES.get(one.kind, one.kind.value), one.message + " (over now)" * is_over, one.change,
            severity=Severity.INFO if is_over else one.severity, evidence=dict(one.evidence), source="verdicts.jsonl",
            gain=0.0 if is_over else min(1.0, one.cost_s_per_hour / 3600), formula="time lost per hour / 1 h",
            settings=settings, is_neutral=bool(settings),
        )  # fmt: skip


def _of_files(readings: RunReadings, keys: Mapping[str, Any]) -> Iterator[Advice]:
    """Yield advice on precision, on the profiled steps, and on the requested resources."""
    mfu = readings.training[-1].mfu if readings.training else None
    if mfu is not None and keys["train.precision"] == "fp32":
        said, change = f"in fp32 the GPUs reach {mfu:.0%} of their peak", "try train.precision = bf16"
        yield Advice("precision", said, change, evidence={"mfu": mfu}, source="train.jsonl")
    with suppress(NotFoundError):  # most runs profile no steps
        yield from advise(step_profile.read_profile(readings.run.metrics / step_profile.FILE))
    try:
        yield from efficiency_of(readings.run).advice
    except ToolkitError as error:
        say(f"omitted: efficiency: {error.message}")


def _keys_of(attempt: AttemptDirectory) -> dict[str, Any]:
    """Return the values of the job's keys in an attempt, without `data.workers` if no Loader of toolkit reads it.

    A script or executable that has such a Loader sets the key.
    """
    begun, jobs = StartRecord.read(attempt), jobs_of_starts(attempt.run)
    job = jobs[max(start for start in jobs if start <= (begun.start if begun else 0))]
    tables = job.model_dump(mode="json", by_alias=True)
    keys = {f"{table}.{key}": value for table in _TABLES for key, value in (tables.get(table) or {}).items()}
    if is_unmanaged(job.job.entry) and job.origin("data.workers").layer == "built-in":
        del keys["data.workers"]
    return keys


def record_advice(run: RunDirectory, shown: Sequence[Advice], *, is_applying: bool) -> None:
    """Append advice to `metrics/advice.jsonl`, each once per attempt; ToolkitError if the file is damaged."""
    number = run.attempt_numbers()[-1]
    known = {(one.attempt, one.is_applied, one.advice.rule, one.advice.settings) for one in _records_of(run)}
    with RecordLog[AdviceRecord](run.metrics / "advice.jsonl") as log:
        for one in shown:
            is_applied = is_applying and one.is_neutral
            if (number, is_applied, one.rule, one.settings) not in known:
                log.write(AdviceRecord(utc_now(), number, is_applied, one))


def _records_of(run: RunDirectory) -> list[AdviceRecord]:
    with suppress(FileNotFoundError):
        return list(read_records(run.metrics / "advice.jsonl", AdviceRecord.from_line, what="stored advice"))
    return []


def measured_gains(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the settings that a later attempt has: `predicted` and `measured` gain, `p`, and the `outcome` in words.

    Raises:
        ToolkitError: a line of `advice.jsonl` is damaged.
    """
    records = {(one.attempt, one.advice.settings): one for one in _records_of(run) if one.advice.settings}
    keys, found = {number: _keys_of(run.attempt(number)) for number in run.attempt_numbers()}, []
    for (number, settings), record in records.items():
        after = [later for later in keys if later > number and _has(keys[later], settings)]
        if after and not _has(keys[number], settings):
            own = {setting.partition("=")[0] for setting in settings}
            others = sorted({key for key, value in keys[after[-1]].items() if value != keys[number].get(key)} - own)
            gain, p, outcome = _compare(run.attempt(number), run.attempt(after[-1]))
            outcome += f", together with {', '.join(others)}" if others else ""
            row = {"attempt": number, "settings": settings, "predicted": record.advice.gain, "measured": gain}
            found.append(row | {"p": p, "outcome": outcome})
    return found


def _has(keys: Mapping[str, Any], settings: Sequence[str]) -> bool:
    pairs = (setting.partition("=") for setting in settings)
    return all(str(keys.get(key)).lower() == value for key, _, value in pairs)


def _compare(before: AttemptDirectory, after: AttemptDirectory) -> tuple[float | None, float | None, str]:
    """Return the measured gain of an attempt over another one, its p, and both in words."""
    ranks = [begun.ranks if (begun := StartRecord.read(one)) else 0 for one in (before, after)]
    old, new = _block_times(before), _block_times(after)
    if ranks[0] != ranks[1]:
        return None, None, f"not comparable: {ranks[0]} ranks before, {ranks[1]} after"
    if min(len(old), len(new)) < limit("advice.blocks"):
        return None, None, f"not measured yet: {len(old)} blocks of steps before, {len(new)} after"
    gain, p = 1 - fmean(new) / fmean(old), mann_whitney(old, new)
    is_real = p < limit("advice.p") and abs(gain) > limit("advice.gain")
    return gain, p, f"{f'measured {100 * gain:.0f} %' if is_real else 'no measurable change'} (p = {p:.2g})"


def _block_times(attempt: AttemptDirectory) -> list[float]:
    """Return the step time of each block of an attempt but the first, in which the ranks start."""
    slots = [slot for path in sorted(attempt.windows.glob("rank-*.bin")) for slot in WindowReader(path).new()]
    return [block.step_s for block in BlockBuilder().add(slots)][1:]


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p that both have the same distribution, by the normal approximation with ties."""
    n, m = len(first), len(second)
    ranks, ties, below = dict[float, float](), 0, 0
    for value, same in groupby(sorted([*first, *second])):
        count = len(list(same))
        ranks[value] = below + (count + 1) / 2
        ties, below = ties + count**3 - count, below + count
    distance = abs(sum(ranks[value] for value in first) - n * (n + m + 1) / 2)
    variance = n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1)))
    return min(1.0, math.erfc((distance - 0.5) / math.sqrt(2 * variance))) if variance else 1.0
