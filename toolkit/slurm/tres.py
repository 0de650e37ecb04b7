"""Trackable resources in Slurm's form: `cpu=100,gres/gpu:a100=8,mem=1.5T,node=4`. Memory is counted in MiB."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NUMBER = re.compile(r"([0-9]*\.?[0-9]+)([KMGTP]?)", re.ASCII)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_GPU = re.compile(r"gpu(?::([A-Za-z][\w.-]*))?(?::([0-9]+))?(?:\(.*)?", re.ASCII)


def memory_mib(text: str) -> float | None:
    """MiB of `4000`, `4000M` or `1.5T`; None for `UNLIMITED` and anything that is not a number."""
    match = _NUMBER.fullmatch(text)
    return float(match[1]) * _MIB[match[2]] if match else None


def parse_tres(text: str) -> dict[str, float]:
    """The counts of a list; resources without a number are omitted."""
    return {name: number * (_MIB[unit] if name == "mem" else 1.0) for name, number, unit in _numbers(text)}


def parse_weights(text: str) -> dict[str, float]:
    """Billing weights by lower-case name, from `CPU=1.0,Mem=0.25G,GRES/gpu=16`; `mem` is per MiB."""
    weights = ((name.lower(), number, unit) for name, number, unit in _numbers(text))
    return {name: number / (_MIB[unit] if name == "mem" else 1.0) for name, number, unit in weights}


def _numbers(text: str) -> Iterator[tuple[str, float, str]]:
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if match := _NUMBER.fullmatch(value):
            yield name, float(match[1]), match[2]


def gpus_of(gres: str) -> dict[str, int]:
    """GPUs by type, "" if none is named, from `gpu:a100:4(S:0-1),gpu:v100:2,nvme:1` or `gpu:4`."""
    counts: dict[str, int] = {}
    for entry in re.split(r",(?![^(]*\))", gres):
        match = _GPU.fullmatch(entry.strip())
        if match:
            counts[match[1] or ""] = counts.get(match[1] or "", 0) + int(match[2] or 1)
    return counts
