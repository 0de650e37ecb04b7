"""What the names of RDMA devices and network interfaces tell of a list that holds them: that a part of it is lost.

udev and sites may choose any name, so that all of this is a suspicion: it is said, and the name is kept.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

# How drivers and systemd.net-naming-scheme(7) name devices, by how the names begin.
_FORMS = {
    "mlx": re.compile(r"mlx[45]_(?:[a-zA-Z]\w*)?[0-9]+"),
    "hfi1": re.compile("hfi1_[0-9]+"),
    "bnxt": re.compile(r"bnxt_re(?:_?[a-z]\w*)?[0-9]+"),
    "irdma": re.compile("irdma[0-9]+"),
    "cxi": re.compile("cxi[0-9]+"),
    "rdmap": re.compile("rdmap[0-9]+s[0-9]+(?:-.*)?"),
    "en": re.compile(
        r"en(?:o[0-9]+|x[0-9a-f]{12}|(?:P[0-9]+)?(?:p[0-9]+)?s[0-9]+|p[0-9]+)(?:f[0-9]+)?(?:d[0-9]+)?(?:np?[0-9]+)?"
        r"(?:v[0-9]+)?(?:r[0-9]+)?(?:[.:@].*)?"
    ),
    "bond": re.compile(r"bond[0-9]+(?:[.:].*)?"),
}
_TAIL_OF_A_SLOT = re.compile(r".*(?:s[0-9]+f?[0-9]*|np[0-9]+)")
_COUNTED = re.compile("((?:mlx[45]_|irdma|hfi1_|bnxt_re|cxi))([0-9]+)")


def is_odd_device(name: str) -> bool:
    """Whether a name begins as those of a common driver do and goes on as none does, or lost how it begins."""
    forms = [form for begin, form in _FORMS.items() if name.startswith(begin)]
    return (bool(forms) and not any(form.fullmatch(name) for form in forms)) or not name[0].isalpha()


def is_left_of(short: str, long: str) -> bool:
    """Whether `short` is `long` without some of its letters."""
    letters = iter(long)
    return all(letter in letters for letter in short)


def odd_ones(names: Sequence[str]) -> list[int]:
    """The places of names that are others' names without some letters."""
    stems = [re.sub("[0-9]", "", name) for name in names]

    def is_whole(name: str) -> bool:
        return any(name.startswith(begin) and form.fullmatch(name) for begin, form in _FORMS.items())

    odd = []
    for place, name in enumerate(names):
        if is_whole(name) or name.startswith(("en", "ib", "et", "ro")):
            continue
        others = {stem for stem in stems if len(stem) > len(stems[place])}
        if _TAIL_OF_A_SLOT.fullmatch(name) or any(is_left_of(stems[place], stem) for stem in others):
            odd.append(place)
    return odd


def out_of_order(names: Sequence[str]) -> int | None:
    """The place of the first name that a sorted list would not have there, neither as text nor by number."""
    if list(names) in (sorted(names), sorted(names, key=_by_number)):
        return None
    return next(place for place in range(1, len(names)) if _by_number(names[place - 1]) > _by_number(names[place]))


def after_a_gap(names: Sequence[str]) -> list[int]:
    """The places of devices whose number does not follow that of the one before (mlx5_3 behind mlx5_1)."""
    counted = [
        (place, match[1], int(match[2])) for place, name in enumerate(names) if (match := _COUNTED.fullmatch(name))
    ]
    if any(name.startswith("mlx5_bond_") for name in names):
        return []  # the ports of a bond have no names of their own
    counted.sort(key=lambda entry: entry[1:])
    return [
        place
        for (_, before, lower), (place, begin, number) in itertools.pairwise(counted)
        if before == begin and number > lower + 1
    ]


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name) if part]
