"""Describe characters outside ASCII in sbatch options, which sbatch rejects, and what to write instead."""

import re
import unicodedata

__all__ = ["described", "instead_of", "odd_character"]

_ODD = re.compile(r"[^\t -~]")
# The values that sbatch passes on unread, in which any character is valid (checked against 22.05).
_FREE = frozenset({
    "bb", "bbf", "chdir", "comment", "container", "container-id", "error", "export", "export-file", "extra",
    "input", "job-name", "mail-user", "mcs-label", "network", "nodefile", "output", "wckey", "wrap",
})  # fmt: skip
# Names that the cluster defines, which may contain letters of any alphabet.
_NAMES = frozenset({
    "account", "cluster", "clusters", "constraint", "exclude", "gpus", "gpus-per-node", "gpus-per-task", "gres",
    "licenses", "nodelist", "partition", "prefer", "qos", "reservation",
})  # fmt: skip


def odd_character(value: str, name: str = "") -> str:
    """Return the first character that sbatch rejects in a value of --`name`, or without `name` in an option; else ""."""
    found = [] if name in _FREE else _ODD.findall(value)
    return next((one for one in found if name not in _NAMES or not one.isalnum()), "")


def described(character: str) -> str:
    """Return the code point and the name of a character, such as "U+00A0 (no-break space)"."""
    if "\udc80" <= character <= "\udcff":  # of `surrogateescape`
        return f"byte {ord(character) - 0xDC00:#04x}, which is not UTF-8"
    name = unicodedata.name(character, "control character" if ord(character) < 0xA0 else "unassigned")
    return f"U+{ord(character):04X} ({name.lower()})"


def instead_of(character: str, *, begins_option: bool = False) -> str:
    """Return what to do about a character; `begins_option` is true for the first one of an argument."""
    if "\udc80" <= character <= "\udcff":  # most often of an editor on Windows
        character = bytes([ord(character) - 0xDC00]).decode("cp1252", "replace")
    kind, plain = unicodedata.category(character), unicodedata.normalize("NFKC", character).strip()
    if kind == "Zs":
        return "write a space instead"
    if kind == "Pd" or character == "\u2212":
        return f"write {'--' if begins_option else '-'} instead"
    if kind in ("Pi", "Pf") or character in "\u201a\u201e\u2032\u2033":
        return f"write {chr(39) if character in _SINGLE else chr(34)} instead"
    return f"write {plain} instead" if len(plain) == 1 and " " < plain <= "~" else "remove it"


_SINGLE = "\u2018\u2019\u201a\u201b\u2032\u2039\u203a"
