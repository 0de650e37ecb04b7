"""Store the proof of a site file: results, date and Slurm version of its probe jobs. It is valid until the file changes."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.config.site import Site
from toolkit.errors import ToolkitError
from toolkit.rundir.files import typed_path, write_text
from toolkit.site.findings import BAD, Finding
from toolkit.version import VERSION

__all__ = ["Proof", "checked_in_words", "make_proof", "save_proof"]

# Keys that do not affect the verification, such as scheduler.conf, which SLURM_CONF may override.
_NOT_PROVED = frozenset({"contact", "docs", "checked", "scheduler.conf"})
OWN_PROOFS = "~/.config/toolkit/proofs"


@dataclass(frozen=True)
class Proof:
    """A proof: `partitions` has the findings for each probed partition, `digest` is that of the site at that time."""

    site: str
    file: str
    digest: str
    date: str
    slurm: str
    cluster: str
    toolkit: str
    partitions: dict[str, list[Finding]]

    @property
    def failed(self) -> list[str]:
        """The names of the partitions that did not pass."""
        return [name for name, found in self.partitions.items() if any(one.state in BAD for one in found)]


def digest_of(site: Site) -> str:
    """Return the SHA-256 of all values that a proof covers, including those of extended sites."""
    values = {key: value for key, value in site.values() if key not in _NOT_PROVED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def make_proof(site: Site, *, slurm: str, cluster: str, partitions: dict[str, list[Finding]]) -> Proof:
    return Proof(
        site=site.name, file=str(site.file.resolve()), digest=digest_of(site), date=datetime.now(UTC).date().isoformat(),
        slurm=slurm, cluster=cluster, toolkit=VERSION, partitions=partitions,
    )  # fmt: skip


def save_proof(proof: Proof) -> Path | None:
    """Write a proof next to its site file, or to the user's own proofs if that folder is not writable; return the path.

    Earlier findings are kept for partitions whose probe did not run this time, if they are for the same site file and
    Slurm version. Return None if no probe ran.

    Raises:
        ToolkitError: the proof cannot be written.
    """
    file = Path(proof.file)
    shipped = file.parent in [Path(folder).resolve() for folder in import_module("toolkit.site_configs").__path__]
    beside = not shipped and os.access(file.parent, os.W_OK)
    path = _beside(file) if beside else _among_own(proof.site)
    ran = {name: found for name, found in proof.partitions.items() if all(one.state != "unknown" for one in found)}
    if not ran:
        return None
    older = _read(path)
    same = older is not None and (older.digest, older.slurm, older.file) == (proof.digest, proof.slurm, proof.file)
    proof = replace(proof, partitions={**(older.partitions if older is not None and same else {}), **ran})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(proof), indent=1, ensure_ascii=False) + "\n", mode=0o644)
    except OSError as error:
        raise ToolkitError(
            f"cannot write the proof: {error.strerror}", where=str(path), fix="make the folder writable"
        ) from error
    return path


def proof_of(site: Site) -> Proof | None:
    """Return the newest proof of a site file, even if it is no longer valid; None if there is none."""
    found = [_read(path) for path in (_beside(site.file.resolve()), _among_own(site.name))]
    ours = [proof for proof in found if proof is not None and proof.file == str(site.file.resolve())]
    return max(ours, key=lambda proof: proof.date, default=None)


def checked_in_words(site: Site) -> str:
    """Return the state of the verification for `site list`, from the proof, or else from the key `checked`."""
    proof = proof_of(site)
    if proof is None:
        return site.checked or "not checked"
    when = f"{proof.date}, Slurm {proof.slurm}"
    if proof.digest != digest_of(site):
        return f"changed since {when}"
    if proof.failed:
        return f"failed {when}: {', '.join(proof.failed)}"
    left = [name for name in site.partitions if name not in proof.partitions]
    of = f" ({len(proof.partitions)} of {len(proof.partitions) + len(left)} partitions)" if left else ""
    return f"checked {when}{of}"


def _beside(file: Path) -> Path:
    return file.with_suffix(".proof.json")


def _among_own(name: str) -> Path:
    return typed_path(OWN_PROOFS) / f"{name}.json"


def _read(path: Path) -> Proof | None:
    """Return the proof in a file; None if it is missing, damaged, or in the format of another version."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        partitions = {name: _findings(found) for name, found in value.pop("partitions").items()}
        return Proof(**value, partitions=partitions)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _findings(found: Sequence[dict[str, Any]]) -> list[Finding]:
    return [Finding(**one) for one in found]
