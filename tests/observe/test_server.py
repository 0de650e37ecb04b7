"""The server of `toolkit dash`, over real sockets: who may read, and that pages get what is new."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from step_windows import window

from toolkit.errors import ToolkitError
from toolkit.metrics.window_file import WindowFile
from toolkit.observe.readings import RunReadings
from toolkit.observe.server import application
from toolkit.observe.sockets import listen, private_folder
from toolkit.observe.view import view_of
from toolkit.observe.window_grid import WindowGrid
from toolkit.rundir.claims import claim_attempt

TOKEN = "d" * 64


class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


@pytest.fixture
def serve():
    """Start servers; `serve(look, token)` returns the port, `serve(look, path=...)` serves a unix socket."""
    servers = []

    def start(look=lambda run, metrics: ({"overview": []}, True), token="", path=None):
        listener = listen(path or ("127.0.0.1", 0))
        config = uvicorn.Config(
            application(look, token, period_s=0.05), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread, listener))
        while not server.started:
            time.sleep(0.01)
        return path or listener.getsockname()[1]

    yield start
    for server, thread, listener in servers:
        server.should_exit = True
        thread.join()
        listener.close()


def ask(port, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response, body


def test_without_the_token_nothing_is_served(serve):
    port = serve(token=TOKEN)
    for path in ("/", "/events", "/static/dash.js", f"/?token={TOKEN[:-1]}", "/?token=%C3%A9", "/nothing"):
        response, body = ask(port, path)
        assert (response.status, "toolkit dash" in body) == (401, True), path
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert ask(port, Cookie="toolkit-00000000=x")[0].status == 401


def test_the_token_is_exchanged_for_a_cookie(serve):
    port = serve(token=TOKEN)
    response, _ = ask(port, f"/?token={TOKEN}&run=a")
    cookie, *flags = [part.strip().lower() for part in response.headers["Set-Cookie"].split(";")]
    assert (response.status, response.headers["Location"]) == (303, "/?run=a")
    assert {"httponly", "samesite=strict"} <= set(flags) and TOKEN not in cookie
    page, body = ask(port, "/?run=a", Cookie=cookie)
    assert page.status == 200 and "dash.js" in body
    assert ask(serve(token=TOKEN), Cookie=cookie)[0].status == 401, "another server accepts the cookie"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_request_to_another_host_is_rejected(serve, host):
    assert ask(serve(), Host=host)[0].status == 400


def test_a_forwarded_port_is_accepted(serve):
    port = serve()
    assert [ask(port, Host=host)[0].status for host in ("localhost:8080", "127.0.0.1:9", "localhost")] == [200] * 3


def test_a_post_of_another_page_is_rejected(serve):
    port = serve()
    assert ask(port, method="POST")[0].status == 403
    assert ask(port, method="POST", Origin="http://evil.example")[0].status == 403
    assert ask(port, method="POST", Origin="null")[0].status == 403
    assert ask(port, method="POST", Origin=f"http://127.0.0.1:{port}")[0].status == 405


def test_files_outside_the_page_are_not_served(serve):
    port = serve()
    assert ask(port, "/static/dash.css")[0].headers["Content-Type"].startswith("text/css")
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/"):
        assert ask(port, path)[0].status == 404, path


def test_an_unknown_run_is_not_found(serve):
    assert ask(serve(lambda run, metrics: None), "/events?run=x")[0].status == 404


def test_the_stream_delivers_a_new_window_and_ends(serve, run_directory):
    file = WindowFile(claim_attempt(run_directory).windows_file(0), "n0")
    file.append([window(0, 0)])
    readings, is_over = RunReadings(run_directory, grid=WindowGrid()), threading.Event()

    def look(run, metrics):
        readings.update()
        return {"run": {"run": run, "metrics": metrics}, "view": view_of(readings)}, is_over.is_set()

    connection = http.client.HTTPConnection("127.0.0.1", serve(look), timeout=20)
    connection.request("GET", "/events?run=a&metric=work")
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/event-stream")

    def event():
        name, data, _ = (response.readline().decode().strip() for _ in range(3))
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    assert event() == ("run", {"run": "a", "metrics": ["work"]})
    assert len(event()[1]["times"]) == 1
    file.append([window(0, 1)])
    name, view = event()  # the unchanged event `run` is not repeated
    assert (name, len(view["times"])) == ("view", 2)
    is_over.set()
    assert event() == ("end", {}) and response.read() == b""


def test_a_stream_whose_browser_is_gone_reads_no_more(serve):
    calls = []
    connection = http.client.HTTPConnection(
        "127.0.0.1", serve(lambda *_: (calls.append(1), ({"overview": [len(calls)]}, False))[1])
    )
    connection.request("GET", "/events")
    connection.getresponse().readline()
    connection.sock.close()
    connection.close()
    time.sleep(1)
    count = len(calls)
    time.sleep(0.5)
    assert len(calls) == count


def test_only_the_user_can_connect_to_the_socket(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = private_folder() / "dash"
    serve(path=path)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    connection = Unix(str(path))
    connection.request("GET", "/", headers={"Host": "localhost:8080"})
    assert connection.getresponse().status == 200
    if os.geteuid():
        pytest.skip("only root can become another user")
    for folder in (path.parent, *path.parent.parents):  # the mode of the socket alone must suffice, too
        folder.chmod(folder.stat().st_mode | 0o111)
    code = f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_the_folder_of_sockets_must_be_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit").chmod(0o755)
    with pytest.raises(ToolkitError, match="only you can enter"):
        private_folder()
    (tmp_path / "toolkit").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "toolkit").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ToolkitError, match="only you can enter"):
        private_folder()


def test_a_socket_is_replaced_only_if_no_process_listens_on_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = listen(Path("dash"))
    first.listen()
    with pytest.raises(ToolkitError, match="cannot listen: Address already in use"):
        listen(Path("dash"))
    first.close()
    listen(Path("dash")).close()
    Path("file").write_text("kept")
    with pytest.raises(ToolkitError, match="cannot listen"):
        listen(Path("file"))
    assert Path("file").read_text() == "kept"
    with pytest.raises(ToolkitError, match="too long"):
        listen(tmp_path / ("d" * 108))
    with listen(("127.0.0.1", 0)) as used, pytest.raises(ToolkitError, match="cannot listen"):
        used.listen()
        listen(used.getsockname())
