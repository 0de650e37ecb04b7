"""What a submission reports of a preflight: refusals with their fixes, warnings, and the cost."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import ToolkitError, all_of
from toolkit.submission.preflight.checks import Preflight
from toolkit.submission.preflight.cost import Cost, in_words
from toolkit.submission.preflight.finding import Finding
from toolkit.terminal.talk import say

__all__ = ["FORCED", "RENDERED", "report_cost", "require_good"]

# What a refusal is called if it does not end the command.
FORCED = "passed over (--force)"
RENDERED = "submit would refuse"


def require_good(found: Preflight, *, instead: str = "", action: str = "submits it") -> Cost | None:
    """Report on stderr what preflight found; return the cost for `report_cost`, once nothing else has refused the job.

    Args:
        instead: what refusals are called if they are only reported; "" raises them.
        action: what --force does all the same.

    Raises:
        ToolkitError: the job can never run; each refusal is a line.
    """
    for one in found.silent:
        say(f"not looked at, {one}")
    for finding in found.warnings:
        say(f"warning: {finding.as_error()}")
    refusals = found.refusals
    if refusals and found.is_final and instead != RENDERED:
        raise _all_of(refusals)
    if refusals and not instead:
        raise _all_of(refusals, way_past=f"; --force {action} all the same")
    for finding in refusals:
        say(f"{instead}: {finding.as_error()}")
    return found.cost


def report_cost(cost: Cost | None) -> None:
    """Report on stderr what a submitted job may cost."""
    if cost is not None:
        say(in_words(cost))


def _all_of(found: Sequence[Finding], *, way_past: str = "") -> ToolkitError:
    """Return all refusals, a line each; the last line says how to override them, if that is possible."""
    *before, last = [one.as_error() for one in found]
    last = ToolkitError(last.message, where=last.where, fix=f"{last.fix}{way_past}")
    return all_of([*before, last])
