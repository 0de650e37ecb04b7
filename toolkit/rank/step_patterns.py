"""What a line of a program's output reports, by the patterns in `observe.step_line`. Standard library only.

A match of `re` can only be interrupted by a signal, in the main thread, so these patterns are searched in a process of
their own (`step_lines.py`).
"""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

__all__ = ["LIMIT_S", "OWN_PATTERN", "Report", "StepCount", "StepPatterns"]

LIMIT_S = 0.05  # processor time of all patterns for one line
OWN_PATTERN = r"toolkit: step (?P<step>\d{1,15})(?: ?/ ?(?P<total>\d{1,15}))?\s*$"
_INTEGER = re.compile(r"\d{1,15}", re.ASCII)


class _CutError(Exception):
    """A pattern has exceeded the limit of a line."""


@dataclass
class Report:
    """What one line reports."""

    step: int | None = None
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class StepPatterns:
    """Searches lines with all patterns; `tell` gets one message per group and pattern. `was_cut`: a pattern was dropped."""

    def __init__(self, patterns: Sequence[str], tell: Callable[[str], object]) -> None:
        self._patterns = [re.compile(one) for one in (*patterns, OWN_PATTERN)]
        self._tell = tell
        self._refused: set[str] = set()  # groups with a reported value
        self._is_searching = False
        self.was_cut = False
        signal.signal(signal.SIGVTALRM, self._cut)

    def _cut(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_searching:
            raise _CutError

    def read(self, line: str) -> Report | None:
        """Return what a line reports; None if no pattern matches it."""
        report: Report | None = None
        for match in self._matches(line):
            report = report or Report()
            self._add(report, match.groupdict())
        return report

    def _matches(self, line: str) -> list[re.Match[str]]:
        found: list[re.Match[str]] = []
        pending = self._patterns
        while pending:
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)  # the time of this process, whatever else runs on the node
            try:
                self._is_searching = True
                for at, pattern in enumerate(pending):  # noqa: B007
                    found.extend(pattern.finditer(line))
                self._is_searching = False
                break
            except _CutError:
                self._is_searching = False
                self._drop(pending[at].pattern, len(line))
                pending = pending[at + 1 :]
        return found

    def _drop(self, pattern: str, length: int) -> None:
        self._tell(
            f"observe.step_line: {pattern!r} needed more than {1e3 * LIMIT_S:.0f} ms on a line of {length} characters, so it is not "
            "searched any more; avoid nested repetitions such as (a+)+"
        )
        self.was_cut = True
        self._patterns = [one for one in self._patterns if one.pattern != pattern]

    def _add(self, report: Report, groups: dict[str, str | None]) -> None:
        step, total = self._integer("step", groups), self._integer("total", groups)
        epoch = groups.get("epoch") or ""
        if step is not None and total is not None and _INTEGER.fullmatch(epoch):  # the step is one of an epoch, from 0
            step, total = self._integer("step", {"step": str(int(epoch) * total + step)}), None
        report.step = step if step is not None else report.step
        report.total = total if total is not None else report.total
        for name, text in groups.items():
            if text is None or name in ("step", "total"):
                continue
            try:
                report.metrics[name] = float(text.rstrip(",;"))
            except ValueError:
                self._refuse(name, text, "a number")

    def _integer(self, name: str, groups: dict[str, str | None]) -> int | None:
        text = groups.get(name)
        if text is None:
            return None
        if _INTEGER.fullmatch(digits := text.replace(",", "").strip(" \t;")):  # 1,000 is a thousand
            return int(digits)
        self._refuse(name, text, "a whole number of up to 15 digits")
        return None

    def _refuse(self, name: str, text: str, expected: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._tell(f"observe.step_line: the value of {name} is not {expected}: {text[:100]!r}")


class StepCount:
    """The step of a program, which only grows, and the number of steps if it is known.

    Progress bars count other things, too. A line with another total than the first one is that of another bar, such as of an
    evaluation, until the first bar is complete. A bar that begins again after it was complete counts the next epoch. Other
    steps that are lower than the last one are not new.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self._epochs = 0  # steps of complete bars
        self._last = -1  # of the current bar
        self._of: int | None = None

    def is_new(self, report: Report) -> bool:
        """Count the step of a line; return whether it is beyond the last one."""
        number, total = report.step, report.total
        is_complete = self._last == self._of
        if number is None or (None not in (total, self._of) and total != self._of and not is_complete):
            return False
        if number < self._last and is_complete and total == self._of:
            self._epochs += self._last
        elif number <= self._last:
            return False
        self._last, self._of = number, total if total is not None else self._of
        self.step, before = self._epochs + number, self.step
        self.total = None if self._epochs else self._of
        return self.step != before
