"""Compare the collectives in the flight recorders of all ranks. Standard library only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.metrics.verdicts import names_of_ranks

__all__ = ["Disagreement", "disagreements"]

_LATE_S = 1.0  # ranks of a healthy job may be in different collectives for this time
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")


@dataclass(frozen=True)
class Disagreement:
    """A collective in which ranks differ, in one line. `ranks` are those that differ from most; () if there is no majority."""

    cause: str  # "late" or "differs"
    ranks: tuple[int, ...]
    line: str


def disagreements(records: Mapping[int, Mapping[str, Any]]) -> Iterator[Disagreement]:
    """Yield for each process group the first collective in which its ranks differ, or that a rank has not entered."""
    groups: dict[str, dict[int, dict[int, Any]]] = {}
    for rank, record in sorted(records.items()):
        for entry in record["entries"]:
            name, title = entry["process_group"]
            ranks = groups.setdefault(name, {one: {} for one in records} if title == "default_pg" else {})
            if not entry["is_p2p"]:
                ranks.setdefault(rank, {})[entry["collective_seq_id"]] = entry
    for group, ranks in groups.items():
        for number in sorted(set.intersection(*map(set, ranks.values()))):
            calls: dict[str, list[int]] = {}
            for rank, entries in ranks.items():
                calls.setdefault(_call(entries[number]), []).append(rank)
            if len(calls) > 1:
                who = "; ".join(f"{names_of_ranks(members)}: {call}" for call, members in calls.items())
                *fewer, most = sorted(calls.values(), key=len)
                minority = sorted(rank for members in fewer for rank in members) if len(fewer[-1]) < len(most) else []
                line = f"collective {number} of process group {group} differs: {who}"
                yield Disagreement("differs", tuple(minority), line)
                break
        else:
            number = 1 + min(max(entries, default=0) for entries in ranks.values())
            inside = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
            late = [rank for rank, entries in ranks.items() if max(entries, default=0) < number]
            waits_s = [(records[rank]["time_ns"] - one["time_created_ns"]) / 1e9 for rank, one in inside.items()]
            if inside and max(waits_s) > _LATE_S and not all(one["retired"] for one in inside.values()):
                yield Disagreement(
                    "late", tuple(late),
                    f"{names_of_ranks(late)} did not enter collective {number} of process group {group}, "
                    f"{_call(next(iter(inside.values())))}; {names_of_ranks(inside)} entered it {max(waits_s):.0f} s ago",
                )  # fmt: skip


def _call(entry: Mapping[str, Any]) -> str:
    """Return what all ranks of a collective must have in common, such as "all_reduce of Float [4]"."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = ", ".join(f"{kind} {size}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False))
    return f"{name} of {sizes}" if name in _SAME_SIZES else name
