"""Stacks of running ranks on request, and what their flight recorders disagree about."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import jsonschema
import pytest
from sampling import sampled

from toolkit.metrics.flight_record import disagreements
from toolkit.rundir.files import read_json, read_lines
from toolkit.supervise.stacks import differing_collectives, main_thread, ranks_by

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "run-directory.schema.json").read_text())
SCRIPT = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.ones(4)
dist.all_reduce(values)
rank = dist.get_rank()
print("ready", flush=True)

def computes():
    while True:
        time.sleep(0.1)

if rank == 1:
    {late}
dist.all_reduce(values)
computes()
"""
FUNCTION = """
import time

def computes():
    while True:
        time.sleep(0.1)

def main(world, config):
    print("ready", flush=True)
    computes()
"""


def ask(job, eventually, ranks: int = 2) -> dict[str, list[int]]:
    request = job.run.control / "stacks"
    request.write_text("")
    assert eventually(lambda: not request.exists(), 20)
    return ranks_by(main_thread, job.run.attempt(0), range(ranks))


@pytest.fixture
def eventually():
    def is_met(condition, patience_s: float) -> bool:
        deadline = time.monotonic() + 3 * patience_s
        while not (met := bool(condition())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return met

    return is_met


def start(supervise, local_job, entry: str, text: str):
    source = local_job(entry, files={entry.partition(":")[0]: text})
    source["env"]["vars"] = {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    job = supervise(source)
    for rank in (0, 1):
        job.until_log_says("ready", rank=rank)
    return job


@pytest.mark.parametrize(
    ("entry", "text"),
    sampled([("late.py", SCRIPT.format(late="computes()")), ("f.py:main", FUNCTION)], lambda case: ":" in case[0]),
)
def test_running_ranks_show_their_stacks_and_go_on(supervise, local_job, eventually, wait_until, entry, text):
    job = start(supervise, local_job, entry, text)
    for _ in range(2):  # the second answer has nothing of the first
        groups = ask(job, eventually)
        (mine,) = [stack for stack, ranks in groups.items() if 1 in ranks]
        assert mine.splitlines()[-1].endswith("in computes") and mine.count("in computes") == 1
        assert "toolkit/rank" not in mine
    assert job.process.poll() is None and sorted(rank for ranks in groups.values() for rank in ranks) == [0, 1]
    for event in read_lines(job.run.attempt(0).events):
        jsonschema.validate(event, {**SCHEMA, "$ref": "#/$defs/event"})


def test_the_rank_that_is_not_in_the_collective_is_named(supervise, local_job, eventually):
    job = start(supervise, local_job, "late.py", SCRIPT.format(late="computes()"))
    assert eventually(lambda: ask(job, eventually) and differing_collectives(job.run.attempt(0)), 20)
    (line,) = differing_collectives(job.run.attempt(0))
    assert line.startswith(
        "rank 1 did not enter collective 2 of process group 0, all_reduce of Float [4]; rank 0 entered"
    )


def test_ranks_in_different_collectives_are_named(supervise, local_job, eventually):
    job = start(supervise, local_job, "late.py", SCRIPT.format(late="dist.barrier()"))
    assert eventually(lambda: ask(job, eventually) and differing_collectives(job.run.attempt(0)), 20)
    (line,) = differing_collectives(job.run.attempt(0))
    assert line == "collective 2 of process group 0 differs: rank 0: all_reduce of Float [4]; rank 1: barrier"


def test_a_stopped_rank_and_a_program_say_why_they_do_not_respond(supervise, local_job, eventually):
    job = start(supervise, local_job, "late.py", SCRIPT.format(late="computes()"))
    guard = read_json(job.run.attempt(0).rank_file(1))["pid"]
    child = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
    os.kill(child, signal.SIGSTOP)
    (why,) = [text for text, ranks in ask(job, eventually).items() if ranks == [1]]
    assert why == f"no response: process {child} is in state T (stopped)"
    os.kill(child, signal.SIGCONT)


def test_an_executable_is_not_killed_by_the_request(supervise, local_job, eventually):
    job = supervise(local_job(["bash", "-c", "echo ready; while true; do sleep 0.1; done"]))
    for rank in (0, 1):
        job.until_log_says("ready", rank=rank)
    groups = ask(job, eventually)
    assert len(groups) == 2 and all("is not a Python script of the job" in text for text in groups)
    assert job.process.poll() is None


def entry(number: int, name: str = "all_reduce", size: int = 4, *, group: str = "0", retired: bool = True) -> dict:
    return {
        "process_group": [group, "default_pg" if group == "0" else "undefined"], "collective_seq_id": number, "is_p2p": False,
        "profiling_name": f"gloo:{name}", "input_sizes": [[size]], "input_dtypes": ["Float"], "retired": retired,
        "time_created_ns": number * 10**9,
    }  # fmt: skip


def records(*ranks: list[dict]) -> dict:
    return {rank: {"time_ns": 30 * 10**9, "entries": entries} for rank, entries in enumerate(ranks)}


def test_the_first_difference_of_each_group_counts() -> None:
    agreeing = [entry(1), entry(2, "broadcast")]
    assert list(disagreements(records(agreeing, agreeing, agreeing))) == []
    other = [entry(1), entry(2, "broadcast", 5), entry(3)]
    (found,) = disagreements(records(agreeing, other, agreeing))
    assert found.ranks == (1,) and found.line == (
        "collective 2 of process group 0 differs: ranks 0, 2: broadcast of Float [4]; rank 1: broadcast of Float [5]"
    )
    (found,) = disagreements(records(agreeing, other))
    assert found.ranks == (), "two ranks have no majority"
    uneven = [entry(1, "all_gather", 7)]  # ranks may gather different sizes
    assert list(disagreements(records([entry(1, "all_gather")], uneven))) == []


def test_a_rank_without_any_collective_and_rings_that_begin_later_are_compared() -> None:
    (found,) = disagreements(records([entry(1, retired=False)], []))
    assert found.ranks == (1,) and found.line.startswith("rank 1 did not enter collective 1")
    assert "rank 0 entered it 29 s ago" in found.line
    assert list(disagreements(records([entry(1)], []))) == [], "rank 0 has left it: rank 1 has just entered"
    late = [entry(7), entry(8, retired=False)]
    (found,) = disagreements(records(late, [entry(6), entry(7)]))
    assert found.line.startswith("rank 1 did not enter collective 8")
