"""Options that several commands share: RUNS, a run's name, a job's shape in sbatch's letters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from toolkit.cli.param_types import PARTITION

if TYPE_CHECKING:
    from toolkit.config.origins import Flag

Command = TypeVar("Command", bound=Callable[..., Any])

# (flags, the key that each sets, help); letters mean what they mean in sbatch.
_KEYS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("-a", "--array"), "job.array", "Tasks of an array: 0-9%2, 0-15:4, 1,3,5-7."),
    (("--repeat",), "job.repeat", "So many jobs in turn, each going on where the one before ended."),
    (("-M", "--clusters"), "job.cluster", "Another cluster of the same accounting."),
    (("-A", "--account"), "job.account", "Account that is charged."),
    (("-p", "--partition"), "job.partition", "Partition."),
    (("-q", "--qos"), "job.qos", "Quality of service."),
    (("-t", "--time"), "job.time", "Walltime, as Slurm reads it: 90:00 is 90 minutes."),
    (("-N", "--nodes"), "job.nodes", "Nodes, or a range such as 2-4."),
    (("--ntasks-per-node",), "job.ranks_per_node", "Ranks on each node."),
    (("-c", "--cpus-per-task"), "job.cpus_per_rank", "CPUs of each rank."),
    (("--gpus-per-node",), "job.gpus_per_node", "GPUs on each node."),
    (("-J", "--job-name"), "job.name", "Name of the job."),
    (("-C", "--constraint"), "job.constraint", "Node features."),
    (("-w", "--nodelist"), "job.nodelist", "Nodes that must be in the allocation."),
    (("-x", "--exclude"), "job.exclude", "Nodes that must not be in it."),
)
_RAW = (
    (("-o", "--output"), "Slurm's log file."),
    (("-e", "--error"), "Slurm's error file."),
    (("-d", "--dependency"), "Slurm's dependency."),
)
# sbatch's options that users type, and what stands for each here.
OF_SBATCH = {
    "--mem": "`--set job.mem_gb_per_node=GIB`",
    "--gres": "`--gpus-per-node COUNT`, which the site writes as its Slurm wants it",
    "-G": "`--gpus-per-node COUNT`, for each node",
    "--gpus": "`--gpus-per-node COUNT`, for each node",
    "--gpus-per-task": "`--gpus-per-node COUNT`, for all ranks of a node",
    "--ntasks-per-gpu": "`--ntasks-per-node COUNT`, and `--gpus-per-node COUNT`",
    "--mail-user": "`--set notify.mail=ADDRESS`",
    "--mail-type": '`--set \'notify.mail_on=["END", "FAIL"]\'`',
    "--wrap": 'write entry = ["bash", "-c", "COMMAND"] in [job] of a job file',
    "--requeue": "`--set job.requeue=true`",
    "--no-requeue": "`--set job.requeue=false`",
    "--signal": "`--set restart.warn_s=SECONDS`",
    "--test-only": "`toolkit preflight JOB`",
    "--exclusive": "`--set job.sbatch=--exclusive`",
    "--reservation": "`--set job.sbatch=--reservation=NAME`",
    "--mem-per-cpu": "`--set job.sbatch=--mem-per-cpu=2G`",
    "--begin": "`--set job.sbatch=--begin=TIME`",
    "--licenses": "`--set job.sbatch=--licenses=NAME`",
}


def _argument(option: str) -> str:
    """The argument in which click hands a value over."""
    return option.removeprefix("--").replace("-", "_")


# The arguments that `job_options` adds, but for `settings`.
SHAPE = (
    "ntasks",
    *(_argument(letters[-1]) for letters, _, _ in _KEYS),
    *(_argument(letters[-1]) for letters, _ in _RAW),
)


def job_options(function: Command) -> Command:
    """Add the shape options and --set; the command gets them as keyword arguments and hands them to `flags_of`."""
    for letters, key, text in reversed(_KEYS):
        kind = PARTITION if key == "job.partition" else str
        function = click.option(*letters, type=kind, metavar="TEXT", help=text)(function)
    for letters, text in reversed(_RAW):
        function = click.option(*letters, metavar="TEXT", help=text)(function)
    return _ranks_and_settings(function)


def mesh_options(function: Command) -> Command:
    """Add those of `job_options` that say how many ranks there are, for commands that submit nothing."""
    for letters, key, text in reversed(_KEYS):
        if key in ("job.nodes", "job.ranks_per_node"):
            function = click.option(*letters, metavar="TEXT", help=text)(function)
    return _ranks_and_settings(function)


def _ranks_and_settings(function: Command) -> Command:
    function = click.option("-n", "--ntasks", type=int, help="Ranks in all, as many on each of -N nodes.")(function)
    return click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Any key of the job file.")(
        function
    )


def flags_of(values: Mapping[str, Any], nodes_before: Callable[[], int | str]) -> dict[str, Flag]:
    """The flags that were given, as `resolve_job` wants them.

    `nodes_before` tells the nodes that hold when -N is not given.
    """
    from toolkit.cli.shape import shape_of
    from toolkit.config.origins import Flag

    flags: dict[str, Flag] = {}
    for letters, key, _ in _KEYS:
        value = values.get(_argument(letters[-1]))
        if value is not None:
            flags[key] = Flag(value, letters[0])
    if values.get("repeat") not in (None, "1"):  # what follows in turn is not requeued, too
        flags["job.requeue"] = Flag(False, f"--repeat {values['repeat']}, so job.requeue =")
    if values.get("ntasks") is not None:
        flags |= shape_of(values["ntasks"], values.get("nodes"), values.get("ntasks_per_node"), nodes_before)
    return flags


def sbatch_options_of(values: Mapping[str, Any], *, for_sbatch: bool) -> list[str]:
    """-o, -e and -d as sbatch takes them: of this submission alone, behind the job's own, and the last one counts.

    Raises:
        ToolkitError: one cannot stand in a line of the script, or no sbatch will read it.
    """
    from toolkit.config.values import no_line
    from toolkit.errors import ToolkitError

    options = [f"--{name}={values[name]}" for name in ("output", "error", "dependency") if values.get(name)]
    for option in options:
        if said := no_line(option):
            raise ToolkitError(said, where=option, fix="remove it")
        if not for_sbatch:
            raise ToolkitError(
                "is for sbatch, and no sbatch starts this run",
                where=option,
                fix="leave it out, or `toolkit submit` to a cluster",
            )
    return options


def runs_option(function: Command) -> Command:
    """Add --runs."""
    return click.option(
        "--runs", type=click.Path(path_type=Path), help="Folder of all runs [TOOLKIT_RUNS, site, ./runs]."
    )(function)


def echo_log(text: str, *, err: bool = False) -> None:
    """Print what a program wrote, with its newline: as it is into a file or a pipe, without harmful escapes on a terminal."""
    from toolkit.runs.logs.logs import for_terminal

    written = text.encode("utf-8", "surrogateescape")
    if (sys.stderr if err else sys.stdout).isatty():
        readable = written.decode("utf-8", "replace")
        end = "\n" if readable.endswith("\n") else ""
        written = (for_terminal(readable.removesuffix("\n")) + end).encode()
    click.echo(written, nl=False, err=err, color=True)  # click would take out colours, too


json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable; docs/contract.md has the keys.")


def _print_commands(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    from toolkit.slurm.silence import printed_commands

    if value:
        ctx.find_root().with_resource(printed_commands())


print_command_option = click.option(
    "--print-cmd", is_flag=True, expose_value=False, callback=_print_commands, help="Show each Slurm command on stderr."
)
