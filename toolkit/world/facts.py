"""The rank, node and device of a process, and the number of ranks: a value that is passed, never global."""

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.world.record import recorder_of_rank
from toolkit.world.stop import StopWatch, largest

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """One rank among all ranks of the job.

    `rank` is in [0, size), `local_rank` in [0, local_size), `node` in [0, nodes). `device` is a torch device string
    ("cuda:0" or "cpu"). `attempt` is the number of earlier attempts of the run. `launcher` is "srun", "mpirun",
    "torchrun", "local" or "none"; `discovered_by` names the source of the numbers. `run_dir` is None outside a run.
    `halvings` is how often this attempt halves the micro-batch, because earlier ones ran out of memory.
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
    halvings: int = 0

    def should_stop(self, step: int) -> bool:
        """Return True if all ranks must save now and return; the same on every rank at the same step.

        Call it on every rank after every step, because it is a collective if the process group exists. `step` is the
        number of finished steps, which rank 0 writes to the heartbeat file of the attempt.
        """
        asked = self.stop_asked(step)
        return self.stop_agreed(largest(asked) if self.size > 1 else asked)

    def should_save(self) -> bool:
        """Return True if all ranks must save and continue, because the user created `control/save`.

        The ranks agreed on this in the last `should_stop`. A loop that saves before it returns need not call this if
        `should_stop` is True.
        """
        return self.stop_watch.save_agreed

    def stop_asked(self, step: int) -> int:
        """Return this rank's input to `should_stop`, for a loop that sums it over ranks in its own all-reduce.

        Pass the sum, or the maximum, to `stop_agreed` on all ranks.
        """
        recorder = recorder_of_rank()
        if recorder is not None:
            recorder.step(step)
        return self.stop_watch.look(step, rank=self.rank)

    def stop_agreed(self, total: int) -> bool:
        """Record the requests of all ranks; return True if they must save now and return."""
        return self.stop_watch.agree(total)

    def time_left(self) -> float:
        """Return the seconds until the allocation ends, or infinity if it has no time limit.

        Each rank uses its own clock, so results may differ by a second: use `should_stop` if all ranks must agree.
        toolkit notices a changed end time (`scontrol update TimeLimit`) within about six minutes.
        """
        return self.stop_watch.time_left()
