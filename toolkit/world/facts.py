"""What a rank knows about itself and the others: a plain value, passed and never global."""

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.world.stop import StopWatch, largest

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks.

    `rank` in [0, size), `local_rank` in [0, local_size), `node` in [0, nodes). `device` is a torch device string
    ("cuda:0" or "cpu"). `attempt` counts earlier starts of the ranks in the run. `launcher` is "srun", "mpirun",
    "torchrun", "local" or "none"; `discovered_by` names the source of the numbers. `run_dir` is None outside a run.
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
        """True if all ranks must save now and return; the same on every rank at the same step.

        Call it on every rank after every step: it is a collective if the process group exists. `step` is the number of
        finished steps, which rank 0 writes into the attempt's heartbeat.
        """
        asked = self.stop_asked(step)
        return self.stop_agreed(largest(asked) if self.size > 1 else asked)

    def should_save(self) -> bool:
        """True if all ranks must save and continue, because the user wrote `control/save`.

        It repeats the agreement of the last `should_stop`. A loop that saves before it returns need not call it when
        `should_stop` is True.
        """
        return self.stop_watch.save_agreed

    def stop_asked(self, step: int) -> int:
        """Return this rank's part of `should_stop`, for a loop that sums it over ranks in its own exchange.

        Pass the sum, or the maximum, to `stop_agreed` on all ranks.
        """
        return self.stop_watch.look(step, rank=self.rank)

    def stop_agreed(self, total: int) -> bool:
        """Record the requests of all ranks; return True if they must save now and return."""
        return self.stop_watch.agree(total)

    def time_left(self) -> float:
        """Return the seconds until the allocation ends, infinite without a limit.

        By this rank's own clock, so ranks may differ by a second: use `should_stop` for common decisions. A changed end
        (`scontrol update TimeLimit`) is noticed within about six minutes.
        """
        return self.stop_watch.time_left()
