"""Start Slurm steps in a session: a command on all nodes, a shell on one, and a shell that outlives its terminal."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from toolkit.errors import OwnFailureError, ToolkitError, counted
from toolkit.rundir.files import open_append, tail_text
from toolkit.runs.record.job import slurm_of
from toolkit.session.session import SessionState
from toolkit.slurm.records import for_cluster
from toolkit.slurm.submit import without_job

__all__ = ["begin_step", "lasting_shell", "node_of", "shell_argv", "step_argv", "step_environment"]

KEEPER_S = 20.0  # timeout for tmux to start in its Slurm step
# Runs on a node: exit code 9 if tmux is missing, 0 if its socket exists, else 1.
_LOOK = 'command -v tmux >/dev/null || exit 9; [ -S "${TMUX_TMPDIR:-/tmp}/tmux-$(id -u)/$0" ]'
_KEEP = 'tmux -L "$0" new-session -d -s "$1" && while tmux -L "$0" has-session 2>/dev/null; do sleep 2; done'
# The tmux client runs in a shell: proctrack/linuxproc cannot see processes with a space in their name ("tmux: client"),
# so Slurm could not end the step, and would drain the node ("Kill task failed").
_ATTACH = 'tmux -L "$0" attach-session -t "$1"; exit $?'
_NO_TMUX = 9


def step_argv(
    known: SessionState, command: Sequence[str], *, nodes: int | None = None, ntasks: int | None = None
) -> list[str]:
    """Return the srun command for a program, with the ranks per node and the MPI type of the session's job.

    Args:
        nodes: the number of nodes, by default all of the session.
        ntasks: the total number of tasks, instead of the session's ranks per node.

    Raises:
        ToolkitError: the session has fewer than `nodes` nodes.
    """
    job = known.session.job
    if nodes is not None and nodes > len(known.nodes):
        raise ToolkitError(
            f"the session has only {counted(len(known.nodes), 'node')}",
            where=f"-N {nodes}",
            fix=f"use -N {len(known.nodes)}, or omit -N",
        )
    ranks = job.job.ranks_per_node
    if nodes is None:
        nodes = len(known.nodes) if ntasks is None else min(len(known.nodes), ntasks)
    shape = [f"--ntasks={ntasks}"] if ntasks else [f"--ntasks={nodes * ranks}", f"--ntasks-per-node={ranks}"]
    mpi = [f"--mpi={job.launcher.mpi}"] if job.launcher.mpi else []
    cpus = [f"--cpus-per-task={job.job.cpus_per_rank}"]
    return [*_inside(known), f"--nodes={nodes}", *shape, *cpus, *mpi, *job.launcher.options, *command]


def shell_argv(known: SessionState, command: Sequence[str], *, node: str, on_terminal: bool = False) -> list[str]:
    """Return the srun command for one program on one node, which may overlap other steps."""
    terminal = ["--pty"] if on_terminal else []
    return [*_inside(known), "--nodes=1", "--ntasks=1", f"--nodelist={node}", *terminal, *command]


def _inside(known: SessionState) -> list[str]:
    return for_cluster(["srun", f"--jobid={known.session.job_id}", "--overlap"], known.session.job.job.cluster)


def step_environment(known: SessionState, **more: str) -> dict[str, str]:
    """Return the environment of a step: that of this shell, and the site's and job's variables for ranks."""
    job = known.session.job
    environment = slurm_of(job).environment(without_job(os.environ))
    library = {"MPI4PY_LIBMPI": job.launcher.libmpi} if job.launcher.libmpi else {}
    return {**library, **job.site_env.vars, **job.network.vars, **job.env.vars, **environment, **more}


def node_of(known: SessionState, named: str | None) -> str:
    """Return the named node, or the first node of the session.

    Raises:
        ToolkitError: the session does not contain the node.
    """
    if named is None or named in known.nodes:
        return named or known.nodes[0]
    raise ToolkitError(
        f"{named} is not in session {known.session.name}", where="--node", fix=f"use one of {', '.join(known.nodes)}"
    )


def lasting_shell(known: SessionState, node: str) -> list[str]:
    """Return the command that attaches a terminal to the session's tmux on a node; start tmux first if necessary.

    tmux runs in a step of its own, without a terminal, so that it outlives this one. [] if the node has no tmux.

    Raises:
        OwnFailureError: tmux did not start in time.
    """
    socket = f"toolkit-{known.session.job_id}"
    if (code := _look(known, node, socket)) == _NO_TMUX:
        return []
    if code:
        keep = shell_argv(known, ["sh", "-c", _KEEP, socket, known.session.name], node=node)
        begin_step(known, keep, "shell-log", step_environment(known))
        deadline = time.monotonic() + KEEPER_S
        while _look(known, node, socket):
            if time.monotonic() > deadline:
                log = known.session.file("shell-log")
                said = " ".join(tail_text(log, 3))
                raise OwnFailureError(
                    f"tmux did not start on {node} within {KEEPER_S:.0f} s: {said}",
                    where=str(log),
                    fix="use --new for a shell without tmux",
                )
    return shell_argv(known, ["sh", "-c", _ATTACH, socket, known.session.name], node=node, on_terminal=True)


def _look(known: SessionState, node: str, socket: str) -> int:
    argv = shell_argv(known, ["sh", "-c", _LOOK, socket], node=node)
    return subprocess.run(
        argv, env=step_environment(known), stdin=subprocess.DEVNULL, capture_output=True, check=False
    ).returncode  # fmt: skip


def begin_step(
    known: SessionState, argv: Sequence[str], log: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a step that outlives this terminal; its output goes to the session file with suffix `log`."""
    path = known.session.file(log)
    path.unlink(missing_ok=True)
    descriptor = open_append(path)
    try:
        return subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=descriptor, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(descriptor)
