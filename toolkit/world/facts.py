"""What a rank knows of itself and of the others. A plain value: it is passed, never kept globally."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.world.stop import StopWatch, largest


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
    stop_watch: StopWatch = field(default_factory=StopWatch, repr=False, compare=False)

    def should_stop(self, step: int) -> bool:
        """True when all ranks are to save now and return; the same answer on every rank at the same step.

        Call it on every rank at every step boundary: it is a collective once the process group exists. `step` is
        the number of finished steps; rank 0 writes it into the attempt's heartbeat.
        """
        asked = self.stop_asked(step)
        return self.stop_agreed(largest(asked) if self.size > 1 else asked)

    def should_save(self) -> bool:
        """True if all ranks must save and continue, because the user wrote `control/save`.

        It repeats what the last `should_stop` agreed on, the same on every rank. A loop that saves anyway before it
        returns need not ask when `should_stop` is True.
        """
        return self.stop_watch.save_agreed

    def stop_asked(self, step: int) -> int:
        """This rank's own part of `should_stop`, for a loop that sums it over the ranks in an exchange of its own.

        Such a loop hands the sum, or the largest, the same on all ranks, to `stop_agreed`.
        """
        return self.stop_watch.look(step, rank=self.rank)

    def stop_agreed(self, total: int) -> bool:
        """Record the requests of all ranks; return whether they save now and return."""
        return self.stop_watch.agree(total)

    def time_left(self) -> float:
        """Seconds until the allocation ends, infinite where there is no limit.

        By this rank's own clock, so that ranks may differ by a second: what all must do together, decide by
        `should_stop`. An end that is moved (`scontrol update TimeLimit`) is heard of within some six minutes.
        """
        return self.stop_watch.time_left()
