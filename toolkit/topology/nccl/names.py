"""Checks of a variable's name: is it known to the NCCL in use, and is it safe to leave set?"""

from __future__ import annotations

import difflib
import re

from toolkit.topology.nccl.finding import Finding, Given, finding_of
from toolkit.topology.nccl.values import as_c_reads
from toolkit.topology.nccl.variables import PAGE, Variable, Version, is_before, newest_release, variables, version_text

# Similarity of difflib. From the first on, a name is a misspelling; from the second on, it may be one. Of the 166 names
# that NCCL 2.14 to 2.32 read without documenting them, 6 are above the first: they are in the table.
_MISSPELLED, _SIMILAR = 0.9, 0.75
_KEEP = "keep it only if the documentation of your site or vendor requests it"
_FIX_CAUSE = "fix the problem that it works around"
# Variables that cost speed or hide a fault if they stay set: the effect on a job, and the alternative.
_HARM = {
    "NCCL_P2P_DISABLE": (
        "GPUs of a node communicate through host memory, and NVLink is unused",
        "fix P2P (ACS, IOMMU, drivers)",
    ),
    "NCCL_SHM_DISABLE": ("ranks of a node without P2P communicate over the network", "enlarge /dev/shm"),
    "NCCL_IB_DISABLE": ("traffic between nodes uses TCP", "fix the fabric, or choose adapters with NCCL_IB_HCA"),
    "NCCL_NVB_DISABLE": ("GPUs without a direct link communicate over PCIe", _FIX_CAUSE),
    "NCCL_PXN_DISABLE": (
        "traffic between rails crosses the upper switches, and alltoall sends more and smaller messages",
        _FIX_CAUSE,
    ),
    "NCCL_P2P_DIRECT_DISABLE": ("each message is copied once more", _FIX_CAUSE),
    "NCCL_ALGO": ("NCCL cannot choose by size and call", "report the slow choice, and tune with a plugin"),
    "NCCL_PROTO": (
        "NCCL cannot choose by size, and LL128 corrupts data on hardware that does not support it",
        "exclude one protocol (^LL128) for as long as you suspect it",
    ),
    "NCCL_CHECK_POINTERS": ("each call checks its pointers", "use it in a test"),
    "NCCL_CHECK_MODE": ("each call checks its arguments, with DEBUG_GLOBAL across all ranks", "use it in a test"),
    "NCCL_LAUNCH_MODE": ("GROUP is deprecated since 2.9 and may be removed", "use one process for each GPU"),
}


def is_ours(name: str) -> bool:
    """Whether a name is a variable of NCCL's, or a misspelling of that prefix."""
    return _has_prefix(name) or bool(re.fullmatch(r"(NCLL|NCC|NNCL|NCLC|NCCCL)_[A-Z0-9_]+", name.upper()))


def _has_prefix(name: str) -> bool:
    return name.upper().startswith("NCCL_")


def check_name(given: Given, version: Version | None) -> list[Finding]:
    """Findings about a variable that do not depend on its value."""
    known = variables().get(given.name)
    if known is None:
        return [_unknown(given, version)]
    if known.state in ("removed", "renamed") and not is_before(version, known.changed):
        return [_removed(given, known, version)]
    if is_before(version, known.since):
        assert version is not None
        since = version_text(known.since)
        why = f"NCCL has it since {since}; the NCCL in use, {version_text(version)}, ignores it"
        return [finding_of("wrong", given, known, why, f"remove it, or use NCCL {since} or newer")]
    if known.state == "deprecated" and not is_before(version, known.changed):
        why = f"deprecated since NCCL {version_text(known.changed)} in favor of {known.now}"
        return [finding_of("note", given, known, why, f"set {known.now} instead")]
    if known.kind == "undocumented":
        return [finding_of("note", given, known, f"{_undocumented()}: any release may change or remove it", _KEEP)]
    return []


def _undocumented() -> str:
    return f"unknown to the documentation of NCCL {version_text(newest_release())}"


def check_left_on(given: Given, known: Variable) -> list[Finding]:
    """Findings about debugging variables, and about values that only repeat the default."""
    if given.name == "NCCL_DEBUG":
        return _debug(given, known)
    if not given.value.strip() or known.kind not in ("debug", "tuning"):
        return []
    if given.value.upper() == known.default.upper():
        why = "this is the default, and a later NCCL may have a better one"
        return [finding_of("note", given, known, why, "remove it")]
    if known.form == "0..1" and known.kind == "debug" and as_c_reads(given.value) == 0:
        return [finding_of("note", given, known, "0 is the default", "remove it")]
    if known.kind == "debug":
        harm, alternative = _HARM.get(given.name, ("NCCL cannot choose by itself", _FIX_CAUSE))
        return [finding_of("wrong", given, known, f"for debugging only: {harm}", f"remove it; {alternative}")]
    why = "NCCL's page lists it among the variables for experiments: a later NCCL may choose better"
    return [finding_of("note", given, known, why, "keep it if a measurement or the site's documentation requires it")]


def _debug(given: Given, known: Variable) -> list[Finding]:
    level = given.value.upper()
    if level == "TRACE":
        why = "TRACE logs every call of every rank, in builds that support it"
        return [finding_of("wrong", given, known, why, "NCCL_DEBUG=WARN, which logs failures only")]
    if level == "INFO":
        why = "INFO logs several hundred lines for each rank at startup"
        return [finding_of("note", given, known, why, "NCCL_DEBUG=WARN as soon as the job runs well")]
    return []


def _unknown(given: Given, version: Version | None) -> Finding:
    """A finding about a name that is not in the table.

    A misspelling has no effect, so it is wrong. Any other name may be one of the variables that NCCL reads without
    documenting them, so it is a note.
    """
    upper = given.name.upper()
    if upper in variables():
        why, fix = "names of variables are uppercase: NCCL ignores it", f"{upper}={given.value}"
        return Finding("wrong", given.name, given.value, given.where, variables()[upper].does, why, fix, PAGE)
    similar = difflib.get_close_matches(upper, variables(), n=1, cutoff=_SIMILAR)
    question = f"did you mean {similar[0]} ({variables()[similar[0]].does})?" if similar else ""
    misspelled = difflib.get_close_matches(upper, similar, n=1, cutoff=_MISSPELLED)
    if misspelled or not _has_prefix(given.name):
        why = "NCCL has no such variable, and ignores it without a message"
        return Finding("wrong", given.name, given.value, given.where, "", why, question or "remove it", PAGE)
    why = f"{_undocumented()}: NCCL ignores names that it does not know, without a message"
    if version is not None and version[:2] > newest_release():
        why = f"{_undocumented()}; the NCCL in use, {version_text(version)}, is newer"
    return Finding("note", given.name, given.value, given.where, "", why, question or f"check its name; {_KEEP}", PAGE)


def _removed(given: Given, known: Variable, version: Version | None) -> Finding:
    if known.kind == "torch":
        why = f"torch 2.2 renamed it to {known.now}; NCCL never read it"
        return finding_of("wrong", given, known, why, f"{known.now}={given.value}")
    used = f"; the NCCL in use is {version_text(version)}" if version else ""
    changed = version_text(known.changed)
    if known.state == "removed":
        return finding_of("wrong", given, known, f"removed in NCCL {changed}, which ignores it{used}", "remove it")
    why = f"replaced by {known.now} in NCCL {changed}, which ignores the old name{used}"
    level_of_flag = {"0": "LOC", "1": "SYS"} if given.name == "NCCL_IB_CUDA_SUPPORT" else {}
    return finding_of("wrong", given, known, why, f"{known.now}={level_of_flag.get(given.value, given.value)}")
