"""The page in a real browser: what it draws, how it is operated, and that its policy is not violated."""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.metrics.own import OwnRecord
from toolkit.metrics.records import RecordLog
from toolkit.observe.server import application
from toolkit.observe.sockets import listen
from toolkit.runs.follow.pages import Pages

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.evidence, pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two simulated runs, of which one is active."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    script = importlib.import_module("dash_screenshots")
    runs = tmp_path_factory.mktemp("runs")
    active, ended = (
        script.simulate(runs, one, time.time()) for one in script.SCENES if one.name in ("train_lm", "train_before")
    )
    yield Pages([active, ended]), active, ended
    sys.path.remove(str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="module")
def url(pages):
    import uvicorn

    listener = listen(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(application(pages[0].look), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://localhost:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def open_page(browser):
    """Open a page in a context with options; at the end, no script may have failed and no request been refused."""
    problems, contexts = [], []

    def start(address, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: "ABORTED" in request.failure or problems.append(request.url))
        page.goto(address)
        return page

    yield start
    assert problems == []
    for context in contexts:
        context.close()


def test_a_run_is_drawn_and_operated_by_keys(open_page, url, pages):
    page = open_page(f"{url}?run={pages[1].run_id}", permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_selector(".uplot")
    assert "rank 2 on node n0 computes" in page.inner_text(".verdict >> nth=1")
    page.click(".verdict >> nth=1 >> text=Copy")
    page.wait_for_selector("text=Copied")
    assert "--exclude n0" in page.evaluate("navigator.clipboard.readText()")
    assert page.locator("section:visible h2").all_inner_texts() == [
        "Verdicts", "Ranks by time", "Slowest and median rank", "Composition of a step", "Loss", "Throughput", "Memory by node", "Events",
    ]  # fmt: skip
    page.focus("canvas.heat")
    for key in ("End", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    assert "rank 2 on n0" in page.inner_text(".tip") and "above the median rank" in page.inner_text(".tip")
    colours = "(row) => [...document.querySelector('canvas.heat').getContext('2d').getImageData(900, 11 + 22 * row, 1, 1).data]"
    slow, usual = page.evaluate(colours, 2), page.evaluate(colours, 0)
    assert slow[0] > 200 and usual[0] < 100, "the slow rank is yellow, the others are blue"
    page.select_option("select", "memory")
    page.wait_for_selector(".tip:has-text('GiB')")


def test_a_new_window_appears_without_a_reload(open_page, url, pages):
    from toolkit.metrics.window_file import WindowFile, read_windows

    page = open_page(f"{url}?run={pages[1].run_id}")
    page.wait_for_selector(".uplot")
    page.focus("canvas.heat")
    page.keyboard.press("End")
    before = page.inner_text(".tip")
    file = pages[1].attempt(1).windows_file(0)
    last = read_windows(file)[-4:]
    WindowFile(file, "n0", bytes_per_rank=10**7).append(replace(one, began_s=one.began_s + 10) for one in last)
    page.wait_for_timeout(7000)
    page.keyboard.press("End")
    assert page.inner_text(".tip") != before


def test_runs_are_listed_and_compared(open_page, url, pages):
    page = open_page(url)
    page.wait_for_selector("tbody tr")
    assert page.locator("tbody tr").count() == 2 and "completed" in page.inner_text("tbody")
    for box in page.locator("input").all():
        box.check()
    page.click("text=Compare")
    page.wait_for_selector(".uplot >> nth=1")
    assert page.locator("section:visible h2").all_inner_texts() == ["Loss", "Time of a step"]
    assert all(run.run_id in page.inner_text("main") for run in pages[1:])


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_no_part_is_wider_than_the_screen(open_page, url, pages, width):
    page = open_page(f"{url}?run={pages[1].run_id}", viewport={"width": width, "height": 800})
    page.wait_for_selector(".uplot")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_dark_screen_gets_a_dark_page(open_page, url, pages):
    page = open_page(f"{url}?run={pages[1].run_id}", color_scheme="dark")
    page.wait_for_selector(".uplot")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_the_report_works_from_a_file_without_a_network(open_page, pages, tmp_path):
    output = tmp_path / "report.html"
    command = [str(Path(sys.executable).with_name("toolkit")), "report", str(pages[2].path), "-o", str(output)]
    subprocess.run(command, check=True)
    page = open_page(output.as_uri(), offline=True)
    page.wait_for_selector(".uplot")
    page.select_option("select", "memory")
    page.hover("canvas.heat")
    assert "GiB" in page.inner_text(".tip") and "completed" in page.inner_text("header")


def test_an_injected_script_is_blocked(browser, url, pages):
    context = browser.new_context()
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(url)
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.injected = 1'}))"
    )
    assert page.evaluate("[number(2e-6, 's'), number(-3e-7)]") == ["2.00e-6 s", "-3.00e-7"]
    assert page.evaluate("window.injected") is None and "Content Security Policy" in problems[0]
    context.close()


def test_metrics_of_the_program_have_charts(open_page, url, pages):  # last, as it adds files to the runs of the module
    for run in pages[1:]:
        with RecordLog(run.metrics / "own.jsonl") as log:
            for step in (10, 20):
                log.write(OwnRecord(step, step, "2026-11-28T00:00:00.000Z", 1, {"reward": step / 40, "lr": math.inf}))
    page = open_page(f"{url}?run={pages[1].run_id}")
    page.wait_for_selector("section:visible h2:has-text('reward')")
    assert "reward 0.5," in page.inner_text("header") and "lr inf," in page.inner_text("header")
    assert page.locator("section:visible h2").all_inner_texts()[-2:] == ["reward", "Events"]
    page = open_page(f"{url}?run={pages[1].run_id}&run={pages[2].run_id}")
    page.wait_for_selector("section:visible h2:has-text('reward')")
