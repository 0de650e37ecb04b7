"""What a rank knows of itself and of the others. A plain value: it is passed, never kept globally."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks.

    `rank` in [0, size), `local_rank` in [0, local_size), `node` in [0, nodes). `device` is a torch device
    string ("cuda:0" or "cpu"). `attempt` counts the lives of the ranks over the whole run, from 0. `launcher`
    is "srun", "mpirun", "torchrun", "local" or "none"; `discovered_by` says which source the numbers came
    from. `run_dir` is None outside a run.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    node: int
    nodes: int
    host: str
    device: str
    launcher: str
    discovered_by: str
    attempt: int = 0
    run_dir: Path | None = None
