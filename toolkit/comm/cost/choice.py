"""Choose the fastest all-reduce for a size from measured links, and store the measurement in the run directory."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.comm.cost.measurement import BUDGET_S, AllReduce, Correction, correct, measure_links, try_all
from toolkit.comm.cost.model import LINKS, Line, Links, Segment, predict
from toolkit.comm.peers import Peers
from toolkit.errors import ToolkitError
from toolkit.rundir.files import read_json, utc_now, write_json
from toolkit.rundir.layout import RunDirectory
from toolkit.units import format_bytes

_SHARE_OF_TRIES = 0.4  # fraction of a tier's budget for trial all-reduces
_SHOWN_BYTES = (4 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2)


@dataclass(frozen=True)
class Choice:
    """The measured links of a layout of ranks, and the choice that follows from them.

    Attributes:
        hosts, nodes: `hosts[n]` runs the group ranks `nodes[n]`.
        tried: the seconds of small all-reduces, by algorithm and size in bytes.
        source: the origin of the figures, for the log line.
    """

    hosts: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    algorithms: tuple[str, ...]
    links: Links
    tried: Mapping[str, Mapping[int, float]]
    source: str

    def algorithm(self, size_bytes: int) -> str:
        """Return the algorithm with the shortest predicted time, which is the same on every rank."""
        return min(self.algorithms, key=lambda name: self.seconds(name, size_bytes))

    def seconds(self, algorithm: str, size_bytes: int) -> float:
        """Return the predicted seconds of an all-reduce."""
        correction = self._corrections.get(algorithm)
        seconds = predict(algorithm, size_bytes, self.nodes, self.links)
        return seconds * correction.ratio(size_bytes) if correction else seconds

    @cached_property
    def _corrections(self) -> dict[str, Correction]:
        return correct(self.tried, lambda name, size: predict(name, size, self.nodes, self.links))

    @property
    def line(self) -> str:
        """One line for the log: the choice at some sizes, and the source."""
        chosen: dict[str, list[str]] = {}
        for size in _SHOWN_BYTES:
            chosen.setdefault(self.algorithm(size), []).append(format_bytes(size))
        choices = ", ".join(f"{name} at {' and '.join(sizes)}" for name, sizes in chosen.items())
        return f"{choices} ({self.source})"


def choose(
    peers: Peers,
    hosts: Sequence[str],
    algorithms: Sequence[str],
    all_reduce: AllReduce,
    run: RunDirectory | None,
    budget_s: float = BUDGET_S,
) -> Choice:
    """Return the choice among `algorithms` for this layout, from an earlier or a new measurement. Collective.

    Args:
        peers: peers on the CPU with known nodes.
        hosts: the hosts of the nodes, in their order.
        all_reduce: sums a tensor over the peers with the named algorithm.
        run: the run directory in which rank 0 reads an earlier measurement or stores this one; None for neither.
        budget_s: seconds of measurement for each tier (links within nodes, network between them).
    """
    kept = _from_first(peers, _read(run.links, hosts, peers.nodes) if run and peers.place == 0 else None)
    if isinstance(kept, dict):
        source = f"measured {kept['time']}"
        return Choice(tuple(hosts), peers.nodes, tuple(algorithms), _links_of(kept), _tried_of(kept), source)
    start = time.monotonic()
    links = measure_links(peers, budget_s)
    tried = try_all(peers, algorithms, all_reduce, budget_s * _SHARE_OF_TRIES)
    source = f"measured in {time.monotonic() - start:.1f} s" + (f"; {kept}" if kept else "")
    choice = Choice(tuple(hosts), peers.nodes, tuple(algorithms), *_from_first(peers, (links, tried, source)))
    if run and peers.place == 0:
        write_json(run.links, _as_json(choice))
    return choice


def _from_first(peers: Peers, value: Any) -> Any:
    """Return the value of the first peer on all ranks, because they measure different times but must choose alike."""
    values = [value]
    dist.broadcast_object_list(values, group=peers.group, group_src=0)
    return values[0]


def _read(path: Path, hosts: Sequence[str], nodes: Sequence[Sequence[int]]) -> dict[str, Any] | str | None:
    """Return the stored measurement of this layout, or why it cannot be used; None if there is none."""
    if not path.exists():
        return None
    try:
        kept = read_json(path)
        _links_of(kept)
        _tried_of(kept)
    except (ToolkitError, KeyError, TypeError, ValueError) as error:
        return f"{path.name} of the run is damaged ({error})"
    if (kept.get("hosts"), kept.get("nodes")) != (list(hosts), [list(node) for node in nodes]):
        return f"{path.name} of the run was measured on other nodes"
    return dict(kept)


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


def _links_of(kept: Mapping[str, Any]) -> Links:
    lines = {name: Line(tuple(Segment(**segment) for segment in kept[name])) for name in LINKS}
    return Links(**lines, fold_s_per_byte=float(kept["fold_s_per_byte"]))


def _tried_of(kept: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {
        name: {int(size): float(seconds) for size, seconds in taken.items()} for name, taken in kept["tried"].items()
    }
