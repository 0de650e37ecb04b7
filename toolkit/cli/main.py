"""`toolkit`: the table of commands. A command's module is imported only when that command runs.

The table contains the one-line help of each command, so `toolkit --help` imports nothing but click.
"""

import difflib
import errno
import importlib
import os
import sys
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from toolkit.errors import INTERRUPTED, OWN_FAILURE, WRONG_USE, DamagedFileError, ToolkitError
from toolkit.terminal.talk import say
from toolkit.version import VERSION

# command name: (module, attribute, one-line help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "submit": ("toolkit.cli.submit", "submit", "Submit a job."),
    "run": ("toolkit.cli.submit", "run", "Run a job on this machine, in the foreground."),
    "render": ("toolkit.cli.submit", "render", "Print a job's Slurm script."),
    "import": ("toolkit.cli.submit", "import_script", "Translate a script for sbatch into a job file."),
    "preflight": ("toolkit.cli.submit", "preflight", "Check whether a job can run, and estimate its cost."),
    "resume": ("toolkit.cli.resume", "resume", "Continue a run from its newest checkpoint."),
    "rerun": ("toolkit.cli.resume", "rerun", "Repeat a run as a new one."),
    "diff": ("toolkit.cli.diff", "diff", "Show the differences between two runs."),
    "status": ("toolkit.cli.follow", "status", "Show the state of runs."),
    "logs": ("toolkit.cli.follow", "logs", "Show the logs of a run."),
    "wait": ("toolkit.cli.follow", "wait", "Wait until a run has finished."),
    "cancel": ("toolkit.cli.follow", "cancel", "Cancel a run; it saves first."),
    "stop": ("toolkit.cli.control", "stop", "Save and stop a run, to resume it later."),
    "save": ("toolkit.cli.control", "save", "Save a checkpoint of a running run."),
    "requeue": ("toolkit.cli.control", "requeue", "Save a run and requeue its job."),
    "watch": ("toolkit.cli.watch", "watch", "Follow the progress of runs."),
    "dash": ("toolkit.cli.dash", "dash", "Show runs on a page of a browser."),
    "report": ("toolkit.cli.dash", "report", "Write the page of a run to an HTML file."),
    "timeline": ("toolkit.cli.explain", "timeline", "Draw how a run spent its time."),
    "explain": ("toolkit.cli.explain", "explain", "Explain the state of a run, and what to do."),
    "verdict": ("toolkit.cli.verdict", "verdict", "Show what slows a run down or endangers it."),
    "alerts": ("toolkit.cli.alerts", "alerts", "Show, silence and send alerts, and test rules and channels."),
    "advise": ("toolkit.cli.advise", "advise", "Advise what to change in a run, and measure what changes gained."),
    "stacks": ("toolkit.cli.advise", "stacks", "Show what the ranks of a running run do at the moment."),
    "trace": ("toolkit.cli.advise", "trace", "Merge the traces of all ranks of a run into one file."),
    "metrics": ("toolkit.cli.metrics", "metrics", "Provide metrics to Prometheus, Grafana and others."),
    "efficiency": ("toolkit.cli.explain", "efficiency", "Compare what a run used with what it requested."),
    "rehearse": ("toolkit.cli.rehearse", "rehearse", "Inject a failure into a run, and measure what it costs."),
    "history": ("toolkit.cli.follow", "history", "List all runs, newest first."),
    "session": (
        "toolkit.cli.session",
        "session",
        "Allocate nodes for interactive work: start, ls, exec, attach, notebook, stop.",
    ),
    "gc": ("toolkit.cli.doctor", "gc", "Remove runs that never started, leftovers and old runs."),
    "doctor": (
        "toolkit.cli.doctor",
        "doctor",
        "Check this installation: Python, MPI, torch, Slurm, site, runs, limits.",
    ),
    "jobs": ("toolkit.cli.jobs", "jobs", "List and copy the jobs that come with the package."),
    "site": ("toolkit.cli.site", "site", "Manage site files: list, show, detect, init, check, partitions, bad-nodes."),
    "config": ("toolkit.cli.config", "config", "Show the resolved configuration and its schema."),
    "topo": ("toolkit.cli.topo", "topo", "Show the hardware, and place the ranks of a job on it."),
    "parse": ("toolkit.cli.parse", "parse", "Parse the output of another command as toolkit does."),
    "bench": ("toolkit.cli.bench", "bench", "Measure collectives and training steps."),
    "ckpt": ("toolkit.cli.ckpt", "ckpt", "List, show, verify, compare, prune, export and import checkpoints."),
    "data": ("toolkit.cli.data", "data", "Pack texts into token files, and index JSON lines."),
    "completion": ("toolkit.cli.completion", "completion", "Print the shell script for TAB completion."),
    "devcluster": ("toolkit.cli.devcluster", "devcluster", "Run a real Slurm cluster on this machine."),
}

# System errors that are caused by a name that the user gave.
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
# System errors that a write to stdout can raise. Some have other causes, so `_stdout_refuses` tests stdout.
_OF_A_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class LazyGroup(click.Group):
    """A click group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        from toolkit.slurm.commands import one_command  # imported here, because --help does not need it

        with one_command():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if close := difflib.get_close_matches(args[0], COMMANDS, n=1):
                raise click.UsageError(f"No such command {args[0]!r}. Did you mean {close[0]!r}?", ctx) from error
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=help_text)
            for name, (_, _, help_text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="toolkit")
def cli() -> None:
    """Batch work on Slurm and MPI clusters: from one job file to a trained and resumed model.

    \b
    toolkit submit train_lm -N 2 -t 1:00:00
    toolkit status last
    """


def main() -> None:
    """Run the command line; report a user error as one line on stderr, with its exit code."""
    _open_what_was_closed()
    if instruction := os.environ.get("_TOOLKIT_COMPLETE"):
        from toolkit.cli.completion import complete

        sys.exit(complete(cli, instruction))
    try:
        code = _run()
    except OSError as error:
        code = _refused(error)
    sys.exit(code)


def _run() -> int:
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else 0
    except ToolkitError as error:
        for one in (error, *error.others):
            _say(str(_with_way_out(one)))
        return error.exit_code
    except click.exceptions.Abort:
        _say("interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # from click 8.2 on; older versions print the help themselves
            click.echo(error.format_message())
            return 0
        _say(_with_help(error))
        return error.exit_code


def _refused(error: OSError) -> int:
    """Report a system error; return the exit code."""
    from toolkit.rundir.files import cannot_write, is_unwritable, not_permitted

    if error.filename is None and error.errno in _OF_A_WRITE and _stdout_refuses():
        if error.errno == errno.EPIPE:  # the reader closed the pipe, as `head` does
            return 1
        _say(f"stdout: {error.strerror}. Fix: free space there, or redirect the output elsewhere")
        return WRONG_USE
    if is_unwritable(error):
        _say(str(cannot_write(error)))
        return WRONG_USE
    if isinstance(error, PermissionError) and error.filename is not None:
        _say(str(not_permitted(error)))
        return WRONG_USE
    place = f"{error.filename}: " if error.filename else ""
    _say(f"{place}{error.strerror or error}")
    return WRONG_USE if error.errno in _OF_A_NAME else OWN_FAILURE


def _open_what_was_closed() -> None:
    """Open a stream that the caller closed (`>&-`) on /dev/null.

    Python sets such a stream to None, and the next file that the process opens would get its descriptor: the output of
    a child process would go into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _stdout_refuses() -> bool:
    """Return whether stdout rejects writes: write one more line, because the failed output may have been dropped."""
    try:
        click.echo()
    except OSError:
        _silence(sys.stdout)
        return True
    return False


def _silence(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: Python would flush its buffer again at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Write one line on stderr if stderr accepts it."""
    try:
        say(text)
    except OSError:  # only the exit code can report the error
        _silence(sys.stderr)


def _with_way_out(error: ToolkitError) -> ToolkitError:
    if not isinstance(error, DamagedFileError):
        return error
    from toolkit.runs.status.damaged import with_way_out

    return with_way_out(error)


def _with_help(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context:
        from toolkit.slurm.sbatch_table import FIXES_ON_COMMAND_LINE

        options = [name for one in context.command.params for name in one.opts]
        if "--set" in options and (instead := FIXES_ON_COMMAND_LINE.get(error.option_name)):
            return f"No such option {error.option_name!r}. Fix: {instead}; see `{context.command_path} --help`"
        # Suggest options with this prefix: click would suggest --runs for `--gpu`.
        if longer := [name for name in options if name.startswith(error.option_name)]:
            text = f"No such option {error.option_name!r}. Did you mean {' or '.join(map(repr, longer))}?"
    if not context:
        return text
    end = "" if text.endswith((".", "?", "!")) else "."
    return f"{text}{end} Fix: see `{context.command_path} --help`"
