"""Notifications that wait for a host with access to the channel."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest
from receivers import http_receiver

from toolkit.rundir.layout import RunDirectory
from toolkit.supervise import outbox
from toolkit.supervise.outbox import put, send_outbox


@pytest.fixture
def receiver():
    with http_receiver() as server:
        yield server


@pytest.fixture
def notify(tmp_path, receiver):
    (tmp_path / "url").write_text(receiver.url)
    (tmp_path / "url").chmod(0o600)
    kinds = {"hook": "webhook", "other": "slack", "away": "apprise"}
    return {"webhook": "", "channels": {name: f"{kind}:file:{tmp_path}/url" for name, kind in kinds.items()}}


def document(number: int, state: str = "firing") -> dict[str, object]:
    return {"text": f"number {number}", "run_id": "r", "key": f"r-high-{number}.000", "state": state}


def files(run: RunDirectory) -> list[int]:
    return [len(list(run.outbox.with_name(name).glob("*"))) for name in ("outbox", "sent")]


def _send(path: Path, notify: dict, start: object, sent: object) -> None:
    start.wait()
    sent.put(send_outbox(RunDirectory(path), notify, print))


def test_two_senders_at_once_send_nothing_twice(run_directory, notify, receiver):
    for number in range(40):
        put(run_directory, "hook", document(number))
    context = multiprocessing.get_context("fork")
    start, sent = context.Event(), context.Queue()
    senders = [context.Process(target=_send, args=(run_directory.path, notify, start, sent)) for _ in range(2)]
    for sender in senders:
        sender.start()
    start.set()
    total = sum(sent.get(timeout=60) for _ in senders)
    for sender in senders:
        sender.join()
    total += send_outbox(run_directory, notify, print)  # what one has left, because the other one was at work
    texts = [body["text"] for _, body in receiver.got]
    assert texts == [f"number {number}" for number in range(40)] and total == 40
    assert files(run_directory) == [0, 40]


def test_a_channel_that_fails_keeps_its_order_and_others_are_sent(run_directory, notify, receiver, tmp_path):
    for number in range(3):
        put(run_directory, "hook", document(number))
    put(run_directory, "other", document(9))
    (tmp_path / "url").rename(tmp_path / "elsewhere")
    reported: list[str] = []
    assert send_outbox(run_directory, notify, reported.append) == 0 and len(reported) == 2
    (tmp_path / "elsewhere").rename(tmp_path / "url")
    receiver.status = 500
    assert send_outbox(run_directory, notify, reported.append) == 0 and "HTTP 500" in reported[-1]
    receiver.status, receiver.got[:] = 200, []
    assert send_outbox(run_directory, notify, reported.append) == 4
    texts = [body["text"] for _, body in receiver.got]
    assert [one for one in texts if one != "number 9"] == ["number 0", "number 1", "number 2"] and len(texts) == 4


def test_what_a_killed_sender_claimed_is_sent_later(run_directory, notify, receiver, monkeypatch):
    for number in range(2):
        put(run_directory, "hook", document(number))
    first = min(run_directory.outbox.glob("*.json"))
    first.rename(f"{first}.elsewhere-1-1")
    assert (
        send_outbox(run_directory, notify, print) == 0
    )  # it may still be at work, and the second must not overtake it
    monkeypatch.setattr(outbox, "RECLAIM_S", 0.0)
    assert send_outbox(run_directory, notify, print) == 2 and len(receiver.got) == 2


def test_apprise_is_left_to_the_login_side(run_directory, notify):
    put(run_directory, "away", document(1))
    assert send_outbox(run_directory, notify, print, is_login=False) == 0 and files(run_directory) == [1, 0]


def test_damaged_files_and_unknown_channels_are_named_and_stay(run_directory, notify, receiver):
    put(run_directory, "hook", document(1))
    (path,) = run_directory.outbox.glob("*")
    path.write_text("{torn")
    put(run_directory, "gone", document(2))
    reported: list[str] = []
    assert send_outbox(run_directory, notify, reported.append) == 0
    assert len(reported) == 2
    assert any("invalid JSON" in one for one in reported) and any("channel 'gone' not found" in one for one in reported)
    assert files(run_directory) == [2, 0]


def test_threads_of_one_process_claim_apart(run_directory, notify, receiver):
    for number in range(10):
        put(run_directory, "hook", document(number))
    threads = [threading.Thread(target=send_outbox, args=(run_directory, notify, print)) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    send_outbox(run_directory, notify, print)
    assert len(receiver.got) == 10 and files(run_directory) == [0, 10]
