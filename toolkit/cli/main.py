"""`toolkit`: the table of commands. A command's module is imported only when that command runs.

The one-line help of each command stands here, so that `toolkit --help` imports nothing but click.
"""

from __future__ import annotations

import errno
import importlib
import sys

import click

import toolkit
from toolkit.errors import INTERRUPTED, OWN_FAILURE, WRONG_USE, ToolkitError

# name: (module, attribute, one-line help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "submit": ("toolkit.cli.submit", "submit", "Submit a job."),
    "run": ("toolkit.cli.submit", "run", "Run a job here and now."),
    "render": ("toolkit.cli.submit", "render", "Print a job's Slurm script."),
    "resume": ("toolkit.cli.submit", "resume", "Continue a run from its newest checkpoint."),
    "status": ("toolkit.cli.follow", "status", "State of a run."),
    "logs": ("toolkit.cli.follow", "logs", "What a run wrote."),
    "wait": ("toolkit.cli.follow", "wait", "Wait until a run ends."),
    "cancel": ("toolkit.cli.follow", "cancel", "Ask a run to save and end."),
    "stop": ("toolkit.cli.control", "stop", "Ask a run to save and end, to be resumed."),
    "save": ("toolkit.cli.control", "save", "Ask a run to save and go on."),
    "requeue": ("toolkit.cli.control", "requeue", "Have a run save, and put its job back into the queue."),
    "explain": ("toolkit.cli.explain", "explain", "Why a run is as it is, and what to do."),
    "rehearse": ("toolkit.cli.rehearse", "rehearse", "Let a failure happen to a run, and see what it costs."),
    "history": ("toolkit.cli.follow", "history", "All runs, the newest first."),
    "jobs": ("toolkit.cli.jobs", "jobs", "Jobs that come with the package."),
    "site": ("toolkit.cli.site", "site", "Which cluster is this: list, show, detect."),
    "config": ("toolkit.cli.config", "config", "Show the resolved configuration and its schema."),
    "topo": ("toolkit.cli.topo", "topo", "Show what the hardware is."),
    "parse": ("toolkit.cli.parse", "parse", "Read another command's output as the toolkit does."),
    "bench": ("toolkit.cli.bench", "bench", "Measure what this machine does."),
    "ckpt": ("toolkit.cli.ckpt", "ckpt", "List, show, verify, compare, prune, export and import checkpoints."),
    "data": ("toolkit.cli.data", "data", "Make token files of text, and indexes of JSON lines."),
    "devcluster": ("toolkit.cli.devcluster", "devcluster", "A real Slurm cluster on this machine."),
}

# Errors of the system about a name that a user gave.
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP)


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(toolkit.__version__, prog_name="toolkit")
def cli() -> None:
    """Batch work on Slurm and MPI clusters: from one job file to a trained and resumed model."""


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and its exit code."""
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except ToolkitError as error:
        for one in (error, *error.others):
            _say(str(one))
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        _say("interrupted")
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # from click 8.2; before, click prints the help itself
            click.echo(error.format_message())
            sys.exit(0)
        _say(_with_help(error))
        sys.exit(error.exit_code)
    except OSError as error:
        from toolkit.rundir.files import cannot_write, is_unwritable

        if is_unwritable(error):
            _say(str(cannot_write(error)))
            sys.exit(WRONG_USE)
        place = f"{error.filename}: " if error.filename else ""
        _say(f"{place}{error.strerror or error}")
        sys.exit(WRONG_USE if error.errno in _OF_A_NAME else OWN_FAILURE)


def _say(text: str) -> None:
    """One line on stderr; what a value brought along of control characters and line ends is escaped."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    click.echo(f"toolkit: {line}", err=True)


def _with_help(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context:
        options = [name for one in context.command.params for name in one.opts]
        # `--gpus` is nearer to --gpus-per-node than to --runs, whatever click counts.
        if longer := [name for name in options if name.startswith(error.option_name)]:
            text = f"No such option {error.option_name!r}. Did you mean {' or '.join(map(repr, longer))}?"
    return f"{text} Fix: see `{context.command_path} --help`" if context else text
