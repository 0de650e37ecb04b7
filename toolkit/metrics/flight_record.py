"""Compare the collectives in the flight recorders of all ranks. Standard library only."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.metrics.verdicts import names_of_ranks

__all__ = ["disagreements"]

_LATE_S = 1.0  # ranks of a healthy job may be in different collectives for this time
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")


def disagreements(records: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yield for each process group the first collective in which its ranks differ, or that a rank has not entered."""
    groups: dict[tuple[str, str], dict[int, dict[int, Any]]] = {}
    for rank, record in records.items():
        for entry in record["entries"]:
            if not entry["is_p2p"]:
                group = groups.setdefault((entry["process_group"][0], entry["process_group"][1]), {})
                group.setdefault(rank, {})[entry["collective_seq_id"]] = entry
    for (name, title), ranks in groups.items():
        if title == "default_pg":
            ranks = {rank: ranks.get(rank, {}) for rank in records}
        of_group = f"of process group {name} ({title})"
        newest = {rank: max(entries, default=0) for rank, entries in ranks.items()}
        for number in sorted(set.intersection(*map(set, ranks.values()))):
            calls: dict[str, list[int]] = {}
            for rank in sorted(ranks):
                calls.setdefault(_call(ranks[rank][number]), []).append(rank)
            if len(calls) > 1:
                who = "; ".join(f"{names_of_ranks(members)}: {call}" for call, members in calls.items())
                yield f"collective {number} {of_group} differs: {who}"
                break
        else:
            number = min(newest.values()) + 1
            late = sorted(rank for rank in ranks if newest[rank] < number)
            waiting = {rank: ranks[rank][number] for rank in sorted(ranks) if number in ranks[rank]}
            waited_s = [
                (records[rank]["time_ns"] - one["time_created_ns"]) / 1e9
                for rank, one in waiting.items()
                if not one["retired"]
            ]
            if waited_s and max(waited_s) > _LATE_S:
                call = _call(next(iter(waiting.values())))
                yield (
                    f"{names_of_ranks(late)} did not enter collective {number} {of_group}, {call}, in which "
                    f"{names_of_ranks(waiting)} waits for {max(waited_s):.0f} s"
                )


def _call(entry: Mapping[str, Any]) -> str:
    """Return what all ranks of a collective must have in common, such as "all_reduce of Float [4]"."""
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    sizes = ", ".join(f"{kind} {size}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False))
    return f"{name} of {sizes}" if name in _SAME_SIZES else name
