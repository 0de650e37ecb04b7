"""What is known of one variable of NCCL's, and of NCCL's versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import ToolkitError

Version = tuple[int, ...]
# system: part of a site's configuration. tuning: NCCL's page has it below "Debugging", and sites set it with a reason.
# debug: to find or go round a fault, and to be taken out afterwards. undocumented: NCCL reads it, its page is silent.
# torch: read by torch, never by NCCL.
Kind = Literal["system", "tuning", "debug", "undocumented", "torch"]
State = Literal["", "removed", "renamed", "deprecated"]

PAGE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
TORCH_PAGE = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
# Sections of the page that are not called as the variable alone.
_SECTIONS = {
    "NCCL_NET_GDR_LEVEL": "nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
    "NCCL_IB_GDR_LEVEL": "nccl-net-gdr-level-formerly-nccl-ib-gdr-level",
    "NCCL_MAX_NRINGS": "nccl-max-nchannels",
    "NCCL_MIN_NRINGS": "nccl-min-nchannels",
}
_VERSION = re.compile(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?(?:[-+.U][\w.+-]*)?", re.ASCII)
_CODE = re.compile(r"([0-9])([0-9]{2})([0-9]{2})|([0-9])([0-9])([0-9]{2})", re.ASCII)


@dataclass(frozen=True)
class Variable:
    """One row of the table. `since` and `changed` are versions of NCCL, empty when nothing says.

    `form` is the values' type: `0..1` and `1..` are whole numbers, `64/128` some of them, `bytes` a size; `word:A/B`
    is one of these words, `list:A/B` several; other names are types of their own (`values` has them).
    """

    name: str
    since: Version
    kind: Kind
    form: str
    default: str
    does: str
    state: State = ""
    changed: Version = ()
    now: str = ""  # the variable to use in its place

    @property
    def source(self) -> str:
        """Where this is documented."""
        if self.kind == "torch":
            return TORCH_PAGE
        if self.kind == "undocumented":
            return PAGE
        return f"{PAGE}#{_SECTIONS.get(self.name) or self.name.lower().replace('_', '-')}"


def parse_version(text: str, where: str) -> Version:
    """A version as NCCL (2.21.5, 2.31.2+cuda12.9), its packages (2.26.2.post1) or its number (22105) write it.

    Raises:
        ToolkitError: it is none.
    """
    text = text.strip()
    if match := _VERSION.fullmatch(text):
        return tuple(int(part) for part in match.groups() if part is not None)
    if match := _CODE.fullmatch(text):
        return tuple(int(part) for part in match.groups() if part is not None)
    raise ToolkitError(f"{text!r} is no version of NCCL", where=where, fix="give it as 2.21.5")


def shown(version: Version) -> str:
    """The version as people write it."""
    return ".".join(map(str, version))


def before(version: Version | None, other: Version) -> bool:
    """Whether `version` is known and older; 2.4 is any 2.4.x, since the page often names no more."""
    return version is not None and bool(other) and version[: len(other)] < other
