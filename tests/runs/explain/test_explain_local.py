"""`explain` of runs on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from whole_checkpoints import make_whole_checkpoint

from toolkit.metrics.verdicts import Severity, VerdictKind, VerdictLog, raise_verdict
from toolkit.rundir.claims import read_claim
from toolkit.runs.follow.pages import Pages

PAGES = Path(__file__).parents[3] / "docs"


def explain(toolkit, run) -> dict:
    return json.loads(toolkit.ok("explain", run.run_id, "--json"))


def documented(page: str, title: str) -> set[str]:
    """The first column of the table below a heading."""
    section = (PAGES / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_the_json_is_what_the_page_says(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", run.run_id)
    assert set(explain(toolkit, run)) == documented("explain.md", "JSON")


def test_every_symptom_stands_on_the_page() -> None:
    from toolkit.runs.explain.model import _ENDS
    from toolkit.supervise.symptoms import SYMPTOMS

    words = documented("explain.md", "Symptoms")
    assert {symptom.word for symptom in SYMPTOMS} | set(_ENDS) <= words


def test_a_failed_program_is_quoted_without_its_colours(toolkit) -> None:
    job = toolkit.job("printf 'loading\\n\\033[31mno data\\033[0m\\n'; exit 3", more="[restart]\ncrashes = 0\n")
    run = toolkit.submit(job)
    assert toolkit("wait", run.run_id).code == 3
    told = explain(toolkit, run)
    assert (told["symptom"], told["rank"]) == ("exit_code", 0)
    quoted = {"source": "attempts/000/logs/rank-0.log", "line": "no data"}
    assert quoted in told["evidence"]
    assert told["follows"] == "nothing by itself (restart.crashes = 0 is spent)"
    text = toolkit.ok("explain", run.run_id)
    assert "\x1b" not in text
    assert "attempts/000/logs/rank-0.log: no data" in text and f"`toolkit resume {run.run_id}`" in text


def test_an_error_of_several_lines_makes_up_no_line_of_its_own(toolkit) -> None:
    (toolkit.folder / "work.py").write_text("raise ValueError('bad \\x1b[2J\\ndo        `rm -r ~`')\n")
    job = toolkit.folder / "work.toml"
    job.write_text("[job]\nentry = 'work.py'\n[restart]\ncrashes = 0\n")
    assert toolkit("run", job).code == 1
    said = toolkit.ok("explain", "last").splitlines()
    assert "\x1b" not in "".join(said) and [line for line in said if line.startswith("do ")] == [
        "do        fix the program"
    ]


def test_bad_steps_that_the_guard_let_pass_are_told(toolkit) -> None:
    run = toolkit.submit(toolkit.job("true", more='[train]\nguard = "skip"\n'))
    toolkit.ok("wait", run.run_id)
    for step, bad in ((5, 0), (10, 2)):
        make_whole_checkpoint(run.checkpoints, step, state={"extra": {"guard": {"losses": [], "bad_steps": bad}}})
        told = [quoted for quoted in explain(toolkit, run)["evidence"] if "guard" in quoted["line"]]
        assert bool(told) == bool(bad)
    assert told[0]["source"] == "checkpoints/step-00000010/manifest.json"
    assert told[0]["line"] == f"the guard found 2 bad steps; the log names each: `toolkit logs {run.run_id} --rank 0`"
    (run.checkpoints / "step-00000010" / "manifest.json").write_text("{}")
    assert explain(toolkit, run)["state"] == "completed"


def test_what_has_not_run_is_explained_too(toolkit, wait_until) -> None:
    toolkit.ok("render", toolkit.job("true", name="rendered"))
    (folder,) = toolkit.runs.glob("rendered/*")
    told = json.loads(toolkit.ok("explain", folder.name, "--json"))
    assert (told["symptom"], str(folder / "job.sbatch") in told["actions"][0]) == ("not_submitted", True)
    run = toolkit.submit(toolkit.job("sleep 60", name="lives"))
    wait_until(lambda: run.attempt_numbers() and run.attempt(0).rank_file(0).exists())
    told = explain(toolkit, run)
    assert (told["symptom"], "observe.step_line" in told["why"]) == ("running", True)
    os.kill(read_claim(run, 0).pid, signal.SIGKILL)
    wait_until(lambda: explain(toolkit, run)["state"] == "lost")
    assert explain(toolkit, run)["symptom"] == "supervisor_lost"
    toolkit.ok("explain", run.run_id)


def test_nothing_is_promised_of_a_program_that_saves_by_itself(toolkit) -> None:
    done = toolkit.submit(toolkit.job("true", name="done"))
    toolkit.ok("wait", done.run_id)
    assert explain(toolkit, done)["actions"] == []
    failed = toolkit.submit(toolkit.job("exit 3", name="failed", more="[restart]\ncrashes = 0\n"))
    toolkit("wait", failed.run_id)
    last = explain(toolkit, failed)["actions"][-1]
    assert (
        last
        == f"`toolkit resume {failed.run_id}` starts it again; the script must restore any state that it saved itself"
    )
    (done.checkpoints / "step-00000010").mkdir()
    assert "ckpt ls" in explain(toolkit, done)["actions"][0]


def test_what_waits_for_somebody_to_mend_it_is_not_just_started_again(toolkit) -> None:
    words = "check_MPIR_CVAR_PMI_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting."
    run = toolkit.submit(toolkit.job(f"echo '{words}'; exit 16", more="[restart]\ncrashes = 2\n"))
    toolkit("wait", run.run_id)
    told = explain(toolkit, run)
    assert told["symptom"] == "wrong_pmi" and told["evidence"][0]["line"] == words
    assert told["actions"][-1].startswith(f"once that is fixed, `toolkit resume {run.run_id}`")
    assert run.attempt_numbers() == [0]


def test_a_completed_run_has_its_critical_verdicts(toolkit):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        for severity, message in ((Severity.CRITICAL, "the loss is nan"), (Severity.WARNING, "rank 1 is slow")):
            kind = VerdictKind.LOSS_NOT_FINITE if severity is Severity.CRITICAL else VerdictKind.STRAGGLER
            log.write(raise_verdict(kind, severity, message, "look", time_s=1.8e9))
    text = toolkit.ok("explain", run.run_id)
    assert "past critical: the loss is nan: look" in text and "rank 1 is slow" not in text
    assert "past critical: the loss is nan: look\npast warning: rank 1 is slow: look" in toolkit.ok(
        "verdict", run.run_id
    )
    assert toolkit.ok("status", run.run_id).splitlines()[-1] == f"{run.run_id}  past critical: the loss is nan: look"
    toolkit.ok("report", run.run_id, "-o", toolkit.folder / "page.html")
    assert (toolkit.folder / "page.html").read_text().count('"is_past": true') == 2
    overview = Pages([run]).look("")[0]["overview"]
    assert [row["verdicts"] for row in overview] == [["past critical: the loss is nan: look"]]


def test_a_run_that_is_being_stopped_is_not_said_to_continue(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job(f"trap : TERM; touch {toolkit.folder}/ready; while true; do sleep 0.1; done"))
    wait_until(lambda: (toolkit.folder / "ready").exists())
    toolkit.ok("stop", run.run_id)
    wait_until(lambda: "stop_requested" in run.attempt(0).events.read_text())
    told = explain(toolkit, run)
    assert told["symptom"] == "stopping" and "asked to save and exit (stopped) at 20" in told["why"]
    assert "are killed" in told["follows"] and "continues" not in told["follows"]
    assert f"`toolkit stop {run.run_id}` again kills its ranks at once" in told["actions"]
    toolkit.ok("stop", run.run_id)
    toolkit("wait", run.run_id)
    assert explain(toolkit, run)["symptom"] == "stopped"


def test_a_running_run_whose_loss_is_not_finite_is_to_be_stopped(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: any(run.attempts.glob("*/ranks/rank-*.json")))
    run.attempt(0).heartbeat.write_text('{"step": 108}')
    verdict = raise_verdict(
        VerdictKind.LOSS_NOT_FINITE, Severity.CRITICAL, "the loss is NaN since step 100", "x", time_s=1.8e9, steps=(100, 108)
    )  # fmt: skip
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        log.write(verdict)
    told = explain(toolkit, run)
    toolkit.ok("cancel", run.run_id)
    assert told["why"].endswith(", but the loss is NaN since step 100") and "although" in told["follows"]
    assert told["actions"][0] == f"`toolkit stop {run.run_id}`, then resume from a checkpoint before step 100"
    assert not any("rehearse" in action for action in told["actions"])


def test_a_running_run_with_an_open_stall_is_not_making_steps(toolkit, wait_until) -> None:
    run = toolkit.submit(toolkit.job("sleep 60"))
    wait_until(lambda: any(run.attempts.glob("*/ranks/rank-*.json")))
    run.attempt(0).heartbeat.write_text('{"step": 8}')
    assert "is making steps" in toolkit.ok("explain", run.run_id)
    stall = raise_verdict(
        VerdictKind.STALL,
        Severity.WARNING,
        "no rank has finished a step for 40 s",
        "run `toolkit stacks`",
        time_s=1.8e9,
    )
    with VerdictLog(run.metrics / "verdicts.jsonl") as log:
        log.write(stall)
    text = toolkit.ok("explain", run.run_id)
    toolkit.ok("cancel", run.run_id)
    assert "is stalled: no rank has finished a step for 40 s" in text and "is making steps" not in text
    assert f"`toolkit stacks {run.run_id}` shows where each rank waits" in text
