"""Does the NCCL in use know a variable by this name, and is it one to leave on?"""

from __future__ import annotations

import difflib
import re

from toolkit.topology.nccl.documented import NEWEST, variables
from toolkit.topology.nccl.finding import Finding, Given, found
from toolkit.topology.nccl.values import as_c_reads
from toolkit.topology.nccl.variable import PAGE, Variable, Version, before, shown

# Left on, these cost speed or hide a fault. What each does to a job, and what to do instead.
_HARM = {
    "NCCL_P2P_DISABLE": ("GPUs of a node talk through host memory: NVLink lies idle", "mend P2P (ACS, IOMMU, drivers)"),
    "NCCL_SHM_DISABLE": ("ranks of a node talk over the network where P2P cannot", "give /dev/shm more room"),
    "NCCL_IB_DISABLE": ("traffic between nodes goes over TCP", "mend the fabric, or choose adapters with NCCL_IB_HCA"),
    "NCCL_NVB_DISABLE": ("GPUs that are not linked directly talk through PCI", "mend what it goes round"),
    "NCCL_PXN_DISABLE": (
        "traffic between rails crosses the upper switches, and alltoall sends more and smaller messages",
        "mend what it goes round",
    ),
    "NCCL_P2P_DIRECT_DISABLE": ("each message is copied once more", "mend what it goes round"),
    "NCCL_ALGO": ("NCCL can no longer choose for each size and call", "report the slow choice, and tune with a plugin"),
    "NCCL_PROTO": (
        "NCCL can no longer choose for each size; LL128 where it is not supported corrupts data",
        "exclude one protocol (^LL128) where you suspect it, no longer than that",
    ),
    "NCCL_CHECK_POINTERS": ("each call looks up its pointers", "use it in a test"),
    "NCCL_CHECK_MODE": ("each call checks its arguments, with DEBUG_GLOBAL with all ranks", "use it in a test"),
    "NCCL_LAUNCH_MODE": ("GROUP is deprecated since 2.9 and may be removed", "use one process for each GPU"),
}


def is_ours(name: str) -> bool:
    """Whether a name is, or was meant to be, one of NCCL's."""
    return name.upper().startswith("NCCL_") or bool(
        re.fullmatch(r"(NCLL|NCC|NNCL|NCLC|NCCCL)_[A-Z0-9_]+", name.upper())
    )


def check_name(given: Given, version: Version | None) -> list[Finding]:
    """What is wrong with a variable, whatever its value."""
    known = variables().get(given.name)
    if known is None:
        return [_unknown(given, version)]
    if known.state in ("removed", "renamed") and not before(version, known.changed):
        return [_gone(given, known, version)]
    if before(version, known.since):
        assert version is not None
        why = f"it came with NCCL {shown(known.since)}; the NCCL in use, {shown(version)}, passes it over"
        return [found("wrong", given, known, why, f"take it out, or use NCCL {shown(known.since)} or newer")]
    if known.state == "deprecated" and not before(version, known.changed):
        why = f"deprecated since NCCL {shown(known.changed)} in favour of {known.now}"
        return [found("note", given, known, why, f"set {known.now} in its place")]
    if known.kind == "undocumented":
        why = "NCCL's page does not document it: it can change or go with any version"
        return [found("note", given, known, why, "keep it only where the site's or vendor's documentation asks for it")]
    return []


def check_left_on(given: Given, known: Variable) -> list[Finding]:
    """Variables that are there to find a fault, and the defaults said once more."""
    if given.name == "NCCL_DEBUG":
        return _debug(given, known)
    if not given.value.strip() or known.kind not in ("debug", "tuning"):
        return []
    if given.value.upper() == known.default.upper():
        why = "it is what NCCL does anyway, and keeps a later NCCL from doing better"
        return [found("note", given, known, why, "take it out")]
    if known.form == "0..1" and known.kind == "debug" and as_c_reads(given.value) == 0:
        return [found("note", given, known, "0 is what NCCL does anyway", "take it out")]
    if known.kind == "debug":
        harm, instead = _HARM.get(given.name, ("it keeps NCCL from choosing itself", "mend what it goes round"))
        why = f"for finding faults only: {harm}"
        return [found("wrong", given, known, why, f"take it out; {instead}")]
    why = "NCCL's page counts it to those that are set to try something: a later NCCL may choose better"
    return [found("note", given, known, why, "keep it where a measurement or the site's documentation asks for it")]


def _debug(given: Given, known: Variable) -> list[Finding]:
    level = given.value.upper()
    if level == "TRACE":
        why = "TRACE prints a line for every call of every rank, in builds that have it"
        return [found("wrong", given, known, why, "NCCL_DEBUG=WARN, which prints only what fails")]
    if level == "INFO":
        why = "INFO prints some hundred lines a rank at the start"
        return [found("note", given, known, why, "NCCL_DEBUG=WARN once the job runs well")]
    return []


def _unknown(given: Given, version: Version | None) -> Finding:
    upper = given.name.upper()
    if upper in variables():
        why, fix = "the names of variables are in capitals: NCCL does not see it", f"{upper}={given.value}"
        return Finding("wrong", given.name, given.value, given.where, variables()[upper].does, why, fix, PAGE)
    near = difflib.get_close_matches(upper, variables(), n=1, cutoff=0.75)
    newer = version is not None and version[:2] > NEWEST
    why = "NCCL knows no such variable, and passes it over in silence"
    if newer and not near:
        assert version is not None
        why = f"unknown up to NCCL {shown(NEWEST)}; the NCCL in use, {shown(version)}, is newer"
        return Finding("note", given.name, given.value, given.where, "", why, "look it up on NCCL's page", PAGE)
    fix = f"did you mean {near[0]} ({variables()[near[0]].does})?" if near else "take it out"
    return Finding("wrong", given.name, given.value, given.where, "", why, fix, PAGE)


def _gone(given: Given, known: Variable, version: Version | None) -> Finding:
    if known.kind == "torch":
        why = f"it was torch's, and is called {known.now} since torch 2.2; NCCL never read it"
        return found("wrong", given, known, why, f"{known.now}={given.value}")
    used = f"; the NCCL in use is {shown(version)}" if version else ""
    if known.state == "removed":
        why = f"removed in NCCL {shown(known.changed)}, which passes it over{used}"
        return found("wrong", given, known, why, "take it out")
    why = f"replaced by {known.now} in NCCL {shown(known.changed)}, which passes the old one over{used}"
    value = "LOC" if given.name == "NCCL_IB_CUDA_SUPPORT" and given.value == "0" else given.value
    value = "SYS" if given.name == "NCCL_IB_CUDA_SUPPORT" and given.value == "1" else value
    return found("wrong", given, known, why, f"{known.now}={value}")
