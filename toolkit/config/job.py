"""The table [job]: what runs, and which resources it requests."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import StringConstraints, field_validator

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

__all__ = ["JobTable"]

_CLUSTER = re.compile(r"[A-Za-z0-9._-]+")
_NODES = re.compile(r"([1-9][0-9]{0,6})-([1-9][0-9]{0,6})", re.ASCII)
MOST_NODES = 1_000_000  # several times the largest machine; every possible number of nodes is looked at
Text = Annotated[str, StringConstraints(min_length=1)]


def check_sbatch_options(options: list[str]) -> list[str]:
    """Reject strings that are not an option, and options that a key sets."""
    for option in options:
        if begins_component(option):
            raise refuse_value((), f"{option!r} is rejected: {COMPONENTS_ELSEWHERE}", COMPONENTS_FIX)
        if not option.startswith("-"):
            raise refuse_value((), f"expected an option that starts with '-', got {option!r}")
        if not is_one_option(option):
            raise refuse_value((), f"{option!r} contains more than one option", ONE_OPTION_FIX)
        name_part = re.split(r"[=\s]", option.strip(), maxsplit=1)[0]
        for name, letter, fix in FIXES_IN_JOB_FILE:
            is_bare = option.strip() in (f"--{name}", f"-{letter or name}")
            is_cut = len(name_part) > len("--") and f"--{name}".startswith(name_part)  # a prefix is accepted, too
            if is_bare or is_cut or value_of(option, name, letter) is not None:
                raise refuse_value((), f"{option!r} would override another key", fix)
    return options


def is_job_name(text: str) -> bool:
    """True for a valid name of a job, and so of its folder."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text))


class JobTable(Table):
    """Resources are counted per node; an empty string or 0 leaves a value to Slurm."""

    free_text: ClassVar[frozenset[str]] = frozenset({"entry"})  # `bash -c` accepts several lines

    name: str = key(
        "",
        "Name of the job and of its folder under RUNS.",
        form="1 to 64 of the characters A-Z a-z 0-9 . _ -, a letter or digit first",
        derived="the job file's name without .toml",
    )
    entry: str | list[str] = key(
        ...,
        "What each rank runs. A file is relative to the job file. With `:function` it is called as "
        "`function(world, config)`; a file alone runs as a script; a list is executed.",
        form='"file.py:function", "file.py", "package.module:function", or a list such as ["./a.out", "-x"]',
    )
    nodes: int | str = key(
        1, "Nodes; with a range, Slurm chooses.", form='a whole number from 1, or a range such as "2-4"'
    )
    ranks_per_node: int = key(1, "Ranks on each node.", derived="`gpus_per_node`, or 1 without GPUs", ge=1)
    cpus_per_rank: int = key(
        1,
        "CPUs of each rank, as Slurm counts them.",
        derived="a rank's share of the partition's CPUs if it has GPUs, else 1",
        ge=1,
    )
    bind: Literal["auto", "none"] = key(
        "auto",
        "Ranks are bound to the CPUs next to their GPUs, or share those of several NUMA nodes; `none` keeps the launcher's "
        "binding. Executables are never bound.",
    )
    gpus_per_node: int = key(
        0, "GPUs on each node.", derived="the partition's number, at most one per rank; else 0", ge=0
    )
    time: str = key(
        "", "Walltime in Slurm's format: `90:00` is 90 minutes. Empty uses the partition's default.", form=FORMS
    )
    array: str = key(
        "",
        "Tasks of an array run, in the form of sbatch's --array; each runs the job independently and finds its number in "
        "SLURM_ARRAY_TASK_ID.",
        form=ARRAY_FORMS,
    )
    repeat: int = key(
        1,
        "Number of repeated jobs, for sites without requeue: each resumes from the newest checkpoint if the previous one "
        "ended at its walltime, and no more start once the run has ended.",
        ge=1,
        le=1000,
    )
    requeue: bool = key(
        True, "Slurm may requeue the job after preemption or a lost node.", derived="false with `repeat`, else true"
    )
    partition: str = key(
        "",
        "Partition of the site; `auto` chooses the best of those that can serve the job.",
        derived="the site's default partition, else the best",
    )
    cluster: str = key(
        "",
        "Another cluster of the same accounting to submit to, by the name that `sacctmgr show clusters` prints. The "
        "site's partitions and limits do not apply to that cluster; the rest of the site file does.",
        form="the name of one cluster",
        derived="the site's `scheduler.cluster`",
    )
    account: str = key("", "Account to charge.")
    qos: str = key("", "Quality of service.", derived="the partition's")
    constraint: str = key("", "Node features, in the form of sbatch's -C.", derived="the partition's")
    nodelist: str = key("", "Hostlist of nodes that must be in the allocation.")
    exclude: str = key("", "Hostlist of nodes that must not be in the allocation.")
    mem_gb_per_node: int = key(0, "Memory of each node in GiB; 0 uses Slurm's default.", ge=0)
    snapshot: Literal["auto", "copy", "none"] = key(
        "auto",
        "Whether ranks start from a copy of the job's folder, made at submission, so that edits while the job is pending have "
        "no effect: `copy` always, `auto` if the entry names a file in it and the folder is not too large, `none` never. "
        "docs/rerun.md describes what is copied.",
    )
    sbatch: list[Text] = key(
        None,
        "More sbatch options, one per string, passed unchanged; options that another key sets are rejected.",
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
            raise ValueError("does not name a program")
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
            raise ValueError("names more than one cluster, but a run uses only one")
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
    def _check_sbatch(cls, options: list[str]) -> list[str]:
        return check_sbatch_options(options)

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
        """The tasks of an array run; None for any other."""
        return parse_array(self.array) if self.array else None

    @property
    def time_s(self) -> int | None:
        """Walltime in seconds; None if it is unlimited or left to the partition. Slurm reads 0 as no limit."""
        return (parse_slurm_time(self.time) or None) if self.time else None
