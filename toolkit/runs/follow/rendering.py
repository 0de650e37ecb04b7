"""Print progress: a line in a file, some lines or a table on a terminal."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, OverflowMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolkit.errors import counted
from toolkit.metrics.run_metrics import in_words
from toolkit.rundir.states import RunState
from toolkit.runs.explain.running import QUIET_S
from toolkit.runs.follow.progress import Progress
from toolkit.terminal.progress import WIDTH, plain_bar
from toolkit.terminal.talk import clean
from toolkit.units import round_duration

__all__ = ["line_of", "screen_of"]

VERDICTS_SHOWN = 3
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {RunState.RUNNING: "green", RunState.COMPLETED: "green", RunState.PENDING: "yellow", RunState.FAILED: "red"}


def line_of(one: Progress) -> str:
    """`train_lm running: attempt 1, step 691/4000 (17 %), 2.1 steps/s, ...`"""
    shown = [f"attempt {one.attempt}"] if one.attempt else []
    shown += [words for _, words in _shown(one)]
    if one.last_line:
        shown.append(f"last line: {one.last_line}")
    shown += [clean(verdict) for verdict in one.verdicts[:1]] + [one.note] * bool(one.note)
    return f"{one.status.job_name} {one.status.state.value}: {', '.join(shown) or clean(one.status.reason)}"


def screen_of(found: Sequence[Progress], *, unicode: bool) -> RenderableType:
    """Return all details of one run, or a table of several runs; if `unicode` is false, in ASCII."""
    return _one(found[0], unicode=unicode) if len(found) == 1 else _several(found, unicode=unicode)


def _shown(one: Progress) -> Iterator[tuple[str, str]]:
    """Return everything known besides the state, with titles."""
    state = one.status.state
    if one.steps is not None and one.step is not None:
        yield "steps", f"step {one.step}/{one.steps} ({100 * one.step / max(1, one.steps):.0f} %)"
    elif one.step is not None:
        yield "steps", f"step {one.step}"
    if one.steps_per_s is not None:
        tokens = f", {one.tokens_per_s:,.0f} tokens/s" if one.tokens_per_s is not None else ""
        yield "rate", f"{one.steps_per_s:.3g} steps/s{tokens}"
    if ends := _ends(one):
        yield "ends", ends
    if one.loss is not None:
        yield "loss", f"loss {one.loss:.4g}"
    if others := in_words({name: value for name, value in one.metrics.items() if name != "loss"}):
        yield "also", others
    if one.saved_step is not None:
        age = f", {round_duration(one.saved_age_s)} ago" if one.saved_age_s is not None and not state.final else ""
        yield "saved", f"saved step {one.saved_step}{age}"
    if state in (RunState.RUNNING, RunState.CANCELLING) and one.ranks_started is not None:
        yield from _ranks(one)


def _ends(one: Progress) -> str:
    if one.ends_in_s is None:
        left = one.walltime_left_s
        return f"{round_duration(left)} until the walltime" if left is not None else ""
    spare = one.spare_s
    if spare is None:
        return f"ends in {round_duration(one.ends_in_s)}"
    side = "before" if spare >= 0 else "after"
    return f"ends in {round_duration(one.ends_in_s)}, {round_duration(abs(spare))} {side} the walltime"


def _ranks(one: Progress) -> Iterator[tuple[str, str]]:
    if one.ranks_failed:
        yield "ranks", f"{counted(one.ranks_failed, 'rank')} of {one.status.ranks} failed"
    elif one.ranks_started != one.status.ranks:
        yield "ranks", f"{one.ranks_started} of {counted(one.status.ranks, 'rank')} started"
    elif one.silent_s is not None and one.silent_s > QUIET_S:
        yield "ranks", f"no step for {round_duration(one.silent_s)}"


def _one(one: Progress, *, unicode: bool) -> RenderableType:
    status = one.status
    head = Text.assemble(
        (status.job_name, "bold"), f" {status.run_id}  ", (status.state.value, _COLOURS.get(status.state, "")),
        f"  attempt {one.attempt}" if one.attempt is not None else "", f"  job {status.job_id}" if status.job_id else "",
    )  # fmt: skip
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", min_width=5)
    grid.add_column()
    for title, words in _shown(one):
        if title == "steps" and one.steps and one.step is not None:
            beside = Table.grid(padding=(0, 1))
            beside.add_row(Text(words.removeprefix("step ")), _bar(one.step, one.steps, unicode=unicode))
            grid.add_row(title, beside)
        elif title == "loss":
            curve = sparkline(one.losses) if unicode else ""
            grid.add_row(title, Text(f"{words.removeprefix('loss ')} {curve}".rstrip()))
        else:
            grid.add_row(title, Text(words.removeprefix(f"{title} ")))
    if one.silent_s is not None and status.state is RunState.RUNNING and not any(_ranks(one)):
        grid.add_row(
            "ranks", Text(f"{counted(status.ranks, 'rank')}, the last step {round_duration(one.silent_s)} ago")
        )
    if one.last_line:
        grid.add_row("log", Text(one.last_line, no_wrap=True, overflow=_cut(unicode=unicode)))
    for verdict in one.verdicts[:VERDICTS_SHOWN]:
        grid.add_row("fault", Text(clean(verdict)))
    if one.note:
        grid.add_row("note", Text(one.note))
    if one.attempt is None or status.state is not RunState.RUNNING:
        grid.add_row("why", Text(clean(status.reason)))
    return Group(head, grid)


def _bar(step: int, steps: int, *, unicode: bool) -> RenderableType:
    if unicode:
        return ProgressBar(total=steps, completed=step, width=WIDTH)
    return plain_bar(step, steps)


def _cut(*, unicode: bool) -> OverflowMethod:
    """Return how rich shortens a line: in ASCII without an ellipsis, because that of rich is not ASCII."""
    return "ellipsis" if unicode else "crop"


def _several(found: Sequence[Progress], *, unicode: bool) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "JOB", "STATE", "STEP", "STEPS/S", "LOSS", "SAVED", "ENDS"):
        table.add_column(title, no_wrap=title != "ENDS", overflow=_cut(unicode=unicode))
    for one in found:
        shown = dict(_shown(one))
        table.add_row(
            one.status.run_id, Text(one.status.job_name),
            Text(one.status.state.value, _COLOURS.get(one.status.state, "")),
            shown.get("steps", "").removeprefix("step "), f"{one.steps_per_s:.3g}" if one.steps_per_s is not None else "",
            f"{one.loss:.4g}" if one.loss is not None else "", str(one.saved_step or ""),
            Text(shown.get("ends", "").removeprefix("ends ") or one.last_line or clean(one.status.reason)),
        )  # fmt: skip
    return table


def sparkline(values: Sequence[float]) -> str:
    """Return one bar character per number, as high as its value; a space if it is not finite."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    size = (high - low) or 1.0
    return "".join(
        _BLOCKS[round((value - low) / size * (len(_BLOCKS) - 1))] if math.isfinite(value) else " " for value in values
    )
