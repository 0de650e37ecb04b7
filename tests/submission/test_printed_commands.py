"""`--print-cmd`: each command of Slurm's that a command calls stands on stderr before it runs."""

import pytest
from queued_runs import claim, submitted

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("status last", 0),
        ("stop last", 0),
        ("save last", 0),
        ("requeue last", 0),
        ("cancel last", 0),
        ("diff last last", 0),
        ("resume last", 1),
    ],
)
def test_every_question_to_slurm_is_printed(toolkit, fake_slurm, words, code):
    run = submitted(toolkit, "7", "sample")
    claim(run)
    fake_slurm.queue(("7", "RUNNING", "None"))
    for command in ("scontrol", "scancel"):
        fake_slurm.respond(command)
    run.attempt(0).path.mkdir()
    run.attempt(0).heartbeat.write_text('{"step": 1}')
    said = toolkit(*words.split(), "--print-cmd")
    assert said.code == code, said
    printed = [line for line in said.err.splitlines() if line.startswith("+ ")]
    calls = fake_slurm.calls()
    assert calls and len(printed) == len(calls), (said.err, calls)


def test_what_follows_a_run_prints_its_questions(toolkit, squeue, clock):
    submitted(toolkit, "7", "sample")
    calls = squeue(("7", "CANCELLED", "None"))
    for words in ("wait last", "logs last -f"):
        before = len(calls())
        said = toolkit(*words.split(), "--print-cmd")
        asked = len(calls()) - before
        assert asked and said.err.count("+ squeue") == asked, said


def test_a_new_site_file_prints_its_questions(toolkit, fake_slurm):
    fake_slurm.respond("scontrol", code=1)
    said = toolkit("site", "init", "--print-cmd")
    assert "+ scontrol show config" in said.err, said
