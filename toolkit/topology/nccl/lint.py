"""All checks of an environment against the NCCL that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.topology.nccl.contradictions import check_together
from toolkit.topology.nccl.device_lists import check_gloo, check_list
from toolkit.topology.nccl.finding import Finding, Given, effective
from toolkit.topology.nccl.names import check_left_on, check_name, is_ours
from toolkit.topology.nccl.values import check_value
from toolkit.topology.nccl.variables import Version, variables


@dataclass(frozen=True)
class Here:
    """The devices of a node, None if unknown; `sure` means that the ranks run on such nodes."""

    interfaces: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    sure: bool = False


def lint(givens: Sequence[Given], version: Version | None, here: Here | None = None) -> list[Finding]:
    """All findings: first what is wrong, and within a level in the order of `givens`.

    Args:
        givens: the settings; the first one of a name is effective.
        version: of NCCL; None, if unknown, means the newest release of the table.
    """
    here = here or Here()
    settings = effective([given for given in givens if is_ours(given.name)])
    findings: list[Finding] = []
    readable: dict[str, Given] = {}  # a value that NCCL misreads contradicts no other variable
    for name, given in settings.items():
        misread, others = _of_text(given, version), _of_use(given, here)
        if all(finding.level == "note" for finding in misread):
            readable[name] = given
            # A deprecated or undocumented variable needs no second note.
            misread += [finding for finding in others if finding.level == "wrong" or not misread]
        findings += misread
    findings += check_together(readable, version)
    for given in effective(givens).values():
        if given.name == "GLOO_SOCKET_IFNAME":
            findings += check_gloo(given, here.interfaces)
    wrong = {finding.variable for finding in findings if finding.level == "wrong"}
    findings = [finding for finding in findings if finding.level == "wrong" or finding.variable not in wrong]
    return sorted(findings, key=lambda finding: finding.level != "wrong")


def _of_text(given: Given, version: Version | None) -> list[Finding]:
    """Findings about the name, and about a value that NCCL reads differently than it looks."""
    of_name = check_name(given, version)
    known = variables().get(given.name)
    if known is None or any(finding.level == "wrong" for finding in of_name):
        return of_name
    of_value = check_value(given, known, version)
    if known.form == "secret":
        of_value = [replace(finding, value="(not shown)") for finding in of_value]
    return of_name + of_value


def _of_use(given: Given, here: Here) -> list[Finding]:
    """Findings about device names, and about variables that should not stay set."""
    known = variables().get(given.name)
    if known is None:
        return []
    if known.form in ("adapters", "interfaces"):
        devices = here.adapters if known.form == "adapters" else here.interfaces
        return check_list(given, known, devices, sure=here.sure)
    return check_left_on(given, known)
