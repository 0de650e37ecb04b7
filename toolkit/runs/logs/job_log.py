"""Find the log of a job: in the run directory, unless the job's `-o` names another place."""

import getpass
import glob
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.rundir.claims import newest_parts, parts_in, slurm_id
from toolkit.rundir.files import read_json_or_none
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import RunDirectory, start_of
from toolkit.rundir.tail import last_lines
from toolkit.slurm.sbatch_options import last_value_of

__all__ = ["last_directive"]

_FIELD = re.compile(r"%(.)")
# The first line that the script prints; a killed start may have left an incomplete line before it.
_BEGINS = re.compile(r"toolkit: job [0-9_]+ begins \(restart ([0-9]+)\)\s*$")


@dataclass(frozen=True)
class JobLog:
    """The log of one job or task.

    `place` is the path as sbatch received it; `path` is None if its %-fields cannot be expanded here. `redirected` is
    true if `-o` names another place. `alone` is true if no other job writes to the file. `errors` is the file of `-e`, if
    this host sees it and only this job writes to it.
    """

    place: str
    path: Path | None
    redirected: bool
    alone: bool
    errors: Path | None = None

    @property
    def readable(self) -> Path | None:
        """The file if this host sees it and only this job writes to it, else None."""
        return self.path if self.alone and self.path is not None and self.path.is_file() else None


def own_job_id(run: RunDirectory, job_id: str) -> str:
    """Return a job id as its claim and log have it: `123_4` for a follow-up job of task 4, or the last repeated job."""
    if run.task_number is not None:
        number = slurm_id(newest_parts(run), "", run.task_number).partition("_")[2]
        return f"{job_id}_{number}" if job_id.isdecimal() else job_id
    return next((one for one in reversed(job_ids(run)) if one.startswith(f"{job_id}_")), job_id)


def job_log(run: RunDirectory, job_id: str) -> JobLog:
    """Return the log of a run's job according to the script of its start; `job_id` is `123_4` for a task."""
    job_id = own_job_id(run, job_id)
    usual = run.whole.path / f"slurm-{job_id}.out"
    start = _start_of(run, job_id)
    script = next((part.script(start) for part in (run, run.whole) if part.script(start).exists()), None)
    if script is None or job_id.startswith("local-"):
        return JobLog(str(usual), usual, redirected=False, alone=True)
    name = last_directive(script, "job-name", "J") or run.job_name
    number = "" if "_" in job_id else job_id

    def named(option: str, letter: str) -> tuple[str, Path | None, bool]:
        """Return the value of an option, its path with all fields, and whether no other job writes there."""
        place = last_directive(script, option, letter)
        path = _filled_in(place, job_id, name, number) if place else None
        if path is not None and not path.is_absolute():
            path = _working_directory(run, start, path)
        fields = set(_FIELD.findall(place))
        return place, path, "j" in fields or ("A" in fields and ("a" in fields or "_" not in job_id))

    place, path, alone = named("output", "o")
    if place and path is None and "_" in job_id and "%j" in place:
        number = _number_of_task(run, start, place, job_id, name)
        place, path, alone = named("output", "o")
    _, errors, is_own = named("error", "e")
    errors = errors if errors is not None and is_own and errors.is_file() and errors != path else None
    if not place or path == usual:
        return JobLog(str(usual), usual, redirected=False, alone=True, errors=errors)
    return JobLog(place, path, redirected=True, alone=alone, errors=errors)


def _number_of_task(run: RunDirectory, start: int, place: str, job_id: str, name: str) -> str:
    """Return the `%j` of a task, a job number of its own, from the first line of the file with that number; "" if none."""
    pattern = _filled_in(place.replace("%j", "\0"), job_id, name, "")
    pattern = pattern if pattern is None or pattern.is_absolute() else _working_directory(run, start, pattern)
    if pattern is None:
        return ""
    before, _, after = str(pattern).partition("\0")
    folder, start_of_name = Path(before + "x").parent, Path(before + "x").name[:-1]
    for path in folder.glob(f"{glob.escape(start_of_name)}[0-9]*") if folder.is_dir() else ():
        number = re.match(r"[0-9]+", str(path).removeprefix(before))
        if number and str(path) == f"{before}{number[0]}{after}".replace("\0", number[0]) and path.is_file():
            with path.open(encoding="utf-8", errors="replace") as stream:
                if f"toolkit: job {job_id} begins" in stream.read(1 << 16):
                    return number[0]
    return ""


def last_life_begun(log: Path) -> int | None:
    """Return the number of the last restart in the end of a log; None if there is none."""
    marks = last_lines(log, 1, shown=lambda line: line if _BEGINS.search(line) else None, unfinished=True).lines
    mark = _BEGINS.search(marks[0]) if marks else None
    return int(mark[1]) if mark else None


def of_last_life(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines since the last restart began, because requeued starts append to one log."""
    marks = [number for number, line in enumerate(lines) if _BEGINS.search(line)]
    return lines[marks[-1] + 1 :] if marks else lines


def _start_of(run: RunDirectory, job_id: str) -> int:
    """Return the start that was submitted as this job; 0 for a script submitted with sbatch by hand."""
    ids = (job_id, job_id.partition("_")[0])
    for part in (run, run.whole):
        for path in part.path.glob("submitted-*.json"):
            record = read_json_or_none(path) or {}
            if record.get("job_id") in ids or any(part.job_id in ids for part in parts_in(record)):
                return start_of(path)
    return 0


def last_directive(script: Path, name: str, letter: str) -> str:
    """Return the value in the last #SBATCH line with an option, which is the one that sbatch uses; "" without one."""
    lines = script.read_text(encoding="utf-8", errors="replace").splitlines()
    directives = (line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH "))
    return last_value_of(map(_unquoted, directives), name, letter)


def _unquoted(option: str) -> str:
    try:
        return " ".join(shlex.split(option))
    except ValueError:  # a quotation mark within a name
        return option


def _filled_in(place: str, job_id: str, job_name: str, number: str) -> Path | None:
    """Return a path with `%j` and other fields expanded; None if only Slurm can expand them."""
    array, _, task = job_id.partition("_")
    known = {"%": "%", "A": array, "x": job_name}
    known |= ({"a": task} if task else {}) | ({"j": number} if number else {})
    if "%u" in place:
        known["u"] = getpass.getuser()
    if not set(_FIELD.findall(place)) <= set(known):
        return None
    return Path(_FIELD.sub(lambda field: known[field[1]], place))


def _working_directory(run: RunDirectory, start: int, path: Path) -> Path | None:
    """Return `path` below the folder where sbatch was called; None for later starts, whose folder is unknown."""
    submitted_from = str((read_json_or_none(run.record) or {}).get("working_directory", ""))
    return Path(submitted_from) / path if start == 0 and submitted_from else None
