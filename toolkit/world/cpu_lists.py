"""CPU lists and masks in Linux's formats: "0-3,8" and "00000000,0000010f"."""

import re
from collections.abc import Iterable

__all__ = ["LARGEST_CPU", "cpu_list", "read_cpu_list", "read_cpu_mask"]

_LIST = re.compile(r"[0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*", re.ASCII)
_MASK = re.compile(r"(?:0x)?[0-9a-f]{1,8}(?:,(?:0x)?[0-9a-f]{8})*", re.ASCII)
LARGEST_CPU = 65535  # Linux supports far fewer; a larger one is malformed, such as two numbers that lack their comma


def read_cpu_list(text: str) -> tuple[int, ...] | None:
    """Return the CPUs of an ascending list, () for an empty string; None if the list is invalid."""
    if not text.strip():
        return ()
    if not _LIST.fullmatch(text.strip()):
        return None
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if (
            low > high
            or high > LARGEST_CPU
            or (cpus and low <= cpus[-1])
            or part != str(low) + f"-{high}" * ("-" in part)
        ):
            return None
        cpus.extend(range(low, high + 1))
    return tuple(cpus)


def cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs as a list with ranges, like the kernel."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)


def read_cpu_mask(text: str) -> tuple[int, ...] | None:
    """Return the CPUs of a mask; None if the mask is invalid."""
    if not _MASK.fullmatch(text.strip()):
        return None
    bits = bin(int(text.replace("0x", "").replace(",", "").strip(), 16))[:1:-1]
    return tuple(cpu for cpu, bit in enumerate(bits) if bit == "1")
