"""Check environment variables for NCCL against the NCCL version that reads them."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from operator import eq, ge, gt, le, lt, ne

from toolkit.topology.nccl.device_lists import check_gloo, check_list
from toolkit.topology.nccl.finding import Finding, Given, effective, finding_of
from toolkit.topology.nccl.values import as_c_reads, check_value
from toolkit.topology.nccl.variables import (
    PAGE,
    Rule,
    Variable,
    Version,
    is_before,
    newest_release,
    rules,
    variables,
    version_text,
)

__all__ = ["Here", "is_ours", "lint"]

# Similarity ratios of difflib: a name counts as misspelled from the first one, and may be misspelled from the second.
# 6 of the 166 undocumented names that NCCL 2.14 to 2.32 read exceed the first ratio, so the table lists these 6.
_MISSPELLED, _SIMILAR = 0.9, 0.75
_KEEP = "keep this variable only if the documentation of your site or vendor requests it"
_REMOVE = "remove this variable"
_FIX_CAUSE = "fix the problem that this variable works around"


def is_ours(name: str) -> bool:
    """Return whether a name has the prefix NCCL_, or a misspelling of it."""
    return _has_prefix(name) or bool(re.fullmatch(r"(NCLL|NCC|NNCL|NCLC|NCCCL)_[A-Z0-9_]+", name.upper()))


def _has_prefix(name: str) -> bool:
    return name.upper().startswith("NCCL_")


def check_name(given: Given, version: Version | None) -> list[Finding]:
    """Return findings about a variable that do not depend on its value."""
    known = variables().get(given.name)
    if known is None:
        return [_unknown(given, version)]
    if known.state in ("removed", "renamed") and not is_before(version, known.changed):
        return [_removed(given, known, version)]
    if is_before(version, known.since):
        assert version is not None
        since = version_text(known.since)
        why = f"available since NCCL {since}, but the NCCL in use is {version_text(version)}, which ignores it"
        return [finding_of("wrong", given, known, why, f"remove {given.name}, or use NCCL {since} or newer")]
    if known.state == "deprecated" and not is_before(version, known.changed):
        why = f"deprecated since NCCL {version_text(known.changed)} in favor of {known.now}"
        return [finding_of("note", given, known, why, f"set {known.now} instead")]
    if known.kind == "undocumented":
        return [finding_of("note", given, known, f"{_undocumented()}: any release may change or remove it", _KEEP)]
    return []


def _undocumented() -> str:
    return f"not documented in NCCL {version_text(newest_release())}"


def check_left_on(given: Given, known: Variable) -> list[Finding]:
    """Return findings about debugging variables that are still set, and about values that only repeat the default."""
    if not given.value.strip() or known.kind not in ("debug", "tuning"):
        return []
    if given.value.upper() == known.default.upper():
        why = "the value is the default, but a later NCCL may have a better one"
        return [finding_of("note", given, known, why, _REMOVE)]
    if known.form == "0..1" and known.kind == "debug" and as_c_reads(given.value) == 0:
        return [finding_of("note", given, known, "0 is the default", _REMOVE)]
    if known.kind == "debug":
        why = f"for debugging only: {known.harm or 'this variable prevents NCCL from choosing by itself'}"
        return [finding_of("wrong", given, known, why, f"{_REMOVE}; {known.instead or _FIX_CAUSE}")]
    why = "the NCCL documentation lists this variable for experiments; a later NCCL may choose a better value"
    return [finding_of("note", given, known, why, "keep it if a measurement or the site's documentation requires it")]


def _unknown(given: Given, version: Version | None) -> Finding:
    """Return a finding about a name that is not in the table.

    A misspelling has no effect, so its level is `wrong`. Any other name may be an undocumented variable that NCCL reads,
    so its level is `note`.
    """
    upper = given.name.upper()
    if upper in variables():
        why, fix = "NCCL ignores this name, because its variables are uppercase", f"{upper}={given.value}"
        return Finding("wrong", given.name, given.value, given.where, variables()[upper].does, why, fix, PAGE)
    similar = difflib.get_close_matches(upper, variables(), n=1, cutoff=_SIMILAR)
    question = f"did you mean {similar[0]} ({variables()[similar[0]].does})?" if similar else ""
    misspelled = difflib.get_close_matches(upper, similar, n=1, cutoff=_MISSPELLED)
    if misspelled or not _has_prefix(given.name):
        why = "NCCL does not have this variable, and ignores it without a message"
        return Finding("wrong", given.name, given.value, given.where, "", why, question or _REMOVE, PAGE)
    why = f"{_undocumented()}: NCCL ignores names that it does not know, without a message"
    if version is not None and version[:2] > newest_release():
        why = f"{_undocumented()}; the NCCL in use, {version_text(version)}, is newer"
    return Finding("note", given.name, given.value, given.where, "", why, question or f"check its name; {_KEEP}", PAGE)


def _removed(given: Given, known: Variable, version: Version | None) -> Finding:
    if known.kind == "torch":
        why = f"torch 2.2 renamed this variable to {known.now}; NCCL never read it"
        return finding_of("wrong", given, known, why, f"{known.now}={given.value}")
    used = f"; the NCCL in use is {version_text(version)}" if version else ""
    changed = version_text(known.changed)
    if known.state == "removed":
        return finding_of("wrong", given, known, f"removed in NCCL {changed}, which ignores it{used}", _REMOVE)
    why = f"replaced by {known.now} in NCCL {changed}, which ignores the old name{used}"
    level_of_flag = {"0": "LOC", "1": "SYS"} if given.name == "NCCL_IB_CUDA_SUPPORT" else {}
    return finding_of("wrong", given, known, why, f"{known.now}={level_of_flag.get(given.value, given.value)}")


_CONDITION = re.compile(r"(?P<unset>!)?(?P<names>[A-Z0-9_*]+)(?:(?P<sign>!?~|!=|<=|>=|=|<|>)(?P<value>.*))?")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


def check_together(givens: Mapping[str, Given], version: Version | None) -> list[Finding]:
    """Return the findings of all rules about combinations of known variables, in the order of the table."""
    settings = _Settings({name: given for name, given in givens.items() if name in variables()})
    return [finding for rule in rules() for finding in settings.findings(rule, version)]


@dataclass(frozen=True)
class _Settings:
    """The settings of known variables."""

    givens: Mapping[str, Given]

    def findings(self, rule: Rule, version: Version | None) -> Iterator[Finding]:
        is_other_release = (rule.before and not is_before(version, rule.before)) or is_before(version, rule.since)
        if is_other_release or not all(self._holds(condition) for condition in rule.when):
            return
        for name in self._about(rule):
            why, fix = (re.sub("{([A-Z0-9_*]+)}", lambda match: self._shown(match[1]), text) for text in rule.advice)
            yield finding_of(rule.level, self.givens[name], variables()[name], why, fix)

    def _about(self, rule: Rule) -> Sequence[str]:
        """Return the variables of a rule that are set; its patterns do not match variables in its conditions."""
        named = {name for condition in rule.when for name in re.findall("NCCL_[A-Z0-9_]+", condition)}
        return [
            name
            for pattern in rule.variables
            for name in self.givens
            if self._is_set(name) and (name == pattern or (fnmatchcase(name, pattern) and name not in named))
        ]

    def _holds(self, condition: str) -> bool:
        parts = _CONDITION.fullmatch(condition)
        assert parts is not None, condition
        names, sign, value = parts["names"], parts["sign"], parts["value"]
        if sign is None:
            return self._is_set(names) != bool(parts["unset"])
        if sign.endswith("~"):
            is_match = re.fullmatch(value, self._value(names).strip(), re.IGNORECASE | re.DOTALL) is not None
            return is_match != sign.startswith("!")
        return _COMPARISONS[sign](self._number(names), self._number(value))

    def _is_set(self, name: str) -> bool:
        return name in self.givens and bool(self.givens[name].value.strip())

    def _value(self, name: str) -> str:
        """Return the value of a variable, or its default in NCCL."""
        return self.givens[name].value if self._is_set(name) else variables()[name].default

    def _number(self, term: str) -> int:
        """Return the value of a term: a constant, a variable or a product of variables."""
        return prod(as_c_reads(self._value(part) if part in variables() else part) for part in term.split("*"))

    def _shown(self, term: str) -> str:
        return str(self._number(term)) if "*" in term else self._value(term)


@dataclass(frozen=True)
class Here:
    """The devices of this node, None if unknown. If `sure`, ranks run on such nodes: a missing device is an error."""

    interfaces: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    sure: bool = False


def lint(givens: Sequence[Given], version: Version | None, here: Here | None = None) -> list[Finding]:
    """Return all findings, those of level `wrong` first, and within a level in the order of `givens`.

    Args:
        givens: the settings; if a name occurs several times, the first setting is effective.
        version: the version of NCCL; None, if unknown, means the newest release in the table.
    """
    here = here or Here()
    settings = effective([given for given in givens if is_ours(given.name)])
    findings: list[Finding] = []
    readable: dict[str, Given] = {}  # rules about combinations only apply to values that NCCL reads correctly
    for name, given in settings.items():
        misread, others = _of_text(given, version), _of_use(given, here)
        if all(finding.level == "note" for finding in misread):
            readable[name] = given
            # For a deprecated or undocumented variable, one note is enough.
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
    """Return findings about the name, and about a value that NCCL does not read as written."""
    of_name = check_name(given, version)
    known = variables().get(given.name)
    if known is None or any(finding.level == "wrong" for finding in of_name):
        return of_name
    of_value = check_value(given, known, version)
    if known.form == "secret":
        of_value = [replace(finding, value="(not shown)") for finding in of_value]
    return of_name + of_value


def _of_use(given: Given, here: Here) -> list[Finding]:
    """Return findings about device names, and about variables that should not stay set."""
    known = variables().get(given.name)
    if known is None:
        return []
    if known.form in ("adapters", "interfaces"):
        devices = here.adapters if known.form == "adapters" else here.interfaces
        return check_list(given, known, devices, sure=here.sure)
    return check_left_on(given, known)
