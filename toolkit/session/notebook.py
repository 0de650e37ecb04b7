"""A notebook on a session's first node, and the ssh command for a tunnel to it."""

import getpass
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import CheckFailedError, OwnFailureError
from toolkit.rundir.files import tail_text, write_text
from toolkit.runs.record.job import slurm_of
from toolkit.session.session import SessionState
from toolkit.session.steps import begin_step, node_of, shell_argv, step_environment

__all__ = ["start_notebook"]

FIRST_PORT = 8888
START_S = 60.0  # Jupyter's imports from a slow file system
_KINDS = ("jupyter-lab", "jupyter-notebook", "jupyter-server")
_LOOK = 'for kind; do command -v "$kind" && exit; done; exit 9'


@dataclass(frozen=True)
class Notebook:
    """A Jupyter server that accepts connections."""

    node: str
    address: str
    port: int
    token: str

    def tunnel(self, login: str) -> str:
        """Return the ssh command for the user's own machine."""
        return f"ssh -N -L {self.port}:{self.address}:{self.port} {getpass.getuser()}@{login}"

    @property
    def url(self) -> str:
        """Return the address for a browser at the other end of the tunnel."""
        return f"http://localhost:{self.port}/?token={self.token}"


def start_notebook(known: SessionState, *, port: int | None = None, named: str | None = None) -> Notebook:
    """Start Jupyter on a node, at the address by which this host reaches the node; or return the running one.

    Its token is in a session file that only the owner can read: no process list shows it.

    Raises:
        CheckFailedError: the node has no Jupyter.
        OwnFailureError: it does not start.
    """
    node = node_of(known, named)
    address = _address_of(known, node)
    if (living := _living(known, node, address)) is not None:
        return living
    environment = step_environment(known, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    program = _program(known, node, environment)
    token = secrets.token_hex(24)
    write_text(known.session.file("token"), token, mode=0o600)
    runtime = _runtime(known, node)
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment |= {"JUPYTER_TOKEN_FILE": str(known.session.file("token")), "JUPYTER_RUNTIME_DIR": str(runtime)}
    argv = [
        program, "--no-browser", f"--ServerApp.ip={address}", f"--ServerApp.port={port or FIRST_PORT}",
        f"--ServerApp.port_retries={0 if port else 100}", *(["--allow-root"] if os.geteuid() == 0 else []),
    ]  # fmt: skip
    process = begin_step(known, shell_argv(known, argv, node=node), "notebook-log", environment)
    deadline = time.monotonic() + START_S
    while (living := _living(known, node, address)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            log = known.session.file("notebook-log")
            how = (
                f"ended with {process.returncode}"
                if process.returncode is not None
                else f"did not answer in {START_S:.0f} s"
            )
            raise OwnFailureError(
                f"{program} {how}: {' '.join(tail_text(log, 3))}",
                where=str(log),
                fix="read that log; another --port may be free",
            )
        time.sleep(0.3)
    return living


def _runtime(known: SessionState, node: str) -> Path:
    """Return the folder of Jupyter's server records, one per node, because servers are named by their ports."""
    return known.session.file("jupyter") / node


def _address_of(known: SessionState, node: str) -> str:
    """Return the node's address as Slurm reaches it; the node itself may resolve its name to loopback."""
    said = slurm_of(known.session.job).call(["sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%o"])
    name = next(iter(said.split()), node)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise OwnFailureError(
            f"this host cannot resolve {name}",
            where=socket.gethostname(),
            fix="ask the site how to reach a node's ports",
        ) from error


def _program(known: SessionState, node: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        shell_argv(known, ["sh", "-c", _LOOK, "sh", *_KINDS], node=node),
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.split()
    if done.returncode or not lines:
        raise CheckFailedError(
            f"Jupyter is not on PATH on {node}",
            fix=f"`{sys.executable} -m pip install jupyterlab`, or load the site's module, and try again",
        )
    return lines[-1]


def _living(known: SessionState, node: str, address: str) -> Notebook | None:
    """Return the notebook that Jupyter has recorded for a node, if it accepts connections.

    The token is from its record: the session's file has that of the latest start.
    """
    for path in _runtime(known, node).glob("jpserver-*.json"):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            port, token = int(said["port"]), str(said["token"])
        except (ValueError, KeyError, OSError):  # Jupyter is still writing it
            continue
        try:
            with socket.create_connection((address, port), timeout=2.0):
                return Notebook(node, address, port, token)
        except OSError:
            continue
    return None
