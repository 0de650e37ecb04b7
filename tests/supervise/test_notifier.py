"""Notifications of the supervisor: the webhook of [notify], on a server of the test's own, and retries."""

from __future__ import annotations

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jsonschema
import pytest

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.states import Cause, Next, decide
from toolkit.supervise import notifier
from toolkit.supervise.failures import AttemptEnd
from toolkit.supervise.outbox import put

STEPS_ONCE = """
import time
from toolkit.world.discover import discover
world = discover()
world.stop_watch.look(1, rank=world.rank)
time.sleep(60)
"""


@pytest.fixture
def server():
    """A server on loopback: `heard` are the documents, `answer` is what it says, None for nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Content-Type"] == "application/json"
            self.server.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if self.server.answer is None:
                self.server.hang.wait(30)
                return
            self.send_response(self.server.answer)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.heard, server.answer, server.hang = [], 200, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/services/T0SECRET"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.hang.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def reference(toolkit):
    """Write a URL into a file of one's own; the table that refers to it."""

    def write(url, mode=0o600, more=""):
        path = toolkit.folder / "webhook"
        path.write_text(f"{url} \n")
        path.chmod(mode)
        return f'[notify]\nwebhook = "file:{path}"\n{more}\n[restart]\ncrashes = 1\n'

    return write


def ran(toolkit, job):
    run = toolkit.submit(job)
    code = toolkit("wait", run.run_id).code
    return run, code, "".join(path.read_text() for path in run.path.glob("slurm-*.out"))


def test_failures_and_the_end_are_posted(toolkit, server, reference, wait_until):
    run, code, log = ran(toolkit, toolkit.job("echo no data; exit 4", name="bad", more=reference(server.url)))
    wait_until(lambda: len(server.heard) == 2)
    assert code == 4 and [told["event"] for told in server.heard] == ["failure", "failure"]
    first, last = server.heard
    assert (first["final"], first["next"], first["exit_code"], first["attempt"]) == (False, "restart", None, 0)
    assert (last["final"], last["state"], last["exit_code"], last["run_id"]) == (True, "failed", 4, run.run_id)
    assert last["text"].startswith(f"bad {run.run_id}: failed: ") and last["reason"] in last["text"]
    assert "webhook" not in log
    for path in run.path.rglob("*"):
        assert path.is_dir() or b"T0SECRET" not in path.read_bytes(), path


@pytest.fixture
def supervised(supervise, local_job, server, reference):
    """Start a supervisor for one rank of a script; its end is posted to the server."""
    webhook_file = reference(server.url).split('"')[1]

    def start(entry, **more):
        job = local_job(entry, ranks=1, **more)
        job["notify"]["webhook"] = webhook_file
        return supervise(job)

    return start


@pytest.mark.parametrize(
    ("number", "event", "state", "code"),
    [
        (signal.SIGUSR2, "preemption", "preempted", 143),
        (signal.SIGTERM, "end", "cancelled", 143),
        (signal.SIGINT, "end", "stopped", 130),
    ],
)
def test_what_a_signal_to_the_supervisor_ends_is_posted(supervised, server, number, event, state, code):
    job = supervised(["bash", "-c", "echo works; sleep 60"])
    job.until_log_says("works")
    job.process.send_signal(number)
    assert job.wait() == code
    (told,) = server.heard
    assert (told["event"], told["state"], told["final"], told["exit_code"]) == (event, state, True, code)
    assert (told["cause"], told["next"], told["step"]) == (state, "end", None)


def test_stalls_are_posted_with_what_follows(supervised, server):
    job = supervised("once.py", files={"once.py": STEPS_ONCE}, restart="stall_s = 1\ncrashes = 1")
    assert job.wait() == 125
    assert [(told["event"], told["final"], told["step"]) for told in server.heard] == [
        ("stall", False, 1),
        ("stall", True, 1),
    ]
    first, last = server.heard
    assert (first["state"], first["next"], last["state"], last["exit_code"]) == ("running", "restart", "failed", 125)
    assert ": continues, restart: no step for " in first["text"] and ": failed: no step for " in last["text"]


def test_of_a_walltime_only_the_last_is_an_end():
    budgets = {"walltimes": 1}
    words = [
        notifier.event_of(decide(Cause.WALLTIME, budgets=budgets, spent={"walltimes": spent}, again=Next.REQUEUE))
        for spent in (0, 1)
    ]
    assert words == ["", "end"]


def test_only_what_is_asked_for_is_posted(toolkit, server, reference, wait_until):
    more = reference(server.url, more='webhook_on = ["end"]')
    ran(toolkit, toolkit.job("exit 4", name="bad", more=more))
    ran(toolkit, toolkit.job("true", name="good", more=more))
    wait_until(lambda: server.heard)
    assert [(told["event"], told["state"]) for told in server.heard] == [("end", "completed")]
    assert server.heard[0]["text"] == f"good {server.heard[0]['run_id']}: completed"


def test_what_the_webhook_did_not_accept_waits_for_the_next_sender(toolkit, server, reference):
    server.answer = 503
    run, _, log = ran(toolkit, toolkit.job("true", name="good", more=reference(server.url)))
    assert log.count("cannot notify webhook: notify.webhook: webhook did not accept it: HTTP 503") == 1
    server.answer = 200
    assert toolkit.ok("alerts", "send") == "sent: 1, waiting: 0\n"
    assert [told["text"] for told in server.heard] == [f"good {run.run_id}: completed"] * 2
    (sent,) = (run.path / "alerts/sent").iterdir()
    schema = json.loads((Path(__file__).parents[2] / "docs/schemas/run-directory.schema.json").read_text())
    jsonschema.validate(json.loads(sent.read_text()), {**schema, "$ref": "#/$defs/end_notification"})


def test_the_login_side_alone_sends_if_the_job_says_so(toolkit, server, reference):
    ran(toolkit, toolkit.job("true", more=reference(server.url, more='sender = "login"')))
    assert server.heard == [] and toolkit.ok("alerts", "send") == "sent: 1, waiting: 0\n" and len(server.heard) == 1


def test_a_notification_is_retried_while_the_run_is_active(server, reference, run_directory, monkeypatch, capsys):
    monkeypatch.setattr(notifier, "RETRY_S", (0.0, 0.0))
    job = {"job": {}, "notify": {"webhook": reference(server.url).split('"')[1], "channels": {}}}
    calls, server.answer = notifier.Notifier(run_directory, job), 500
    calls.add(["webhook"], {"text": "hello", "run_id": "r", "key": "k", "state": "running"})
    calls.wait()
    calls.retry()
    calls.wait()
    server.answer = 200
    calls.retry()
    calls.wait()
    calls.retry()
    calls.wait()
    assert len(server.heard) == 3 and capsys.readouterr().out.count("HTTP 500") == 1
    monkeypatch.setattr(notifier, "RETRY_S", (60.0, 60.0))
    calls.add(["webhook"], {"text": "hello", "run_id": "r", "key": "k", "state": "running"})
    calls.wait()
    put(run_directory, "webhook", {"text": "later", "run_id": "r", "key": "k", "state": "running"})
    calls.retry()  # too early
    assert len(server.heard) == 4 and list(notifier.waiting_channels(run_directory)) == ["webhook"]


@pytest.mark.parametrize(
    "fault", ["refuses", "hangs", "is not there", "is no URL", "is malformed", "may be read by others"]
)
def test_what_goes_wrong_is_said_and_holds_nothing_up(server, reference, run_directory, monkeypatch, capsys, fault):
    monkeypatch.setattr(notifier, "POST_TIMEOUT_S", 0.3 if fault == "hangs" else 20.0)
    server.answer = {"refuses": 404, "hangs": None}.get(fault, 200)
    url = {
        "is not there": "http://127.0.0.1:9/T0SECRET",
        "is no URL": "ftp://T0SECRET",
        "is malformed": "http://localhost:T0SECRET/",
    }.get(fault, server.url)
    table = reference(url, 0o644 if fault == "may be read by others" else 0o600)
    job = {"job": {"name": "bad"}, "notify": {"webhook": table.split('"')[1], "webhook_on": ["failure"]}}
    calls = notifier.Notifier(run_directory, job)
    decision = decide(Cause.CRASHED, budgets={"crashes": 0}, spent={}, again=None)
    attempt, end = claim_attempt(run_directory), AttemptEnd(Cause.CRASHED, "ValueError", 1, 0, "n1")
    began = time.monotonic()
    for _ in range(3):
        calls.tell(attempt, end, decision)
    calls.wait()
    said = capsys.readouterr().out
    assert time.monotonic() - began < 10  # the server would hang for 30 s
    words = {"refuses": "HTTP 404", "hangs": "webhook", "is not there": "Connection refused",
             "is no URL": "expected an http or https URL", "is malformed": "expected an http or https URL",
             "may be read by others": "chmod 600"}  # fmt: skip
    assert words[fault] in said and "T0SECRET" not in said


def test_the_variable_reaches_the_supervisor_alone(toolkit, server, monkeypatch, wait_until):
    monkeypatch.setenv("TEAM_WEBHOOK", server.url)
    job = toolkit.job('echo "has <$TEAM_WEBHOOK>"', more='[notify]\nwebhook = "env:TEAM_WEBHOOK"\n')
    run, code, _ = ran(toolkit, job)
    wait_until(lambda: server.heard)
    assert code == 0
    assert "has <>" in toolkit.ok("logs", run.run_id, "--rank", 0)
    monkeypatch.delenv("TEAM_WEBHOOK")
    printed = toolkit("submit", job)
    assert printed.code == 2 and "TEAM_WEBHOOK was not set" in printed.err


def test_mail_is_slurms_and_a_url_is_refused_unquoted(toolkit):
    job = toolkit.job("true", more='[notify]\nmail = ["me@example.org", "you@example.org"]\nmail_on = ["FAIL"]\n')
    script = toolkit.ok("render", job, "--site", "devcluster")
    assert "#SBATCH --mail-user=me@example.org,you@example.org\n#SBATCH --mail-type=FAIL\n" in script
    for reference in ("https://hooks.example/T0SECRET", "file:beside/T0SECRET", "env:T0SECRET=1"):
        said = toolkit("render", toolkit.job("true", more=f'[notify]\nwebhook = "{reference}"\n'))
        assert said.code == 2 and "notify.webhook" in said.err and "file:" in said.err and "T0SECRET" not in said.err
    for address in ("two words", "one@here,two@here"):
        said = toolkit("render", toolkit.job("true", more=f'[notify]\nmail = ["{address}"]\n'))
        assert said.code == 2 and "notify.mail" in said.err and address in said.err
