"""Read the resource usage of jobs from sacct: one record per execution of a job, since a requeue repeats the job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.slurm.commands import Slurm
from toolkit.slurm.records import new_mark, read_records, whole_number
from toolkit.slurm.sbatch_options import memory_mib, parse_tres

__all__ = ["AccountedLife", "accounted_usage"]

_COLUMNS = (
    "JobID", "State", "ElapsedRaw", "TimelimitRaw", "NNodes", "AllocCPUS", "TotalCPU", "MaxRSS", "AllocTRES",
    "JobID",
)  # fmt: skip
_JOB_OR_STEP = re.compile(r"[0-9]+(_[0-9]+|_\[[^\]]*\])?(\+[0-9]+)?(\.\w+)?", re.ASCII)
_TIME = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9.]+)", re.ASCII)


@dataclass(frozen=True)
class AccountedLife:
    """One execution of a job or task; a requeued job has several. Values that accounting lacks are None.

    `cpu_s` is the user and system time of all finished steps, `largest_rank_bytes` the largest resident memory of a rank.
    `memory_bytes` and `gpus` are totals of the allocation over all nodes.
    """

    job_id: str
    state: str
    elapsed_s: int
    limit_s: int | None
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int | None
    cpu_s: float
    largest_rank_bytes: int | None

    @property
    def component(self) -> int:
        """The component number of a heterogeneous job, such as 1 for `12+1`; 0 for any other job."""
        return int(self.job_id.partition("+")[2] or 0)


def accounted_usage(slurm: Slurm, job_ids: Sequence[str]) -> list[AccountedLife]:
    """Return every execution of the jobs (`12`) or tasks (`12_3`) that started, oldest first; errors as in `Slurm.call`."""
    mark = new_mark()
    text = slurm.call(
        ["sacct", "--noheader", "--parsable", f"--delimiter={mark}", "--duplicates", "--format=" + ",".join(_COLUMNS),
         "--jobs=" + ",".join(job_ids)]
    )  # fmt: skip
    lives: list[tuple[Mapping[str, str], list[Mapping[str, str]]]] = []
    for record in read_records("sacct", text, mark, len(_COLUMNS), key=_JOB_OR_STEP):
        row = dict(zip(_COLUMNS[:-1], record, strict=False))
        if "." not in row["JobID"]:
            lives.append((row, []))
        elif lives:  # sacct prints the steps of a job after it
            lives[-1][1].append(row)
    return [_life(row, steps) for row, steps in lives if whole_number(row["ElapsedRaw"])]


def _life(row: Mapping[str, str], steps: Sequence[Mapping[str, str]]) -> AccountedLife:
    tres = parse_tres(row["AllocTRES"])
    resident = [mib for step in steps if (mib := memory_mib(step["MaxRSS"])) is not None]
    limit = whole_number(row["TimelimitRaw"])
    return AccountedLife(
        row["JobID"], row["State"].partition(" ")[0], whole_number(row["ElapsedRaw"]) or 0,
        limit_s=None if limit is None else limit * 60,
        nodes=whole_number(row["NNodes"]) or 0, cpus=whole_number(row["AllocCPUS"]) or 0, gpus=int(tres.get("gres/gpu", 0)),
        memory_bytes=int(tres["mem"] * 2**20) if "mem" in tres else None,
        cpu_s=max([_seconds(row["TotalCPU"]), *(_seconds(step["TotalCPU"]) for step in steps)]),
        largest_rank_bytes=int(max(resident) * 2**20) if resident else None,
    )  # fmt: skip


def _seconds(text: str) -> float:
    """Return the seconds of a CPU time from sacct, such as `1-02:03:04` or `03:04.567`."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0.0
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return days * 86400 + hours * 3600 + minutes * 60 + float(match[4])
