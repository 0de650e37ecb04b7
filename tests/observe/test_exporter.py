"""The exporter's socket and port: who can read it, what it answers, and what remains when it is stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from recorded_runs import record_all

from toolkit.errors import ToolkitError
from toolkit.observe.exporter import MetricsServer
from toolkit.observe.sockets import private_folder

NOBODY = 65534


class OnSocket(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def get(where: str | int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    client = (
        OnSocket(where, 1) if isinstance(where, str) else http.client.HTTPConnection("127.0.0.1", where, timeout=20)
    )
    client.request("GET", path, headers=headers)
    response = client.getresponse()
    return response.status, response.read().decode()


@pytest.fixture
def serve(run_directory):
    """Serve the run of the test in a thread."""
    servers, before = [], os.umask(0o022)

    def start(address, *, token="", targets=None):
        server = MetricsServer(address, [run_directory], 16, token, targets)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    yield start
    os.umask(before)
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def short_folder():
    """A folder whose path a socket can have."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def started(*argv: object, **env: str) -> subprocess.Popen[str]:
    argv = (Path(sys.executable).with_name("toolkit"), "metrics", "serve", *map(str, argv))
    return subprocess.Popen(argv, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True)


def test_a_port_requires_the_token_and_a_name_of_this_host(serve, run_directory):
    record_all(run_directory)
    token = run_directory.secret.read_text().strip()
    port = serve(("127.0.0.1", 0), token=token).server_address[1]
    own = {"Authorization": f"Bearer {token}"}
    status, text = get(port, **own)
    assert status == 200 and "toolkit_step{" in text
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {token}x"}, {"Authorization": token}):
        assert get(port, **headers)[0] == 401, headers
    assert get(port, **own, Host="attacker.example")[0] == 421
    assert get(port, **own, Host=f"localhost:{port}")[0] == 200
    assert get(port, "/", **own)[0] == get(port, "/metrics/../secret", **own)[0] == 404


def test_a_damaged_record_is_reported_and_the_server_continues(serve, run_directory, short_folder):
    attempt = record_all(run_directory)
    address = serve(short_folder / "s").target
    attempt.exit_file.write_text("{")
    status, text = get(address)
    assert status == 500 and str(attempt.exit_file) in text
    attempt.exit_file.unlink()
    assert get(address)[0] == 200


def test_a_client_that_closes_its_connection_leaves_no_trace(serve, run_directory, short_folder, capsys):
    record_all(run_directory, ranks=200)
    address = serve(short_folder / "s").target
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        client.send(b"nonsense\r\n\r\n")
        assert b"DOCTYPE" in client.recv(100)
    assert get(address)[0] == 200
    assert capsys.readouterr().err == ""


def test_two_clients_at_once_get_whole_texts(serve, run_directory, short_folder):
    record_all(run_directory)
    address = serve(short_folder / "s").target
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(get(address)[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and set(texts) == {get(address)[1]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_socket(serve, run_directory, short_folder):
    """Not even in a folder that everybody can search."""
    record_all(run_directory)
    short_folder.chmod(0o755)
    path = short_folder / "s"
    serve(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    program = "import os, socket, sys; os.setuid(int(sys.argv[2])); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    for user, code in ((NOBODY, 1), (0, 0)):
        done = subprocess.run([sys.executable, "-c", program, path, str(user)], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert ("PermissionError" in done.stderr) == bool(code)


def test_the_default_folder_is_of_this_user_alone(short_folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    folder = private_folder()
    assert folder == short_folder / "toolkit" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder() == folder
    folder.chmod(0o750)
    with pytest.raises(ToolkitError, match="only you can enter"):
        private_folder()
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(ToolkitError, match="only you can enter"):
        private_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert private_folder() == Path(f"/tmp/toolkit-{os.geteuid()}")


def test_a_second_server_leaves_the_first_alone_and_replaces_a_killed_one(serve, run_directory, short_folder):
    record_all(run_directory)
    path = short_folder / "s"
    address = serve(path).target
    with pytest.raises(ToolkitError, match="in use"):
        serve(Path(address))
    assert get(address)[0] == 200
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(short_folder / "old"))
    assert get(serve(short_folder / "old").target)[0] == 200
    (short_folder / "file").write_text("mine")
    with pytest.raises(ToolkitError, match="in use"):
        serve(short_folder / "file")
    assert (short_folder / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_server_removes_its_socket_or_target(toolkit, short_folder, number, wait_until):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    targets = short_folder / "targets.json"
    server = started(run.path, "--listen", "127.0.0.1:0", "--sd-file", targets)
    wait_until(targets.exists, 60)
    (entry,) = json.loads(targets.read_text())
    port = int(entry["targets"][0].rpartition(":")[2])
    assert stat.S_IMODE(targets.stat().st_mode) == 0o644
    assert get(port)[0] == 401
    server.send_signal(number)
    _, err = server.communicate(timeout=20)
    assert (server.returncode, targets.exists()) == (0, False)
    assert "Traceback" not in err and str(run.secret) in err and run.secret.read_text().strip() not in err


def test_wrong_uses_are_refused_in_one_line(toolkit, short_folder):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    busy = socket.create_server(("127.0.0.1", 0))
    for options, said in (
        (("--listen", "9464"), "ADDRESS:PORT"), (("--listen", "127.0.0.1:x"), "ADDRESS:PORT"), (("--listen", "a:70000"), "ADDRESS:PORT"),
        (("--sd-file", "x.json"), "--listen"), (("--socket", "s", "--listen", "127.0.0.1:0"), "--listen"),
        (("--listen", f"127.0.0.1:{busy.getsockname()[1]}"), "Address already in use"),
        (("--listen", "192.0.2.1:9464"), "Cannot assign"), (("--listen", "no.such.host.invalid:9464"), "cannot listen"),
        (("--socket", short_folder / ("x" * 120)), "too long"), (("--socket", short_folder / "a/b"), "No such file"),
        (("--listen", "127.0.0.1:0", "--sd-file", short_folder / "a/b.json"), "No such file"),
        (("--listen", "127.0.0.1:0", "--sd-file", toolkit.folder / "work.toml"), "expected a new file or a list of targets"),
    ):  # fmt: skip
        done = toolkit("metrics", "serve", run.path, *options)
        assert (done.code, done.err.count("\n")) == (2, 1) and said in done.err, done
    run.secret.chmod(0o644)
    assert "other users may read" in toolkit("metrics", "serve", run.path, "--listen", "127.0.0.1:0").err
    assert list(short_folder.iterdir()) == [] and (toolkit.folder / "work.toml").exists()


def test_tasks_of_an_array_and_removed_runs(serve, run_directory, short_folder):
    import shutil

    from toolkit.rundir.layout import make_task

    record_all(make_task(run_directory, 3))
    address = serve(short_folder / "s").target
    assert f'run_id="{run_directory.run_id}_3"' in get(address)[1]
    shutil.rmtree(run_directory.path)
    assert get(address) == (200, "")


def test_a_scrape_of_many_ranks_is_fast(serve, run_directory, short_folder):
    record_all(run_directory, ranks=1024, per_node=64)
    address = serve(short_folder / "s").target
    get(address)
    began = time.process_time()
    text = get(address)[1]
    assert text.count("\n") < 600
    assert time.process_time() - began < 1.0
