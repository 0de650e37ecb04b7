"""`toolkit dash` and `toolkit report`, as a user starts them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from queued_runs import end_attempt
from step_windows import window

from toolkit.metrics.window_file import WindowFile
from toolkit.rundir.layout import RunDirectory

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture
def finished(toolkit) -> RunDirectory:
    """A run that has ended, with windows and a job name and reason of which a page must escape the characters."""
    toolkit.ok("render", toolkit.job("true"), "--site", "local")
    (path,) = toolkit.runs.glob("work/*")
    run = RunDirectory(path)
    end_attempt(run, state="failed", cause="crashed", reason="</script><script>alert(1)</script>")
    WindowFile(_folder(run) / "rank-00000.bin", "n0").append([window(0, slot) for slot in range(3)])
    return run


def _folder(run: RunDirectory) -> Path:
    run.attempt(0).windows.mkdir()
    return run.attempt(0).windows


@contextmanager
def dash(*argv: object):
    command = [TOOLKIT, "dash", *map(str, argv)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_printed_url_opens_the_run_and_ctrl_c_ends_the_server(toolkit, finished):
    with dash(finished.run_id, "--runs", toolkit.runs, "--port", 0) as process:
        port, token, run = re.fullmatch(
            r"http://localhost:(\d+)/\?token=(\w{64})&run=(\S+)\n", process.stdout.readline()
        ).groups()
        assert (token, run) == (finished.secret.read_text().strip(), finished.run_id)
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", f"/?token={token}&run={run}")
        first = connection.getresponse()
        first.read()
        connection.request(
            "GET", f"/events?run={run}", headers={"Cookie": first.headers["Set-Cookie"].partition(";")[0]}
        )
        body = connection.getresponse().read().decode()  # the stream of a run that has ended has an end
        assert '"state": "failed"' in body and "event: view" in body and body.endswith("event: end\ndata: {}\n\n")
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.stderr.read()) == (0, "")


def test_the_socket_serves_the_list_of_runs_and_is_removed(toolkit, finished, tmp_path):
    path = tmp_path / "s"
    with dash("--runs", toolkit.runs, "--socket", path) as process:
        assert f"-L 8080:{path} {socket.gethostname()}" in process.stdout.readline()
        assert process.stdout.readline().endswith("http://localhost:8080/\n")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost:8080\r\n\r\n")
            received = ""
            while "event: overview" not in received or "\n\n" not in received.rpartition("data: ")[2]:
                received += client.recv(65536).decode()
        assert finished.run_id in received
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--socket", "s", "--port", "1"], "expected --socket or --port, got both"),
        (["--socket", "missing/s"], "cannot listen: No such file or directory"),
        (["nothing"], "run 'nothing' not found"),
    ],
)
def test_wrong_use_is_explained(toolkit, tmp_path, monkeypatch, argv, expected):
    monkeypatch.chdir(tmp_path)
    toolkit.runs.mkdir(exist_ok=True)
    said = toolkit("dash", "--runs", toolkit.runs, *argv)
    assert said.code in (2, 4) and expected in said.err


def test_a_missing_extra_is_named(toolkit, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = toolkit("dash")
    assert said.code == 2 and 'pip install "toolkit[dash]"' in said.err


def test_the_report_needs_no_network_and_escapes_its_data(toolkit, finished, tmp_path):
    output = tmp_path / "report.html"
    toolkit.ok("report", finished.run_id, "-o", output)
    page = output.read_text()
    assert "alert(1)" in page and "</script><script>alert" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert set(re.findall(r"https?://[\w./-]+", page)) <= {"https://github.com/leeoniya/uPlot"}  # a comment
    assert len(re.findall(r"'sha256-[\w+/]{43}='", page)) == 4 and "unsafe" not in page
    assert page.count("<script>") == 2 and '"work"' in page and '"step"' in page
    assert toolkit("report", finished.run_id, "-o", tmp_path / "missing" / "r.html").code == 2
