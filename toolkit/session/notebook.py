"""Start a Jupyter server on a node of a session, and print the ssh command for a tunnel to it."""

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
START_S = 60.0  # Jupyter's imports may take long on a slow file system
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
        """Return the ssh command to run on the user's own machine."""
        return f"ssh -N -L {self.port}:{self.address}:{self.port} {getpass.getuser()}@{login}"

    @property
    def url(self) -> str:
        """Return the URL to open in a browser at the other end of the tunnel."""
        return f"http://localhost:{self.port}/?token={self.token}"


def start_notebook(known: SessionState, *, port: int | None = None, named: str | None = None) -> Notebook:
    """Return the Jupyter server that runs on a node, or start one; it listens on the address that this host reaches.

    Its token is in a session file that only the owner can read, so it does not appear in process lists.

    Raises:
        CheckFailedError: Jupyter is not installed on the node.
        OwnFailureError: Jupyter does not start.
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
                f"exited with code {process.returncode}"
                if process.returncode is not None
                else f"did not accept connections within {START_S:.0f} s"
            )
            raise OwnFailureError(
                f"{program} {how}: {' '.join(tail_text(log, 3))}",
                where=str(log),
                fix="read this log; if the port is in use, choose another --port",
            )
        time.sleep(0.3)
    return living


def _runtime(known: SessionState, node: str) -> Path:
    """Return the folder for Jupyter's server records. Each node has its own, because records are named by port."""
    return known.session.file("jupyter") / node


def _address_of(known: SessionState, node: str) -> str:
    """Return the address at which Slurm reaches the node; the node itself may resolve its name to loopback."""
    said = slurm_of(known.session.job).call(["sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%o"])
    name = next(iter(said.split()), node)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise OwnFailureError(
            f"this host cannot resolve {name}",
            where=socket.gethostname(),
            fix="ask site support how to reach ports of compute nodes",
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
            fix=f"`{sys.executable} -m pip install jupyterlab`, or load the site's Jupyter module, and retry",
        )
    return lines[-1]


def _living(known: SessionState, node: str, address: str) -> Notebook | None:
    """Return the notebook that Jupyter has recorded for a node, if it accepts connections.

    The token comes from that record, because the token file of the session may belong to a later start.
    """
    for path in _runtime(known, node).glob("jpserver-*.json"):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            port, token = int(said["port"]), str(said["token"])
        except (ValueError, KeyError, OSError):  # Jupyter is still writing this record
            continue
        try:
            with socket.create_connection((address, port), timeout=2.0):
                return Notebook(node, address, port, token)
        except OSError:
            continue
    return None
