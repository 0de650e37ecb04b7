"""The table [job]: what runs, and which resources it requests."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints, ValidationInfo, field_validator

from toolkit.config.document import KeyPath
from toolkit.config.table import Table, key, refuse_value
from toolkit.slurm.array import FORMS as ARRAY_FORMS
from toolkit.slurm.array import ArrayTasks, parse_array
from toolkit.slurm.sbatch_options import (
    COMPONENTS_ELSEWHERE,
    COMPONENTS_FIX,
    ONE_OPTION_FIX,
    begins_component,
    is_one_option,
    value_of,
)
from toolkit.slurm.sbatch_table import FIXES_IN_JOB_FILE
from toolkit.slurm.times import FORMS, parse_slurm_time

__all__ = ["JobTable", "check_sbatch_options"]

_CLUSTER = re.compile(r"[A-Za-z0-9._-]+")
_NODES = re.compile(r"([1-9][0-9]{0,6})-([1-9][0-9]{0,6})", re.ASCII)
MOST_NODES = 1_000_000  # several times the largest machine; checks iterate over every number in a range of nodes
Text = Annotated[str, StringConstraints(min_length=1)]


def check_sbatch_options(options: list[str], path: KeyPath = ()) -> list[str]:
    """Reject strings that are not exactly one option, and options that have a key of their own; `path` is their key."""
    for option in options:
        if begins_component(option):
            raise refuse_value(path, f"{option!r} is rejected: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX)
        if not option.startswith("-"):
            raise refuse_value(path, f"expected an option that starts with '-', got {option!r}")
        if not is_one_option(option):
            raise refuse_value(path, f"{option!r} contains more than one option", ONE_OPTION_FIX)
        name_part = re.split(r"[=\s]", option.strip(), maxsplit=1)[0]
        for name, letter, fix in FIXES_IN_JOB_FILE:
            is_bare = option.strip() in (f"--{name}", f"-{letter or name}")
            is_cut = len(name_part) > len("--") and f"--{name}".startswith(name_part)  # sbatch accepts short forms
            if is_bare or is_cut or value_of(option, name, letter) is not None:
                raise refuse_value(path, f"{option!r} would override another key", fix)
    return options


def is_job_name(text: str) -> bool:
    """Return whether `text` is a valid job name; run directories are named after the job."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text))


def valid_job_name(name: str) -> str:
    """Return a valid job name that is similar to `name`."""
    return name if is_job_name(name) else re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:64] or "job"


class JobTable(Table):
    """What runs, and the resources per node. An empty string or 0 leaves a value to Slurm."""

    free_text: ClassVar[frozenset[str]] = frozenset(
        {"entry", "argv"}
    )  # an argument of `bash -c` may have several lines

    name: str = key(
        "",
        "Name of the job, and of its folder in the runs folder.",
        form="1 to 64 of the characters A-Z a-z 0-9 . _ -, a letter or digit first",
        derived="the job file's name without .toml",
    )
    entry: str | list[str] = key(
        ...,
        "What each rank runs: with `:function`, a Python function that is called as `function(world, config)`; a file alone, a "
        "Python script; a list, a command. Paths are relative to the job file.",
        form='"file.py:function", "file.py", "package.module:function", or a list such as ["./a.out", "-x"]',
    )
    argv: list[str] = key(
        None,
        "Arguments of the entry. Arguments after `--` on the command line follow them.",
        form='a list of strings such as ["--lr", "0.1"]',
        default_factory=list,
    )
    once: bool = key(
        False,
        "Run the entry once, on the first node and with the environment that sbatch would give it: `entry` is a script with "
        "a `#!` line, and `srun` or `mpirun` in it start ranks. toolkit then requests only the resources that are set.",
    )
    nodes: int | str = key(
        1, "Number of nodes; Slurm chooses from a range.", form='a whole number from 1, or a range such as "2-4"'
    )
    ranks_per_node: int = key(1, "Number of ranks per node.", derived="`gpus_per_node`, or 1 without GPUs", ge=1)
    ranks: int = key(
        0,
        "Total number of ranks of a script or executable, if they do not fill the nodes: some nodes then have fewer than "
        "`ranks_per_node`. 0 fills the nodes.",
        ge=0,
    )
    cpus_per_rank: int = key(
        1,
        "CPUs per rank, as Slurm counts CPUs (cores or hardware threads).",
        derived="the CPUs per GPU of the partition, times the GPUs per rank; 1 without GPUs",
        ge=1,
    )
    bind: Literal["auto", "none"] = key(
        "auto",
        "CPU binding: `auto` binds each rank to the CPUs next to its GPU or, on nodes with several NUMA nodes and no GPU, to "
        "an equal part of the CPUs. `none` keeps the binding of the launcher. Executables are never bound.",
    )
    gpus_per_node: int = key(
        0, "Number of GPUs per node.", derived="the GPUs per node of the partition, at most one per rank; else 0", ge=0
    )
    time: str = key(
        "", "Walltime in Slurm format: `90:00` is 90 minutes. Empty uses the default of the partition.", form=FORMS
    )
    array: str = key(
        "",
        "Tasks of a job array, in the syntax of sbatch --array. Each task runs the job independently and reads its number from "
        "SLURM_ARRAY_TASK_ID.",
        form=ARRAY_FORMS,
    )
    repeat: int = key(
        1,
        "Number of repeated jobs, for sites without requeue. Each job resumes from the newest checkpoint if the previous one "
        "reached its walltime. Once the run has ended, toolkit cancels the remaining jobs.",
        ge=1,
        le=1000,
    )
    requeue: bool = key(
        True,
        "Allow Slurm to requeue the job after preemption or a lost node.",
        derived="false with `repeat`, else true",
    )
    partition: str = key(
        "",
        "Partition of the site; `auto` chooses the best partition that can run the job.",
        derived="the default partition of the site, else as `auto`",
    )
    cluster: str = key(
        "",
        "Submit to another cluster in the same Slurm accounting database, by its name in `sacctmgr show clusters`. The "
        "partitions and limits in the site file do not apply to that cluster; the rest of the site file does.",
        form="the name of one cluster",
        derived="the site's `scheduler.cluster`",
    )
    account: str = key("", "Account to charge.")
    qos: str = key("", "Quality of service.", derived="the QOS of the partition")
    constraint: str = key("", "Required node features, as in sbatch -C.", derived="the constraint of the partition")
    nodelist: str = key("", "Hostlist of nodes that the allocation must include.")
    exclude: str = key("", "Hostlist of nodes that the allocation must not include.")
    mem_gb_per_node: int = key(0, "Memory per node in GiB; 0 uses the default of Slurm.", ge=0)
    snapshot: Literal["auto", "copy", "none"] = key(
        "auto",
        "Whether ranks run from a copy of the job folder that is made at submission, so that later edits do not affect a "
        "pending job: `copy` always, `auto` if the entry is a file in the folder and the folder is not too large, `none` "
        "never. docs/rerun.md describes what is copied.",
    )
    signal: Literal["", "HUP", "INT", "TERM", "USR1"] = key(
        "",
        "Signal that a script or executable receives `restart.warn_s` before the walltime, on preemption and on a stop; TERM "
        "follows 10 s before the ranks are killed, at once if the program does not handle the signal. Empty sends TERM alone.",
    )
    launcher_options: list[Text] = key(
        None,
        "Options of the launcher for this job, after those of `[launcher] options` in the site file.",
        form='a list of options of srun or mpirun such as ["--cpu-bind=mask_cpu:7e,7e00"]',
        default_factory=list,
    )
    sbatch: list[Text] = key(
        None,
        "Additional sbatch options, one per string, passed unchanged. Options that have a key of their own are rejected.",
        form='a list of options such as ["--mail-type=END"]',
        default_factory=list,
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_job_name(name):
            raise ValueError("is not a valid job name")
        return name

    @field_validator("entry")
    @classmethod
    def _check_entry(cls, entry: str | list[str]) -> str | list[str]:
        if not entry or not entry[0]:  # further arguments may be empty
            raise ValueError("is not a valid entry: the program is empty")
        return entry

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: int | str) -> int | str:
        if isinstance(nodes, int):
            if not 1 <= nodes <= MOST_NODES:
                raise refuse_value((), f"expected a number of nodes from 1 to {MOST_NODES}, got {nodes}")
            return nodes
        match = _NODES.fullmatch(nodes)
        if not match or not int(match[1]) <= int(match[2]) <= MOST_NODES:
            raise refuse_value((), f"expected a number or a range of nodes, got {nodes!r}")
        return nodes

    @field_validator("cluster")
    @classmethod
    def _check_cluster(cls, cluster: str) -> str:
        if cluster == "all" or "," in cluster:
            raise ValueError("names more than one cluster, but a run can use only one")
        if cluster and not _CLUSTER.fullmatch(cluster):
            raise ValueError("is not a valid cluster name")
        return cluster

    @field_validator("time")
    @classmethod
    def _check_time(cls, time: str) -> str:
        if time:
            parse_slurm_time(time)
        return time

    @field_validator("array")
    @classmethod
    def _check_array(cls, array: str) -> str:
        if array:
            parse_array(array)
        return array

    @field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, options: list[str], info: ValidationInfo) -> list[str]:
        # The options of a script may have forms that no key accepts, such as --ntasks without --nodes.
        return options if info.data.get("once") else check_sbatch_options(options)

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes that the job accepts."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split("-")[0])

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes that the job accepts."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.split("-")[1])

    @property
    def tasks(self) -> ArrayTasks | None:
        """The tasks of a job array; None if the job is not an array."""
        return parse_array(self.array) if self.array else None

    @property
    def time_s(self) -> int | None:
        """Walltime in seconds; None if it is unlimited (Slurm treats 0 as no limit) or left to the partition."""
        return (parse_slurm_time(self.time) or None) if self.time else None
