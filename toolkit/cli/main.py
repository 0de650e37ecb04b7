"""`toolkit`: the table of commands. A command's module is imported only when that command runs.

The one-line help of each command stands here, so that `toolkit --help` imports nothing but click.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import TextIO

import click
from click.shell_completion import CompletionItem

import toolkit
from toolkit.errors import INTERRUPTED, OWN_FAILURE, WRONG_USE, DamagedFileError, ToolkitError
from toolkit.slurm.silence import one_command
from toolkit.talk import say

# name: (module, attribute, one-line help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "submit": ("toolkit.cli.submit", "submit", "Submit a job."),
    "run": ("toolkit.cli.run_foreground", "run", "Run a job here and now."),
    "render": ("toolkit.cli.submit", "render", "Print a job's Slurm script."),
    "preflight": ("toolkit.cli.submit", "preflight", "Would a job run, and what may it cost?"),
    "resume": ("toolkit.cli.resume", "resume", "Continue a run from its newest checkpoint."),
    "rerun": ("toolkit.cli.resume", "rerun", "Repeat a run as a new one."),
    "diff": ("toolkit.cli.diff", "diff", "In what two runs differ."),
    "status": ("toolkit.cli.follow", "status", "State of a run."),
    "logs": ("toolkit.cli.follow", "logs", "What a run wrote."),
    "wait": ("toolkit.cli.follow", "wait", "Wait until a run ends."),
    "cancel": ("toolkit.cli.follow", "cancel", "Ask a run to save and end."),
    "stop": ("toolkit.cli.control", "stop", "Ask a run to save and end, to be resumed."),
    "save": ("toolkit.cli.control", "save", "Ask a run to save and go on."),
    "requeue": ("toolkit.cli.control", "requeue", "Have a run save, and put its job back into the queue."),
    "watch": ("toolkit.cli.watch", "watch", "How far runs are, until they end."),
    "timeline": ("toolkit.cli.timeline", "timeline", "What a run did with its time, drawn."),
    "explain": ("toolkit.cli.explain", "explain", "Why a run is as it is, and what to do."),
    "efficiency": ("toolkit.cli.efficiency", "efficiency", "What a run used of what it asked for."),
    "rehearse": ("toolkit.cli.rehearse", "rehearse", "Let a failure happen to a run, and see what it costs."),
    "history": ("toolkit.cli.follow", "history", "All runs, the newest first."),
    "session": ("toolkit.cli.session", "session", "Hold nodes to work on: start, ls, exec, attach, notebook, stop."),
    "gc": ("toolkit.cli.gc", "gc", "Remove runs that never started, leftovers, and old runs."),
    "doctor": ("toolkit.cli.doctor", "doctor", "Is all well here: Python, MPI, torch, Slurm, site, runs, limits."),
    "jobs": ("toolkit.cli.jobs", "jobs", "Jobs that come with the package."),
    "site": ("toolkit.cli.site", "site", "Which cluster is this: list, show, detect, init, check."),
    "config": ("toolkit.cli.config", "config", "Show the resolved configuration and its schema."),
    "topo": ("toolkit.cli.topo", "topo", "Show what the hardware is."),
    "parse": ("toolkit.cli.parse", "parse", "Read another command's output as the toolkit does."),
    "bench": ("toolkit.cli.bench", "bench", "Measure what this machine does."),
    "ckpt": ("toolkit.cli.ckpt", "ckpt", "List, show, verify, compare, prune, export and import checkpoints."),
    "data": ("toolkit.cli.data", "data", "Make token files of text, and indexes of JSON lines."),
    "completion": ("toolkit.cli.completion", "completion", "Print the script that completes words on TAB."),
    "devcluster": ("toolkit.cli.devcluster", "devcluster", "A real Slurm cluster on this machine."),
}

# Errors of the system about a name that a user gave.
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
# Errors of the system that a write alone meets.
_OF_A_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class LazyGroup(click.Group):
    """A click group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

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
            CompletionItem(name, help=told) for name, (_, _, told) in COMMANDS.items() if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(toolkit.__version__, prog_name="toolkit")
def cli() -> None:
    """Batch work on Slurm and MPI clusters: from one job file to a trained and resumed model.

    \b
    toolkit submit train_lm -N 2 -t 1:00:00
    toolkit status last
    """


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and its exit code."""
    _open_what_was_closed()
    if asked := os.environ.get("_TOOLKIT_COMPLETE"):
        from toolkit.cli.completion import complete

        sys.exit(complete(cli, asked))
    try:
        code = _run()
    except OSError as error:
        code = _refused(error)
    sys.exit(code)


def _run() -> int:
    try:
        with one_command():
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
        if type(error).__name__ == "NoArgsIsHelpError":  # from click 8.2; before, click prints the help itself
            click.echo(error.format_message())
            return 0
        _say(_with_help(error))
        return error.exit_code


def _refused(error: OSError) -> int:
    """Say what the system refused; the exit code."""
    from toolkit.rundir.files import cannot_write, is_unwritable, not_permitted

    if error.filename is None and error.errno in _OF_A_WRITE and _stdout_refuses():
        if error.errno == errno.EPIPE:  # whoever read it has seen enough
            return 1
        _say(f"stdout: {error.strerror}. Fix: make room there, or send it elsewhere")
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
    """Give a stream that the caller closed (`>&-`) to /dev/null.

    Python has None in its place, and the next file that anybody opens would have its number: what a program that we
    start prints would stand in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _stdout_refuses() -> bool:
    """Whether stdout takes no more: what it could not write it may hold, or have dropped, so one more line is tried."""
    try:
        click.echo()
    except OSError:
        _silence(sys.stdout)
        return True
    return False


def _silence(stream: TextIO) -> None:
    """Give a stream to /dev/null, since Python would try to write what it holds once more at its end, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """One line on stderr, where it takes one."""
    try:
        say(text)
    except OSError:  # then the exit code alone can tell
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
        from toolkit.cli.options import OF_SBATCH

        options = [name for one in context.command.params for name in one.opts]
        if "--set" in options and (here := OF_SBATCH.get(error.option_name)):
            return f"No such option {error.option_name!r}. Fix: {here}; see `{context.command_path} --help`"
        # `--gpu` is nearer to --gpus-per-node than to --runs, whatever click counts.
        if longer := [name for name in options if name.startswith(error.option_name)]:
            text = f"No such option {error.option_name!r}. Did you mean {' or '.join(map(repr, longer))}?"
    if not context:
        return text
    end = "" if text.endswith((".", "?", "!")) else "."
    return f"{text}{end} Fix: see `{context.command_path} --help`"
