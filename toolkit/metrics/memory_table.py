"""Format `metrics/memory.json`, the memory of a training step, predicted and measured. Standard library only."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.units import format_bytes_in

__all__ = ["MEMORY_FILE", "lines_of_memory"]

MEMORY_FILE = "memory.json"


def lines_of_memory(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table for each rank: the peak of the step and of its phases, and the parts."""
    mesh = " x ".join(f"{name} {ranks}" for name, ranks in report["mesh"].items() if ranks > 1) or "one rank"
    yield f"{mesh}, micro_batch {report['micro_batch']}; torch {report['torch']}"
    for rank in report["ranks"]:
        title = f"rank {rank['rank']} on {rank['host']}, {rank['device']}"
        yield f"{title:36}{'predicted':>14}{'measured':>14}{'error':>9}"
        for before, table in (("peak", {"": rank["peak"]}), ("peak in ", rank["phases"]), ("", rank["parts"])):
            for name, size in table.items():
                predicted, measured = size["predicted"], size["measured"]
                if predicted is None and measured is None:
                    continue
                error = f"{100 * (predicted / measured - 1):+7.1f} %" if predicted is not None and measured else ""
                yield f"  {before + name:34}{_mib(predicted)}{_mib(measured)}{error:>9}".rstrip()
        if rank["why_not"]:
            yield f"  not predicted: {rank['why_not']}"


def _mib(size: int | None) -> str:
    return f"{'-' if size is None else format_bytes_in(size, 'MiB', digits=1):>14}"
