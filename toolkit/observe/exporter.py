"""Serve the series of runs by HTTP, on a unix socket of the user or on a TCP port that requires a token."""

import hmac
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock

from toolkit.errors import ToolkitError
from toolkit.observe.readings import RunReadings
from toolkit.observe.series import records_of, text_of
from toolkit.observe.sockets import listen
from toolkit.rundir.attempt_records import AttemptRecord
from toolkit.rundir.files import write_text
from toolkit.rundir.layout import RunDirectory

__all__ = ["MetricsServer"]


class MetricsServer(ThreadingMixIn, TCPServer):
    """Serves the series of runs and their tasks on the path of a socket, or on a (host, port) to clients with the token.

    `targets` is a file for the service discovery of Prometheus, which exists until the server is closed.
    """

    daemon_threads = allow_reuse_address = True

    def __init__(
        self,
        address: Path | tuple[str, int],
        runs: Sequence[RunDirectory],
        ranks: int,
        token: str,
        targets: Path | None,
    ) -> None:
        if targets is not None:
            _refuse_other_file(targets)
        self.runs, self.ranks, self.token, self.lock = runs, ranks, token, Lock()
        self.readings = dict[Path, RunReadings]()
        self.files: list[Path] = []  # to remove
        self.names = ["localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()]
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(address)
        self.server_address = self.socket.getsockname()
        if isinstance(address, Path):
            self.target, self.files = str(address), [address]
        else:
            self.target = f"{address[0]}:{self.server_address[1]}"
            self.names.append(address[0])
        if targets is not None:
            try:
                write_text(targets, json.dumps([{"targets": [self.target]}]), mode=0o644)
            except OSError as error:
                self.server_close()
                raise ToolkitError(
                    f"cannot write: {error.strerror}", where=str(targets), fix="create its folder"
                ) from error
            self.files.append(targets)

    def server_close(self) -> None:
        super().server_close()
        for path in self.files:
            path.unlink(missing_ok=True)

    def text(self) -> str:
        """Return the series of this moment. A run that has no attempt, or was removed, has none."""
        shown = []
        with self.lock:
            for run in (one for each in self.runs for one in each.with_tasks()):
                if (attempt := run.last_attempt()) is not None:
                    end, readings = AttemptRecord.read(attempt), self.readings.setdefault(run.path, RunReadings(run))
                    readings.update()
                    own = {"run_id": run.run_id, "job_name": run.job_name}
                    shown.append((own, records_of(readings, end, self.ranks)))
        return text_of(shown)


def _refuse_other_file(path: Path) -> None:
    """Raise ToolkitError if a file exists that is not a list of targets: the server replaces and removes it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, OSError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "targets" in one for one in found):
        raise ToolkitError("expected a new file or a list of targets", where=str(path), fix="choose another file")


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0
    server: MetricsServer

    def do_GET(self) -> None:
        given, token = self.headers.get("Authorization", ""), f"Bearer {self.server.token}"
        status, text = 404, "expected /metrics\n"
        if self.server.token and self.headers.get("Host", "").partition(":")[0] not in self.server.names:
            status, text = 421, "expected a name of this host in the header Host\n"  # against DNS rebinding
        elif self.server.token and not hmac.compare_digest(given.encode(), token.encode()):
            status, text = 401, "expected the token in the file `secret` of the run\n"
        elif self.path == "/metrics":
            try:
                status, text = 200, self.server.text()
            except (ToolkitError, OSError) as error:
                status, text = 500, f"{error}\n"
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("WWW-Authenticate", "Bearer")
        with suppress(ConnectionError):  # the client closed the connection
            self.end_headers()
            self.wfile.write(text.encode("utf-8", "replace"))

    def log_message(self, *_: object) -> None:
        """Log nothing: a line per scrape would hide messages."""
