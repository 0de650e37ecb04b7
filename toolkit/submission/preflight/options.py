"""Check the sbatch options of a job against each other and against the forms that sbatch accepts."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import NotFoundError, SchedulerRefusedError, ToolkitError, counted
from toolkit.runs.record.job import slurm_of
from toolkit.slurm.batch_script import BatchScript, long_option, read_batch_script
from toolkit.slurm.characters import described, instead_of, odd_character
from toolkit.slurm.commands import NoAnswerError
from toolkit.slurm.sbatch_table import LONG_OPTIONS
from toolkit.slurm.times import FORMS, parse_slurm_time
from toolkit.submission.preflight.cluster import PATIENCE_S
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.script import allocation_options

__all__ = ["according_to_sbatch", "check_options"]

_NUMBER = (r"\+?0*[1-9][0-9]*", "a whole number, at least 1")
_MEMORY = (r"(?i)\+?[0-9]+([kmgtp]b?)?", "a whole number of MiB, or with a unit such as 2G")
# The values that sbatch accepts (checked against 22.05), and how to describe them.
_FORMS = {
    "nodes": (r"(?i)\+?[0-9]+[km]?(-[0-9]+[km]?)?", "a number, or a range such as 2-4"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "tmp"), _MEMORY),
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-task",
         "cpus-per-gpu", "mincpus", "threads-per-core", "cores-per-socket", "sockets-per-node"), _NUMBER,
    ),
}  # fmt: skip
_MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
_KEYS = [key for key in LONG_OPTIONS if key.startswith("job.")]


def script_of(job: ResolvedJob) -> BatchScript | None:
    """Return the batch script that was submitted as the job; None for a job file, and for a script that is no longer valid."""
    if not job.job.once or job.job_file != job.job_directory / str(job.job.entry):
        return None
    try:
        return read_batch_script(job.job_file)
    except ToolkitError:  # edited since the submission of the run that a resume continues
        return None


class _Options:
    """The last value of each sbatch option of a component, with the place that an error names."""

    def __init__(self, job: ResolvedJob, extra: Sequence[str]) -> None:
        script = script_of(job)
        lines = {one.name: one for part in (script.components if script else ()) for one in part}
        self.found: dict[str, tuple[str, str]] = {}
        for words, key in ((job.scheduler.options, "scheduler.options"), (job.job.sbatch, "job.sbatch"), (extra, "")):
            for word in words:
                name, value = long_option(word)
                line = lines.get(name) if key == "job.sbatch" else None
                place = line.where if line else job.origin(key).place(key) if key else word.partition("=")[0]
                self.found[name] = (value, place)
        for key in _KEYS:
            value, name = getattr(job.job, key.removeprefix("job.")), LONG_OPTIONS[key].removeprefix("--")
            if value and name not in ("requeue", "no-requeue") and job.origin(key).layer != "built-in":
                self.found.setdefault(name, (f"{value}G" if name == "mem" else str(value), job.origin(key).place(key)))

    def number(self, name: str, part: int = -1) -> int:
        """Return a value that is a number, or the first (0) or last (-1) number of a range; 0 for anything else."""
        text = self.found.get(name, ("", ""))[0].split("-")[part]
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def check_options(job: ResolvedJob, extra_sbatch_options: Sequence[str] = ()) -> Iterator[Finding]:
    """Return findings on characters, forms and numbers in the sbatch options of one component."""
    options = _Options(job, extra_sbatch_options)
    about = About(job, "options")
    for name, (value, place) in options.found.items():
        if odd := odd_character(value, name) or odd_character(name):
            yield about.refuse(place, f"expected only ASCII in --{name}, got {described(odd)}", instead_of(odd))
        elif name in _FORMS and not re.fullmatch(_FORMS[name][0], value):
            yield about.refuse(place, f"expected {_FORMS[name][1]} for --{name}, got {value!r}", "correct the value")
        elif name in ("time", "time-min") and not _is_time(value):
            yield about.refuse(place, f"expected a time for --{name}, got {value!r}", f"write {FORMS}")
    memory = [(f"--{name}={options.found[name][0]}", options.found[name][1]) for name in _MEMORY_OPTIONS if name in options.found]  # fmt: skip
    if len(memory) > 1:
        given = " and ".join(f"{option} ({place})" for option, place in memory)
        yield About(job, "memory").refuse(
            memory[0][1], f"sbatch accepts only one of {given}", f"remove {memory[1][0]} or {memory[0][0]}"
        )
    yield from _tasks(About(job, "tasks"), options)


def _is_time(text: str) -> bool:
    try:
        parse_slurm_time(text)
    except ValueError:
        return False
    return True


def _tasks(about: About, options: _Options) -> Iterator[Finding]:
    """Compare --ntasks with --nodes and --ntasks-per-node."""
    tasks, each = options.number("ntasks"), options.number("ntasks-per-node") or options.number("tasks-per-node")
    nodes, least = options.number("nodes"), options.number("nodes", 0) or 1
    place = options.found["ntasks"][1] if tasks else ""
    is_too_many = bool(tasks and each and nodes and tasks > nodes * each)
    of_nodes = f"{counted(each, 'task')} per node on {counted(nodes if is_too_many else least, 'node')}"
    if is_too_many:
        fix = f"--ntasks={nodes * each}, or --nodes={-(-tasks // each)}"
        yield about.refuse(place, f"{counted(tasks, 'task')}, but at most {of_nodes}", fix)
    elif tasks and each and tasks < least * each:
        fix = f"--ntasks={least * each}, or remove --ntasks"
        yield about.warn(place, f"{counted(tasks, 'task')}, but {of_nodes}: Slurm starts only {tasks}", fix)
    elif tasks and tasks < least:
        what = f"{counted(tasks, 'task')} on {counted(least, 'node')}: Slurm allocates only {counted(tasks, 'node')}"
        yield about.warn(place, what, f"--ntasks={least}, or --nodes={tasks}")


def according_to_sbatch(job: ResolvedJob, extra_sbatch_options: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Return what `sbatch --test-only` rejects, and why it could not be asked."""
    # Without the array, which `submit` splits if Slurm would refuse it.
    options = [*allocation_options(job), *extra_sbatch_options]
    argv = [part for one in options for part in ([one] if re.match(r"--[^\s=]+=", one) else _split(one))]
    slurm = slurm_of(job)
    slurm = replace(slurm, timeout_s=min(slurm.timeout_s, PATIENCE_S))
    try:
        slurm.call(["sbatch", "--test-only", "--output=/dev/null", *argv, "--wrap=true"])
    except (NoAnswerError, NotFoundError) as error:
        return [], [f"the options with sbatch: {error.message}"]
    except SchedulerRefusedError as error:
        what = f"sbatch rejects the job: {error.message.removeprefix('sbatch: ')}"
        return [About(job, "options").refuse("sbatch --test-only", what, error.fix or "correct it")], []
    return [], []


def _split(option: str) -> list[str]:
    try:
        return shlex.split(option)
    except ValueError:  # an unclosed quote
        return option.split()
