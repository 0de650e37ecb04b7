"""Debian's Prometheus, Alertmanager and Pushgateway with the metrics, the rules and the dashboard that toolkit ships."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from recorded_runs import add_verdicts, record_all, straggler

from toolkit.metrics.verdicts import VerdictKind, clear_verdict
from toolkit.rundir.layout import RunDirectory

STEPS = """
import time, toolkit
for number in range(20):
    time.sleep(0.05)
    toolkit.step(number)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetch(url: str, data: bytes | None = None, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a program that the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: object) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{len(started)}.log").open("wb")
        started.append(subprocess.Popen([*map(str, argv)], stdout=log, stderr=log, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.terminate()
    for process in started:
        process.wait(20)


@pytest.fixture
def receiver() -> Iterator[tuple[int, list[dict]]]:
    """A port, and the alerts that are posted to it."""
    received: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, received
    server.shutdown()
    server.server_close()


class Prometheus:
    """A Prometheus with the shipped rules, and an Alertmanager that posts to the test."""

    def __init__(self, folder: Path, secret: Path, start: Callable[..., object], webhook: int, rules: str) -> None:
        self.port, self.alerts = free_port(), free_port()
        rules_file, alertmanager, config = (
            folder / "rules.yml",
            folder / "alertmanager.json",
            folder / "prometheus.json",
        )
        rules_file.write_text(rules.replace("for: 1m", "for: 1s"))
        url = f"http://127.0.0.1:{webhook}/"
        route = {
            "receiver": "test",
            "group_by": ["..."],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        }
        receivers = [{"name": "test", "webhook_configs": [{"url": url, "send_resolved": True}]}]
        alertmanager.write_text(json.dumps({"route": route, "receivers": receivers}))
        scrape = {
            "job_name": "toolkit", "file_sd_configs": [{"files": [f"{folder}/*.target.json"], "refresh_interval": "1s"}],
            "authorization": {"credentials_file": str(secret)},
        }  # fmt: skip
        config.write_text(json.dumps({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules_file)], "scrape_configs": [scrape],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self.alerts}"]}]}]},
        }))  # fmt: skip
        start(
            "prometheus-alertmanager", f"--config.file={alertmanager}", f"--web.listen-address=127.0.0.1:{self.alerts}",
            "--cluster.listen-address=", f"--storage.path={folder / 'am'}",
        )  # fmt: skip
        start(
            "prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{self.port}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
        )  # fmt: skip

    def query(self, expression: str) -> list[dict]:
        status, text = fetch(
            f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        )
        if status != 200:
            assert status in (0, 503), (expression, text)
            return []
        return json.loads(text)["data"]["result"]

    def amtool(self, *argv: str) -> str:
        url = f"--alertmanager.url=http://127.0.0.1:{self.alerts}"
        return subprocess.run(["amtool", url, *argv], capture_output=True, text=True, check=True).stdout


def expressions(dashboard: dict) -> list[str]:
    """All expressions of the dashboard, with its variables filled in as Grafana does."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(found) > 30
    return [re.sub(r"\$\w+", ".+", one) for one in found]


def test_prometheus_scrapes_answers_the_dashboard_and_alerts(toolkit, tmp_path, start, receiver, wait_until):
    port, received = receiver
    (tmp_path / "steps.py").write_text(STEPS)
    job = tmp_path / "real.toml"
    job.write_text('[job]\nentry = "steps.py"\n')
    toolkit.ok("render", toolkit.job("true", name="recorded"))  # makes a run that is not submitted
    recorded = RunDirectory(next((toolkit.runs / "recorded").iterdir()))
    record_all(recorded)
    add_verdicts(recorded, [clear_verdict(straggler(time.time()), time.time())])
    real = toolkit.submit(job, "--wait")
    target = tmp_path / "runs.target.json"
    argv = ("metrics", "serve", recorded.path, real.path, "--listen", "127.0.0.1:0", "--sd-file", target)
    exporter = start(Path(sys.executable).with_name("toolkit"), *argv)
    rules = toolkit.ok("metrics", "rules")
    prometheus = Prometheus(tmp_path, recorded.secret, start, port, rules)
    wait_until(target.exists, 30)
    address = json.loads(target.read_text())[0]["targets"][0]
    assert fetch(f"http://{address}/metrics")[0] == 401

    # While Prometheus collects: a straggler that fires, and a stall that an operator has silenced.
    wait_until(lambda: fetch(f"http://127.0.0.1:{prometheus.alerts}/-/ready")[0] == 200, 30)
    prometheus.amtool("silence", "add", "kind=stall", "--comment=test", "--author=test", "--duration=1h")
    slow = straggler(time.time())
    add_verdicts(recorded, [slow, straggler(time.time(), VerdictKind.STALL)])

    wait_until(lambda: prometheus.query(f'toolkit_exit_code{{run_id="{real.run_id}",state="completed"}} == 0'), 30)
    assert prometheus.query("up == 1") and prometheus.query(f'toolkit_steps_total{{run_id="{real.run_id}"}} > 5')
    (sample,) = prometheus.query('toolkit_rank_work_seconds{rank="7"}')
    assert (sample["metric"]["host"], float(sample["value"][1])) == ("n1", pytest.approx(0.107))

    dashboard = json.loads(toolkit.ok("metrics", "dashboard"))
    answered: set[str] = set()

    def all_answered() -> bool:
        answered.update(one for one in expressions(dashboard) if one not in answered and prometheus.query(one))
        return answered == set(expressions(dashboard))

    with suppress(AssertionError):
        wait_until(all_answered, 20)
    assert set(expressions(dashboard)) - answered == set()

    def delivered(state: str) -> list[str]:
        return [one["labels"].get("kind") for one in received if one["status"] == state]

    wait_until(lambda: "straggler" in delivered("firing"), 20)
    (alert,) = [one for one in received if one["labels"].get("kind") == "straggler"]
    assert alert["annotations"]["summary"] == f"recorded {recorded.run_id}: straggler on n0"
    assert f"toolkit verdict {recorded.run_id}" in alert["annotations"]["description"]
    wait_until(lambda: "stall" in prometheus.amtool("alert", "query", "--silenced", "--output=extended"), 20)
    assert "stall" not in prometheus.amtool("alert", "query", "--output=extended")
    add_verdicts(recorded, [clear_verdict(slow, time.time())])
    wait_until(lambda: "straggler" in delivered("resolved"), 30)
    assert "stall" not in delivered("firing")

    exporter.terminate()
    exporter.wait(20)
    assert not target.exists()
    wait_until(lambda: not prometheus.query("toolkit_step"), 20)


def test_the_shipped_rules_are_valid_and_each_fires(toolkit, tmp_path):
    """`promtool test rules` feeds each rule with the series of its fault, and with those of a good run."""
    rules = tmp_path / "rules.yml"
    rules.write_text(toolkit.ok("metrics", "rules"))
    run = 'run_id="R", job_name="J"'
    cases = {
        "ToolkitVerdict": (f'toolkit_verdicts{{{run}, kind="stall", severity="critical"}}', "1x120", "0x120"),
        "ToolkitRunFailed": (f'toolkit_exit_code{{{run}, state="failed"}}', "7x120", "0x120"),
        "ToolkitNoSteps": (f"toolkit_last_step_timestamp_seconds{{{run}}}", "0x120", "0+60x120"),
        "ToolkitSavesFail": (f"toolkit_failed_saves_total{{{run}}}", "0+1x120", "3x120"),
        "ToolkitGpuErrors": (f'toolkit_gpu_ecc_errors_total{{{run}, host="n0", gpu="0"}}', "0+1x120", "3x120"),
    }  # fmt: skip
    assert set(cases) == set(re.findall(r"alert: (\w+)", rules.read_text()))
    tests = []
    for name, (series, bad, good) in cases.items():
        for values, is_firing in ((bad, True), (good, False)):
            fires = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
            expected = [{"labels": "{}", "value": 1}] if is_firing else []
            test = {"expr": fires, "eval_time": "60m", "exp_samples": expected}
            tests.append({
                "interval": "1m", "input_series": [{"series": series, "values": values}], "promql_expr_test": [test],
            })  # fmt: skip
    (tmp_path / "test.json").write_text(json.dumps({"rule_files": [str(rules)], "tests": tests}))
    for argv in (("check", "rules", str(rules)), ("test", "rules", str(tmp_path / "test.json"))):
        done = subprocess.run(["promtool", *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_of_grafana_reads_the_dashboard(toolkit):
    from grafana_foundation_sdk.models.dashboard import Dashboard

    document = json.loads(toolkit.ok("metrics", "dashboard"))
    read = Dashboard.from_json(document)
    assert (read.title, len(read.panels), len(read.templating.list_val)) == ("toolkit runs", len(document["panels"]), 3)


def test_the_dashboard_uses_series_of_the_table_and_its_panels_do_not_overlap(toolkit):
    dashboard = json.loads(toolkit.ok("metrics", "dashboard"))
    table = json.loads((Path(__file__).parents[2] / "toolkit/observe/data/series.json").read_text())
    used = set(re.findall(r"toolkit_\w+", " ".join(expressions(dashboard))))
    names = {
        name for name, row in table.items() for name in ((name, f"{name}_sum") if row[0] == "summary" else (name,))
    }
    assert used - names == set()
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_a_gateway_gets_the_end_of_a_run_until_it_is_deleted(toolkit, start, wait_until):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start("prometheus-pushgateway", f"--web.listen-address=127.0.0.1:{port}", "--persistence.file=")
    done = toolkit("submit", toolkit.job("exit 3", name="a.b-c", more="[restart]\ncrashes = 0\n"), "--wait")
    assert done.code == 3, done
    failed = RunDirectory(next(iter((toolkit.runs / "a.b-c").glob("2*"))))
    wait_until(lambda: fetch(f"{url}/-/ready")[0] == 200, 30)
    toolkit.ok("metrics", "push", failed.path, "--gateway", url)
    pushed = [line for line in fetch(f"{url}/metrics")[1].splitlines() if line.startswith("toolkit_")]
    labels = f'job="toolkit",job_name="a.b-c",run_id="{failed.run_id}",site="local"'
    assert f'toolkit_exit_code{{instance="",{labels},state="failed"}} 3' in pushed
    assert any(line.startswith(f'toolkit_run_seconds{{instance="",{labels}}}') for line in pushed)
    again = toolkit.submit(toolkit.job("true", name="a.b-c"), "--wait")
    toolkit.ok("metrics", "push", again.path, "--gateway", url + "/")
    replaced = fetch(f"{url}/metrics")[1]
    assert 'state="completed"} 0' in replaced and failed.run_id not in replaced
    toolkit.ok("metrics", "push", "last", "--gateway", url, "--delete")
    assert "toolkit_" not in fetch(f"{url}/metrics")[1]
    for bad, said in (
        (f"http://127.0.0.1:{free_port()}", "refused"), (f"{url}/nonsense", "HTTP 40"), ("nonsense", "unknown url type"),
        (f"http://127.0.0.1:{'9' * 6}", "request failed"), ("http://[", "request failed"),
    ):  # fmt: skip
        refused = toolkit("metrics", "push", "last", "--gateway", bad)
        assert (refused.code, refused.err.count("\n")) == (2, 1) and said in refused.err, refused


def test_a_run_that_has_not_ended_is_not_pushed(toolkit, wait_until):
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: run.last_attempt() is not None)
    refused = toolkit("metrics", "push", "last", "--gateway", "http://127.0.0.1:9")
    assert refused.code == 2 and "the run is running" in refused.err
