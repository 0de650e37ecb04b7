"""The spans of a run: OpenTelemetry's own messages accept them, and each export has the same ones."""

from __future__ import annotations

import json
import socket
import threading
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from recorded_runs import add_verdicts, record_steps, straggler

from toolkit.metrics.verdicts import VerdictKind, clear_verdict
from toolkit.rundir.layout import RunDirectory

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def spans_of(document: dict) -> list[dict]:
    """The spans of an OTLP document, after the official messages have accepted it: JSON has ids as hex, messages as bytes."""
    (resource,) = document["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    spans = json.loads(json.dumps(scope["spans"]))
    for span in scope["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            span[name] = b64encode(bytes.fromhex(span[name])).decode()
    message = ParseDict(document, ExportTraceServiceRequest())
    for span in message.resource_spans[0].scope_spans[0].spans:
        assert (len(span.trace_id), len(span.span_id), len(span.parent_span_id) in (0, 8)) == (16, 8, True)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    return spans


def exported(toolkit, run: RunDirectory) -> list[dict]:
    path = toolkit.folder / "spans.json"
    toolkit.ok("metrics", "export", run.path, "--otlp", path)
    return spans_of(json.loads(path.read_text()))


def tree(spans: list[dict]) -> set[tuple[str, str]]:
    names = {span["spanId"]: span["name"] for span in spans}
    assert len(names) == len(spans), "an id twice"
    return {(names.get(span["parentSpanId"], span["parentSpanId"]), span["name"]) for span in spans}


def test_spans_are_nested_and_the_same_in_each_export(toolkit, monkeypatch):
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{CALLER}-01")
    run = toolkit.submit(toolkit.job("sleep 0.3"), "--wait")
    now = time.time()
    record_steps(run.attempt(0), 500, began_s=now - 200)
    slow, stall = straggler(now - 0.2), straggler(now - 0.1, VerdictKind.STALL)
    add_verdicts(run, [slow, stall, clear_verdict(slow, now)])
    spans = exported(toolkit, run)
    assert {span["traceId"] for span in spans} == {TRACE}
    found = tree(spans)
    own = {(CALLER, "run"), ("run", "queue"), ("run", "attempt 0"), ("attempt 0", "straggler"), ("attempt 0", "stall")}
    assert own <= found
    steps = {child for parent, child in found if child.startswith("step ")}
    assert 100 < len(steps) <= 200 and "step 1" in steps
    (straggling,) = [span for span in spans if span["name"] == "straggler"]
    seconds = (int(straggling["endTimeUnixNano"]) - int(straggling["startTimeUnixNano"])) / 1e9
    assert seconds == pytest.approx(0.2, abs=0.01)
    assert exported(toolkit, run) == spans


def test_without_a_caller_a_run_is_a_trace_of_its_own(toolkit, monkeypatch):
    monkeypatch.setenv("TRACEPARENT", "not a traceparent")
    runs = [toolkit.submit(toolkit.job("true"), "--wait") for _ in range(2)]
    first, second = (exported(toolkit, run) for run in runs)
    assert ("", "run") in tree(first)
    ids = [{span[name] for span in spans} for spans in (first, second) for name in ("traceId", "spanId")]
    assert not ids[0] & ids[2] and not ids[1] & ids[3]


def test_an_active_run_exports_only_what_has_ended(toolkit, wait_until):
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: run.last_attempt() is not None and run.attempt(0).start_file.exists())
    now = time.time()
    slow = straggler(now - 1)
    add_verdicts(run, [slow, clear_verdict(slow, now - 0.5), straggler(now - 1, VerdictKind.STALL)])
    names = {span["name"] for span in exported(toolkit, run)}
    assert "straggler" in names and not names & {"run", "attempt 0", "stall"}


def test_a_collector_gets_the_spans_and_may_reject_them(toolkit):
    received: list[tuple[str, str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200 if self.path == "/v1/traces" else 415)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    run = toolkit.submit(toolkit.job("true"), "--wait")
    said = toolkit("metrics", "export", run.path, "--otlp", url)
    assert said.code == 0 and "spans" in said.err
    path, kind, body = received[0]
    assert (path, kind) == ("/v1/traces", "application/json")
    assert ("", "run") in tree(spans_of(body))
    refused = toolkit("metrics", "export", run.path, "--otlp", url + "/other")
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "HTTP 415" in refused.err
    server.shutdown()
    server.server_close()


def test_a_place_that_cannot_be_written_is_refused_in_one_line(toolkit):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    for to, code, said in (
        ("no/such/folder", 1, "No such file"),
        ("/dev/full", 2, "No space"),
        (f"http://127.0.0.1:{closed_port()}", 2, "refused"),
    ):
        refused = toolkit("metrics", "export", run.path, "--otlp", to)
        assert (refused.code, refused.err.count("\n")) == (code, 1) and said in refused.err, refused
