"""A stall: every rank says where it stands, and the record names the one that is not where the others are."""

import json
import os
import signal
from pathlib import Path

import jsonschema

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import read_json, read_lines
from toolkit.supervise.stacks import NO_STACKS, collect_stacks, culprit_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "run-directory.schema.json").read_text())
# Scripts: their time begins with the first step, however long a start takes.
WAITS_FOR_RANK_1 = """
import time
import torch, torch.distributed as dist
from toolkit.world.discover import discover
def main(world):
    dist.init_process_group("gloo")
    world.stop_watch.look(1, rank=world.rank)
    if world.rank == 1:
        forget_the_others()
    dist.all_reduce(torch.ones(1))

def forget_the_others():
    while True:
        time.sleep(0.2)

main(discover())
"""
STEPS_ONCE = """
import time
from toolkit.world.discover import discover
world = discover()
world.stop_watch.look(1, rank=world.rank)
print('steps', flush=True)
time.sleep(600)
"""


def test_the_record_of_a_stall_names_the_rank_that_is_elsewhere(supervise, local_job):
    files = {"late.py": WAITS_FOR_RANK_1}
    job = supervise(local_job("late.py", files=files, restart="stall_s = 2\ncrashes = 0"))
    assert job.wait() == 125
    end = job.end()
    assert (end["cause"], end["state"], end["step"]) == ("stalled", "failed", 1)
    waiting, late = end["last_lines"]
    assert late.startswith("rank 1: forget_the_others (late.py:")
    assert (
        end["reason"].startswith("no step for 2 s: rank 1 on node ") and "forget_the_others (late.py:" in end["reason"]
    )
    assert end["rank"] == 1 and end["host"]
    assert waiting.startswith("rank 0: ") and "all_reduce" in waiting and "from main (late.py:" in waiting
    stack = job.run.attempt(0).stack_file(1).read_text()
    assert "most recent call first" in stack and "forget_the_others" in stack
    events = list(read_lines(job.run.attempt(0).events))
    assert [event["event"] for event in events] == ["started", "stalled", "ended"]
    for event in events:
        jsonschema.validate(event, {**SCHEMA, "$ref": "#/$defs/event"})


def test_a_rank_that_is_stopped_cannot_answer_and_that_is_said(supervise, local_job):
    files = {"late.py": STEPS_ONCE}
    job = supervise(local_job("late.py", files=files, restart="stall_s = 2\ncrashes = 1"))
    job.until_log_says("steps", rank=1)
    guard = read_json(job.run.attempt(0).rank_file(1))["pid"]
    child = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0]
    os.kill(int(child), signal.SIGSTOP)
    assert job.wait() == 125
    assert any("rank 1: no response" in line and "(stopped)" in line for line in job.end(0)["last_lines"])
    # The second attempt stalls where the first one did, though its ranks all answer.
    assert job.end(1)["decision"] == "the same failure occurred twice without a new step"


def test_a_damaged_rank_file_keeps_nobody_from_telling_where_the_others_are(run_directory, monkeypatch):
    monkeypatch.setattr("toolkit.supervise.stacks.PATIENCE_S", 0.1)
    attempt = claim_attempt(run_directory)
    attempt.rank_file(1).write_bytes(b"")
    attempt.stack_file(1).write_text("of an earlier request\n")
    stack = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in main\n'

    class HalfDeaf:
        def ask_for_stacks(self):
            attempt.stack_file(0).write_text(stack)
            return False

    assert collect_stacks(attempt, range(2), HalfDeaf()) == [
        "rank 0: main (a.py:3)",
        "rank 1: reported no stack in time",
    ]


def stack(*frames: str) -> str:
    """The stack of a main thread, innermost frame first, as "function file:line"."""
    lines = (
        f'  File "{one.split()[1].partition(":")[0]}", line {one.rpartition(":")[2]} in {one.split()[0]}'
        for one in frames
    )
    return "Thread 0x1 (most recent call first):\n" + "\n".join(lines) + "\n"


TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"


def culprit(attempt, *stacks: str | None):
    for rank, text in enumerate(stacks):
        attempt.rank_file(rank).write_text(json.dumps({"rank": rank, "host": f"n{rank // 2}", "pid": 1, "time": "x"}))
        if text is not None:
            attempt.stack_file(rank).write_text(text)
    return culprit_of(attempt, range(len(stacks)))


def test_the_rank_outside_of_the_collective_is_named_with_operation_and_line(run_directory, tmp_path):
    source = tmp_path / "train.py"
    source.write_text("import x\nx.work.wait()\nx.load()\n")
    attempt = claim_attempt(run_directory)
    waits, calls = stack(f"all_reduce {TORCH}:2806", f"step {source}:1"), stack(f"step {source}:2")
    found = culprit(attempt, waits, calls, stack("read /usr/lib/python3/ssl.py:9", f"load {source}:3"), waits)
    assert (found.ranks, found.host) == ((2,), "n1")
    assert found.sentence.startswith("rank 2 on node n1: read (ssl.py:9), from load (train.py:3): x.load()")
    assert "ranks 0, 3: all_reduce (distributed_c10d.py:2806), from step (train.py:1)" in found.sentence


def test_what_measures_the_waits_of_a_script_is_not_shown(run_directory):
    """Its functions replace those of torch in some steps, so that they are the innermost ones."""
    attempt = claim_attempt(run_directory)
    waits = stack("noted /x/toolkit/world/waits.py:61", f"broadcast {TORCH}:2935", "<module> /home/train.py:14")
    assert "ranks 0, 1: broadcast (distributed_c10d.py:2935)" in culprit(attempt, waits, waits, "nothing").sentence


def test_a_stopped_rank_is_named_and_never_its_guard(run_directory):
    attempt = claim_attempt(run_directory)
    found = culprit(attempt, stack(f"all_reduce {TORCH}:1"), "no response: process 7 is in state T (stopped)\n", None)
    assert (found.ranks, found.cause) == ((1,), "process_state") and "T (stopped)" in found.sentence
    attempt.stack_file(1).unlink()
    found = culprit(attempt, stack(f"all_reduce {TORCH}:1"), stack(f"all_reduce {TORCH}:1"), None)
    assert found.ranks == (2,) and "reported no stack in time" in found.sentence and "guard" not in found.sentence


def test_stacks_that_are_not_visible_yet_blame_no_rank(run_directory):
    attempt = claim_attempt(run_directory)
    waits = stack(f"all_reduce {TORCH}:1")
    program = "no response: process 7 is in state S (sleeping) and is not a Python script of the job\n"
    assert culprit(attempt, *[waits] * 4, None, None, program, program).ranks == ()
    found = culprit(attempt, *[waits] * 4, None, None, program, stack("load /x/t.py:3"))
    assert found.ranks == (7,) and "load (t.py:3)" in found.sentence


def test_a_rank_that_has_finished_is_named_as_such(run_directory):
    attempt = claim_attempt(run_directory)
    waits = stack(f"all_reduce {TORCH}:1", "main /x/ddp.py:30")
    found = culprit(
        attempt, waits, stack("_leave_well /v/toolkit/rank/entry.py:137", "main /v/toolkit/rank/entry.py:9"), waits
    )
    where = "all_reduce (distributed_c10d.py:1), from main (ddp.py:30)"
    assert found.sentence == f"rank 1 on node n0 has already finished (exit 0); ranks 0, 2 wait for it: {where}"
    attempt.stack_file(1).unlink()
    attempt.done_marker(1).write_text("done\n")
    assert culprit(attempt, waits, None, waits).sentence == found.sentence


def test_programs_without_stacks_and_ranks_that_are_all_alike_name_no_rank(run_directory):
    attempt = claim_attempt(run_directory)
    program = "no response: process 7 is in state S (sleeping) and is not a Python script of the job\n"
    assert culprit(attempt, program, program).sentence == NO_STACKS
    found = culprit(attempt, stack("a /x/t.py:1"), stack("b /x/t.py:2"))
    assert found.ranks == () and found.sentence == "rank 0: a (t.py:1); rank 1: b (t.py:2)"
    found = culprit(attempt, *[stack("a /x/t.py:1")] * 3, stack("b /x/t.py:2"))
    assert (found.ranks, found.host) == ((3,), "n1")
