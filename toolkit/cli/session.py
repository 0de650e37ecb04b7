"""`toolkit session`: named allocations that remain when a terminal is closed."""

import json
import os
import platform
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from toolkit.cli.options import JOB, SESSION, SITE, job_options, json_option, print_command_option, request_of
from toolkit.runs.named_runs import for_each, refuse_at_last
from toolkit.slurm.commands import prints_commands
from toolkit.terminal.talk import say


@click.group()
def session() -> None:
    """Allocate nodes for interactive work: start, ls, exec, attach, notebook, stop.

    \b
    toolkit session start -N 2 -t 1:00:00
    """


@session.command()
@click.argument("job", type=JOB, required=False)
@click.option("--name", help="Name of the session for the other commands [-J, else session].")
@click.option("--site", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
@job_options
@click.option("--force", is_flag=True, help="Request nodes even if preflight refuses the request.")
@print_command_option
def start(
    job: str | None, name: str | None, site: str | None, settings: tuple[str, ...], force: bool, **values: Any
) -> None:  # fmt: skip
    """Request nodes and wait until Slurm grants them; Ctrl-C withdraws the request. JOB provides the resources.

    \b
    toolkit session start -N 2 -t 1:00:00
    toolkit session start --name dev my_job.toml
    """
    from importlib.resources import files

    from toolkit.session.files import check_name
    from toolkit.session.session import await_grant, check_request, ending_of, request_session
    from toolkit.site.load import choose_site
    from toolkit.site.partitions import resolve_on
    from toolkit.submission.create import check_sbatch_options
    from toolkit.submission.preflight.checks import FORCED, look, report_cost, require_good

    name = name or values["job_name"] or "session"
    check_name(name)
    if job is None:
        values["job_name"] = values["job_name"] or name  # so that squeue shows it
    lender = job or str(files("toolkit.templates").joinpath("session.toml"))
    request = request_of(lender, values, settings=settings)
    chosen = choose_site(site).site
    resolved = resolve_on(request, chosen, say, limits=False)
    check_sbatch_options(request.sbatch_options, for_sbatch=False)
    check_request(resolved, name)
    found = look(resolved, None, site=chosen)
    report_cost(require_good(found, instead=FORCED if force else "", action="requests them"))
    made, process = request_session(resolved, name)
    known = await_grant(made, process, lambda why: click.echo(f"job {made.full_job_id} waits: {why}", err=True))
    click.echo(f"session {name} is job {made.full_job_id} on {','.join(known.nodes)}" + _until(known.left_s))
    if known.ends_soon:
        say(ending_of(known))


def _until(left_s: float | None) -> str:
    return "" if left_s is None else f", until {time.strftime('%Y-%m-%d %H:%M', time.localtime(time.time() + left_s))}"


@session.command("ls")
@json_option
@print_command_option
def list_sessions(as_json: bool) -> None:
    """List the sessions. A session that has ended is listed once, then removed from the list.

    \b
    toolkit session ls
    """
    from toolkit.session.files import all_sessions
    from toolkit.session.session import ending_of, states_of
    from toolkit.slurm.times import format_slurm_time
    from toolkit.terminal.talk import print_table

    known = states_of(all_sessions())
    if as_json:
        click.echo(json.dumps([one.as_json() for one in known], indent=1))
    else:
        rows = []
        for one in known:
            state = f"{one.state.value} (forgotten)" if one.has_ended else one.state.value
            left = "" if one.left_s is None else format_slurm_time(max(0, int(one.left_s)))
            of_job = one.session
            rows.append(
                (of_job.full_job_id, of_job.name, state, of_job.job.site.name, left, ",".join(one.nodes), one.reason)
            )
        print_table(
            ("JOBID", "NAME", "STATE", "SITE", "TIME_LEFT", "NODELIST", "REASON"), rows,
            shed=("SITE", "REASON", "JOBID", "NODELIST"),
        )  # fmt: skip
    for one in known:
        if one.has_ended:
            one.session.forget()
        elif one.ends_soon:
            say(ending_of(one))


@session.command("exec")
@click.argument("name", type=SESSION)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-N", "--nodes", type=click.IntRange(min=1), help="Use only N nodes of the session.")
@click.option("-n", "--ntasks", type=click.IntRange(min=1), help="Number of tasks [the session's per node].")
@print_command_option
def execute(name: str, command: tuple[str, ...], nodes: int | None, ntasks: int | None) -> None:
    """Run a COMMAND in the session NAME, on all of its nodes; the exit code is the command's.

    \b
    toolkit session exec dev -- hostname
    toolkit session exec dev -n 1 -- python train.py --debug
    """
    from toolkit.session.session import running_session
    from toolkit.session.steps import step_argv, step_environment

    known = running_session(name)
    _become(step_argv(known, command, nodes=nodes, ntasks=ntasks), step_environment(known))


@session.command()
@click.argument("name", type=SESSION)
@click.option("--node", metavar="NODE", help="Node to run on [the first].")
@click.option("--new", is_flag=True, help="Open a new shell, without tmux.")
@print_command_option
def attach(name: str, node: str | None, new: bool) -> None:
    """Open a shell in the session NAME; with tmux on the node, always the same one, even after the terminal was lost.

    \b
    toolkit session attach dev
    """
    from toolkit.errors import ToolkitError
    from toolkit.session.session import running_session
    from toolkit.session.steps import lasting_shell, node_of, shell_argv, step_environment

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ToolkitError(
            "a shell needs a terminal, but stdin or stdout is not a terminal",
            where=f"session attach {name}",
            fix=f"run `toolkit session exec {name} -- COMMAND`, which needs no terminal",
        )
    known = running_session(name)
    where = node_of(known, node)
    argv = [] if new else lasting_shell(known, where)
    if not argv:
        if not new:
            say(f"there is no tmux on {where}: this shell will end with the terminal")
        shell = os.environ.get("SHELL", "/bin/sh")
        argv = shell_argv(known, [shell, "-l"], node=where, on_terminal=True)
    _become(argv, step_environment(known))


@session.command()
@click.argument("name", type=SESSION)
@click.option("--port", type=click.IntRange(1024, 65535), help="Port to use [the first free one from 8888].")
@click.option("--node", metavar="NODE", help="Node to run on [the first].")
@click.option("--login", metavar="HOST", help="Name of this host for ssh from your own machine [its full name].")
@print_command_option
def notebook(name: str, port: int | None, node: str | None, login: str | None) -> None:
    """Start Jupyter in the session NAME, and print the ssh command for a tunnel to it.

    \b
    toolkit session notebook dev
    """
    from toolkit.session.notebook import start_notebook
    from toolkit.session.session import running_session

    found = start_notebook(running_session(name), port=port, named=node)
    click.echo(f"Jupyter runs on {found.node}, until `toolkit session stop {name}`. Run on your own machine:", err=True)
    click.echo(found.tunnel(login or socket.getfqdn() or platform.node()))
    click.echo(found.url)


@session.command()
@click.argument("name", type=SESSION, nargs=-1, required=True)
@print_command_option
def stop(name: tuple[str, ...]) -> None:
    """Release the nodes of each session NAME; its processes end.

    \b
    toolkit session stop dev
    """
    from toolkit.session.files import find_session
    from toolkit.session.session import end_session

    def give_back(word: str) -> None:
        one = find_session(word)
        end_session(one)
        click.echo(f"session {one.name}: released job {one.full_job_id}")

    _, refused = for_each(name, give_back)
    refuse_at_last(refused)


def _become(argv: Sequence[str], environment: dict[str, str]) -> None:
    """Replace this process by srun, which receives the terminal's signals and returns its exit code."""
    from toolkit.errors import NotFoundError

    program = shutil.which(argv[0], path=environment.get("PATH"))
    if program is None:
        raise NotFoundError(f"{argv[0]} is not on PATH", fix="load the Slurm module")
    if prints_commands():
        click.echo("+ " + shlex.join(argv), err=True)
    sys.stdout.flush()
    os.execve(program, [*argv], environment)
