"""Real receivers on loopback: an HTTP server, and the mail server of aiosmtpd."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """`got` are (path, document), `status` is the response."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.status = 202
        self.url = f"http://127.0.0.1:{self.server_port}/T0SECRET"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    server = Receiver()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def mail_receiver(**options: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the URL of a mail server, and the messages that it accepted."""
    from aiosmtpd.controller import Controller
    from aiosmtpd.handlers import Message

    received: list[Any] = []

    class Keeping(Message):
        def handle_message(self, message: Any) -> None:
            received.append(message)

    controller = Controller(Keeping(), hostname="127.0.0.1", port=0, **options)
    # The controller connects to its port to test it, which it cannot know if the system chooses one.
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        controller.port = free.getsockname()[1]
    controller.start()
    try:
        yield f"smtp://127.0.0.1:{controller.port}", received
    finally:
        controller.stop()
