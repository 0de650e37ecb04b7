"""Which all-reduce is the fastest for a size, by measured links; kept in the run directory for its later attempts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.comm.cost.calibration import BUDGET_S, calibrate
from toolkit.comm.cost.lines import Line, Segment
from toolkit.comm.cost.prediction import LINKS, Links, predict
from toolkit.comm.cost.tries import AllReduce, Correction, correct, try_all
from toolkit.comm.peers import Peers
from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json, utc_now, write_json
from toolkit.rundir.layout import RunDirectory

_SHARE_OF_TRIES = 0.4  # of the seconds for a tier
_SHOWN_BYTES = (4 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2)


@dataclass(frozen=True)
class Choice:
    """The links of a layout of ranks, and what follows from them.

    `hosts[n]` has the ranks `nodes[n]` of the group. `tried[algorithm]` has the seconds that small all-reduces took, by
    bytes; `source` says in words where the figures are from.
    """

    hosts: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    algorithms: tuple[str, ...]
    links: Links
    tried: Mapping[str, Mapping[int, float]]
    source: str

    def algorithm(self, size_bytes: int) -> str:
        """The one with the least predicted seconds; the same on every rank."""
        return min(self.algorithms, key=lambda name: self.seconds(name, size_bytes))

    def seconds(self, algorithm: str, size_bytes: int) -> float:
        """Predicted seconds of an all-reduce of so many bytes."""
        correction = self._corrections.get(algorithm)
        seconds = predict(algorithm, size_bytes, self.nodes, self.links)
        return seconds * correction.ratio(size_bytes) if correction else seconds

    @cached_property
    def _corrections(self) -> dict[str, Correction]:
        return correct(self.tried, lambda name, size: predict(name, size, self.nodes, self.links))

    @property
    def line(self) -> str:
        """One line for the user: what is chosen at some sizes, and why."""
        chosen: dict[str, list[str]] = {}
        for size in _SHOWN_BYTES:
            chosen.setdefault(self.algorithm(size), []).append(_size(size))
        said = ", ".join(f"{name} at {' and '.join(sizes)}" for name, sizes in chosen.items())
        return f"{said} ({self.source})"


def choose(
    peers: Peers,
    hosts: Sequence[str],
    algorithms: Sequence[str],
    all_reduce: AllReduce,
    run: RunDirectory | None,
    budget_s: float = BUDGET_S,
) -> Choice:
    """The choice among `algorithms` for this layout: the run's own where it has one, else measured now. Collective.

    Args:
        peers: whose nodes are known, on the CPU.
        hosts: of the nodes, in their order.
        all_reduce: sums a tensor over the peers by the algorithm of that name.
        run: where rank 0 looks for an earlier measurement, and keeps this one; None keeps none.
        budget_s: seconds of measuring for each tier.
    """
    kept = _said_by_first(peers, _read(run.links, hosts, peers.nodes) if run and peers.place == 0 else None)
    if isinstance(kept, dict):
        source = f"measured {kept['time']}"
        return Choice(tuple(hosts), peers.nodes, tuple(algorithms), _links_of(kept), _tried_of(kept), source)
    began = time.monotonic()
    links = calibrate(peers, budget_s)
    tried = try_all(peers, algorithms, all_reduce, budget_s * _SHARE_OF_TRIES)
    source = f"measured in {time.monotonic() - began:.1f} s" + (f"; {kept}" if kept else "")
    choice = Choice(tuple(hosts), peers.nodes, tuple(algorithms), *_said_by_first(peers, (links, tried, source)))
    if run and peers.place == 0:
        write_json(run.links, _as_json(choice))
    return choice


def _said_by_first(peers: Peers, value: Any) -> Any:
    """What place 0 has, on all: ranks that measure see times of their own, and must not choose differently."""
    said = [value]
    dist.broadcast_object_list(said, group=peers.group, group_src=0)
    return said[0]


def _read(path: Path, hosts: Sequence[str], nodes: Sequence[Sequence[int]]) -> dict[str, Any] | str | None:
    """What was kept for this layout; else why it does not serve, None where there is nothing."""
    if not path.exists():
        return None
    try:
        found = read_json(path)
        _links_of(found)
        _tried_of(found)
    except (ToolkitError, KeyError, TypeError, ValueError) as error:
        return f"{path.name} of the run is damaged ({error})"
    if (found.get("hosts"), found.get("nodes")) != (list(hosts), [list(node) for node in nodes]):
        return f"{path.name} of the run is of other nodes"
    return dict(found)


def _as_json(choice: Choice) -> dict[str, Any]:
    return {
        "time": utc_now(),
        "hosts": choice.hosts,
        "nodes": choice.nodes,
        "fold_s_per_byte": choice.links.fold_s_per_byte,
        **{name: [vars(segment) for segment in getattr(choice.links, name).segments] for name in LINKS},
        "tried": choice.tried,
        "chosen": {str(size): choice.algorithm(size) for size in _SHOWN_BYTES},
    }


def _links_of(found: Mapping[str, Any]) -> Links:
    lines = {name: Line(tuple(Segment(**segment) for segment in found[name])) for name in LINKS}
    return Links(**lines, fold_s_per_byte=float(found["fold_s_per_byte"]))


def _tried_of(found: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {
        name: {int(size): float(seconds) for size, seconds in taken.items()} for name, taken in found["tried"].items()
    }


def _size(size_bytes: int) -> str:
    return f"{size_bytes // 1024} KiB" if size_bytes < 1024**2 else f"{size_bytes // 1024**2} MiB"
