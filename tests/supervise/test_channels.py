"""Channels of alerts, with real receivers."""

from __future__ import annotations

import sys

import pytest
from receivers import http_receiver, mail_receiver

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.supervise import channels
from toolkit.supervise.channels import post

FIRING = {
    "text": "work 20261125-1: critical high firing: x is 3", "run_id": "20261125-1", "key": "20261125-1-high-1.000",
    "rule": "high", "state": "firing", "severity": "critical",
}  # fmt: skip


@pytest.fixture
def receiver():
    with http_receiver() as server:
        yield server


@pytest.fixture
def notify(tmp_path, receiver):
    """A table [notify] whose channels refer to the receiver."""

    def secret(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o600)
        return f"file:{path}"

    url = secret("url", receiver.url)
    keys = {
        "team": f"slack:{url}",
        "hook": f"webhook:{url}",
        "oncall": "pagerduty:" + secret("key", f"{receiver.url} KEY1"),
    }
    more = {"me": "mail:me@example.org,you@example.org", "variable": "slack:env:TEAM", "other": f"apprise:{url}"}
    return {
        "webhook": "",
        "mail": [],
        "smtp": "smtp://127.0.0.1:9",
        "mail_from": "it@example.org",
        "channels": keys | more,
    }


def test_each_service_gets_its_own_form(notify, receiver):
    for channel in ("hook", "team", "oncall"):
        post(channel, FIRING, notify, {})
    post("oncall", {**FIRING, "state": "resolved"}, notify, {})
    post("variable", FIRING, notify, {"TEAM": receiver.url})
    (_, hook), (_, team), (_, trigger), (_, resolve), (_, again) = receiver.got
    assert hook == FIRING and team == again == {"text": FIRING["text"]}
    assert (trigger["routing_key"], trigger["event_action"], resolve["event_action"]) == ("KEY1", "trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"] == FIRING["key"]
    assert trigger["payload"]["summary"] == FIRING["text"] and trigger["payload"]["severity"] == "critical"


def test_pagerduty_has_a_default_region(notify, receiver, tmp_path, monkeypatch):
    monkeypatch.setattr(channels, "_PAGERDUTY_URL", receiver.url + "/v2")
    (tmp_path / "key").write_text("KEY2\n")
    post("oncall", FIRING, notify, {})
    ((path, event),) = receiver.got
    assert path == "/T0SECRET/v2" and event["routing_key"] == "KEY2"


def test_mail_reaches_all_recipients(notify):
    with mail_receiver() as (server, received):
        post("me", {**FIRING, "text": "a line\nand é"}, {**notify, "smtp": server}, {})
    (message,) = received
    assert (message["From"], message["To"]) == ("it@example.org", "me@example.org,you@example.org")
    assert message["X-RcptTo"] == "me@example.org, you@example.org" and "a line and" in str(message["Subject"])
    assert "severity: critical" in message.get_payload(decode=True).decode()


def test_a_password_is_never_sent_without_encryption(notify, tmp_path):
    with mail_receiver() as (server, received):
        (tmp_path / "smtp").write_text(server.replace("//", "//ada:T0SECRET@"))
        (tmp_path / "smtp").chmod(0o600)
        with pytest.raises(ToolkitError, match="mail did not accept it: SMTPNotSupportedError") as caught:
            post("me", FIRING, {**notify, "smtp": f"file:{tmp_path}/smtp"}, {})
    assert not received and "T0SECRET" not in str(caught.value)


def test_apprise_reaches_other_services(notify, receiver, tmp_path):
    pytest.importorskip("apprise")
    (tmp_path / "url").write_text(receiver.url.replace("http:", "json:"))
    post("other", FIRING, notify, {})
    ((_, body),) = receiver.got
    assert body["message"] == FIRING["text"]
    (tmp_path / "url").write_text("nonsense:T0SECRET")
    with pytest.raises(ToolkitError, match="apprise did not accept it") as caught:
        post("other", FIRING, notify, {})
    assert "T0SECRET" not in str(caught.value)


def test_without_apprise_the_error_names_the_extra(notify, monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ToolkitError, match=r"apprise is not installed. Fix: pip install 'toolkit\[alerts\]'"):
        post("other", FIRING, notify, {})


@pytest.mark.parametrize(
    ("channel", "text", "problem"),
    [
        ("team", "http://127.0.0.1:9/T0SECRET", "Connection refused"),
        ("team", "T0SECRET", "expected an http or https URL"),
        ("team", "", "is empty"),
        ("oncall", "ftp://T0SECRET KEY", "did not accept it"),
        ("oncall", "nonsense://T0SECRET KEY", "did not accept it"),
        ("oncall", "a b T0SECRET KEY", "did not accept it"),
        ("me", "", "Connection refused"),
    ],
)
def test_problems_are_reported_without_the_secret(notify, tmp_path, channel, text, problem):
    for name in ("url", "key"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ToolkitError) as caught:
        post(channel, FIRING, notify, {})
    assert problem in str(caught.value) and "T0SECRET" not in str(caught.value)


def test_a_response_of_the_service_is_reported(notify, receiver):
    receiver.status = 404
    with pytest.raises(
        ToolkitError, match=r"slack did not accept it: HTTP 404\. Fix: `toolkit alerts test team JOB` sends"
    ):
        post("team", FIRING, notify, {})
    with pytest.raises(NotFoundError, match=r"channel 'teem' not found. Fix: use one of team, "):
        post("teem", FIRING, notify, {})
