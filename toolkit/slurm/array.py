"""Parse and write the tasks of a job array in the syntax of sbatch --array: "0-9%2", "0-15:4", "1,3,5-7".

toolkit rejects lists that Slurm 22.05 interprets unexpectedly: "%2" as task 0, repeated numbers, and empty terms.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["FORMS", "ArrayTasks", "array_variables", "parse_array", "write_array"]

FORMS = '"0-9", "0-15:4", "1,3,5-7", each with an optional suffix "%2" for at most 2 tasks at a time'
LARGEST_TASK = 4_000_000  # MaxArraySize in slurm.conf is at most 4000001; the default is 1001

_TERM = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_LIMIT = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class ArrayTasks:
    """The task numbers of an array; `at_once` is the maximum number of concurrent tasks, None for no limit."""

    ranges: tuple[range, ...]
    at_once: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        for numbers in self.ranges:
            yield from numbers


def parse_array(text: str) -> ArrayTasks:
    """Return the tasks of an array; raise ValueError for invalid syntax, repeated or too large numbers."""
    terms, percent, limit = text.partition("%")
    if percent and not _LIMIT.fullmatch(limit):
        raise ValueError(f"expected a number after %, got {text!r}")
    ranges = [_numbers(term, text) for term in terms.split(",")]
    taken = bytearray(max(numbers.stop for numbers in ranges))
    for term, numbers in zip(terms.split(","), ranges, strict=True):
        here = slice(numbers.start, numbers.stop, numbers.step)
        if any(taken[here]):
            raise ValueError(f"{text!r} contains a task twice: {term!r} repeats it")
        taken[here] = b"\1" * len(numbers)
    return ArrayTasks(tuple(ranges), int(limit or 0) or None)  # %0 sets no limit


def array_variables(array: str) -> dict[str, str]:
    """Return the variables that describe a whole array to its tasks, with the values that Slurm would set."""
    tasks, step = sorted(parse_array(array)), re.search(r":(\d+)", array)  # Slurm reports the first step in the string
    values = {"COUNT": len(tasks), "MIN": tasks[0], "MAX": tasks[-1], "STEP": int(step[1]) if step else 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def write_array(numbers: Sequence[int]) -> str:
    """Return ascending task numbers in the syntax of sbatch, such as `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _numbers(term: str, text: str) -> range:
    match = _TERM.fullmatch(term)
    if not match:
        raise ValueError(f"{text!r} is not a valid list of tasks: expected a number or a range, got {term!r}")
    first, step = int(match[1]), int(match[3] or 1)
    last = int(match[2] or first)
    if last < first or step < 1:
        raise ValueError(f"{text!r} is not a valid list of tasks: the range {term!r} is empty")
    if last > LARGEST_TASK:
        raise ValueError(f"{text!r} contains task {last}, but the largest task number in Slurm is {LARGEST_TASK}")
    return range(first, last + 1, step)
