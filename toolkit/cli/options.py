"""Options that several commands share: --runs, and the resources of a job under the names of sbatch's options."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from toolkit.slurm.sbatch_table import CLI_OPTIONS

if TYPE_CHECKING:
    from toolkit.config.document import Flag
    from toolkit.config.request import JobRequest

__all__ = ["after_option", "asks_for_job", "request_of", "sweep_options"]


class Named(click.ParamType[str]):
    """A string argument. `values` is the function of `completers` that completes it."""

    def __init__(self, name: str, values: str) -> None:
        self.name = name
        self.values = values

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from toolkit.cli import completers

        found: list[CompletionItem] = getattr(completers, self.values)(ctx, incomplete)
        return found


RUN = Named("run", "runs")
RUN_OR_STEP = Named("run", "runs_or_steps")  # accepts RUN or RUN:STEP
CHECKPOINT = Named("checkpoint", "steps_of_run")
JOB = Named("job", "jobs")
SHIPPED_JOB = Named("job", "shipped")
SITE = Named("site", "sites")
PARTITION = Named("partition", "partitions")
SESSION = Named("session", "sessions")


Command = TypeVar("Command", bound=Callable[..., Any])

_REPEAT = "Submit N repeated jobs; each one resumes the previous one."
_RAW = (
    (("-o", "--output"), "Log file of the job, as for sbatch."),
    (("-e", "--error"), "Log file for stderr, as for sbatch."),
    (("-d", "--dependency"), "Dependency of the job, as for sbatch."),
)
# (option names, the key that the option sets, help) in the order of --help; short options mean the same as in sbatch.
_KEYS: tuple[tuple[tuple[str, ...], str, str], ...] = tuple(
    (option.names, option.key, option.about) for option in CLI_OPTIONS
)
_KEYS = (*_KEYS[:1], (("--repeat",), "job.repeat", _REPEAT), *_KEYS[1:])


def _argument(option: str) -> str:
    """Return the name of the argument in which click passes the value of an option."""
    return option.removeprefix("--").replace("-", "_")


# The arguments that `job_options` adds, except `settings`.
SHAPE = ("ntasks", *(_argument(names[-1]) for names, _, _ in _KEYS), *(_argument(names[-1]) for names, _ in _RAW))


def job_options(function: Command) -> Command:
    """Add the shape options and --set; the command gets them as keyword arguments for `shape_of`."""
    for names, key, about in reversed(_KEYS):
        kind = PARTITION if key == "job.partition" else str
        function = click.option(*names, type=kind, metavar="TEXT", help=about)(function)
    for names, about in reversed(_RAW):
        function = click.option(*names, metavar="TEXT", help=about)(function)
    return _ranks_and_settings(function)


def mesh_options(function: Command) -> Command:
    """Add the options of `job_options` that set the number of ranks, for commands that submit nothing."""
    for names, key, about in reversed(_KEYS):
        if key in ("job.nodes", "job.ranks_per_node"):
            function = click.option(*names, metavar="TEXT", help=about)(function)
    return _ranks_and_settings(function)


def _ranks_and_settings(function: Command) -> Command:
    ranks = click.option("-n", "--ntasks", type=int, help="Total number of ranks, divided equally among the -N nodes.")
    settings = click.option(
        "--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help="Set any key of the job file."
    )
    return settings(ranks(function))


class Shape(TypedDict):
    """The fields of a `JobRequest` that the options of `job_options` set."""

    flags: dict[str, Flag]
    ranks: int | None
    sbatch_options: tuple[str, ...]


def shape_of(values: Mapping[str, Any]) -> Shape:
    """Return the part of a request that the user typed as options of `job_options`."""
    from toolkit.config.document import Flag

    flags = {
        key: Flag(value, names[0]) for names, key, _ in _KEYS if (value := values.get(_argument(names[-1]))) is not None
    }
    if values.get("repeat") not in (None, "1"):  # each repeated job resumes the run, so Slurm must not requeue it
        flags["job.requeue"] = Flag(False, f"--repeat {values['repeat']}, so job.requeue =")
    raw = tuple(f"--{name}={values[name]}" for name in ("output", "error", "dependency") if values.get(name))
    return {"flags": flags, "ranks": values.get("ntasks"), "sbatch_options": raw}


def runs_option(function: Command) -> Command:
    """Add --runs."""
    return click.option(
        "--runs", type=click.Path(path_type=Path), help="Folder of all runs [TOOLKIT_RUNS, site, ./runs]."
    )(function)


def echo_log(text: str, *, err: bool = False) -> None:
    """Print the output of a program: unchanged into a file or a pipe, without harmful escapes on a terminal."""
    from toolkit.runs.logs.logs import for_terminal

    written = text.encode("utf-8", "surrogateescape")
    if (sys.stderr if err else sys.stdout).isatty():
        readable = written.decode("utf-8", "replace")
        end = "\n" if readable.endswith("\n") else ""
        written = (for_terminal(readable.removesuffix("\n")) + end).encode()
    click.echo(written, nl=False, err=err, color=True)  # without color=True, click would remove colors


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/contract.md lists the keys.")


def _print_commands(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    from toolkit.slurm.commands import printed_commands

    if value:
        ctx.find_root().with_resource(printed_commands())


print_command_option = click.option(
    "--print-cmd", is_flag=True, expose_value=False, callback=_print_commands, help="Show each Slurm command on stderr."
)


after_option = click.option(
    "--after", type=RUN, multiple=True, metavar="RUN[:ok|any]",
    help="Start after RUN has completed (ok, the default), or has ended in any way (any).",
)  # fmt: skip


def request_of(job: str, values: Mapping[str, Any], **fields: Any) -> JobRequest:
    """Return the request for JOB from the values of `job_options` and other fields of `JobRequest`."""
    from toolkit.config.request import JobRequest

    return JobRequest(job, **shape_of(values), **fields)


def sweep_options(function: Command) -> Command:
    """Add --sweep and --grid; they are part of the request."""
    grid = click.option(
        "--grid",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with the values of the tasks: TOML, CSV or JSON lines.",
    )
    sweep = click.option(
        "--sweep", "sweeps", multiple=True, metavar="KEY=V1,V2",
        help="One task per value; with several options, one task per combination.",
    )  # fmt: skip
    return sweep(grid(function))


def refuse_before_dashes(argv: Sequence[str], *, may_lack_dashes: bool) -> None:
    """Reject arguments of the script before `--`; without any `--`, the form of sbatch, only some commands accept them."""
    after = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else argv if may_lack_dashes else ()
    if len(argv) > len(after):
        raise click.UsageError(f"unexpected argument {argv[0]!r}; write `--` before the arguments of the script")


def asks_for_job(function: Command) -> Command:
    """Add the arguments of all commands that create a run; the command gets a `JobRequest` first."""

    @functools.wraps(function)
    def command(*, job: str, **given: Any) -> Any:
        refuse_before_dashes(given.get("argv", ()), may_lack_dashes=True)
        shape = {name: given.pop(name) for name in SHAPE}
        fields = ("argv", "site", "runs", "settings", "sweeps", "grid", "after")
        asked = {name: given.pop(name) for name in fields if name in given}
        return function(request_of(job, shape, **asked), **given)

    with_options = runs_option(job_options(cast(Command, command)))
    of_site = click.option("--site", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
    of_argv = click.argument("argv", nargs=-1, type=click.UNPROCESSED)
    return click.argument("job", type=JOB)(of_argv(of_site(with_options)))
