"""Define the result of a check: the place, the message with value and limit, the fix."""

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError
from toolkit.metrics.verdicts import Severity

__all__ = ["About", "Finding"]

_TERMS = {Severity.CRITICAL: "refusal", Severity.WARNING: "warning", Severity.INFO: "note"}


@dataclass(frozen=True)
class Finding:
    """`check` is a stable name; docs/preflight.md lists them. `where` is file:line:key, a flag or a path.

    CRITICAL: the job cannot succeed. WARNING: a mistake is likely. INFO: a fact, printed only on request.
    """

    check: str
    severity: Severity
    where: str
    what: str
    fix: str

    def as_error(self) -> ToolkitError:
        return ToolkitError(self.what, where=self.where, fix=self.fix)

    @property
    def term(self) -> str:
        """The severity in the terms of preflight: "refusal", "warning" or "note"."""
        return _TERMS[self.severity]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"severity": self.term}


@dataclass(frozen=True)
class About:
    """Creates the findings of one check on a job."""

    job: ResolvedJob
    check: str

    def refuse(self, key: str, what: str, fix: str) -> Finding:
        return self._finding(Severity.CRITICAL, key, what, fix)

    def warn(self, key: str, what: str, fix: str) -> Finding:
        return self._finding(Severity.WARNING, key, what, fix)

    def note(self, key: str, what: str, fix: str) -> Finding:
        return self._finding(Severity.INFO, key, what, fix)

    def _finding(self, severity: Severity, key: str, what: str, fix: str) -> Finding:
        """Return a finding; `key` is a key of the job file, or another place such as a path."""
        where = self.job.origin(key).place(key) if "." in key and "/" not in key else key
        return Finding(self.check, severity, where, what, fix)
