"""`toolkit logs`: of which ranks, in which order, and how the last lines of long logs are found."""

import json
import os
import resource
import time
from pathlib import Path

import pytest
from queued_runs import SAMPLES

from toolkit.rundir.claims import claim_attempt
from toolkit.rundir.files import write_json
from toolkit.rundir.layout import RunDirectory, make_task
from toolkit.runs.logs.log_choice import LogPart
from toolkit.runs.logs.logs import LogReader

BEGUN, ENDED = (json.loads((SAMPLES / f"attempt_{name}.json").read_text()) for name in ("start", "exit"))


def attempt_of(run, *, ranks, nodes=1, **end):
    """An attempt as its supervisor and its ranks leave it behind, `ranks / nodes` ranks on each of n0, n1 and so on."""
    attempt = claim_attempt(run)
    write_json(attempt.start_file, {**BEGUN, "ranks": ranks, "nodes": nodes})
    for rank in range(ranks):
        write_json(attempt.rank_file(rank), {"rank": rank, "host": f"n{rank * nodes // ranks}", "pid": 1})
    if end:
        write_json(attempt.exit_file, {**ENDED, "rank": None, "host": None, **end})
    return attempt


def fail(attempt, rank):
    write_json(attempt.error_file(rank), {**json.loads((SAMPLES / "rank_error.json").read_text()), "rank": rank})


@pytest.fixture
def run(toolkit):
    toolkit.ok("render", toolkit.job("true"))
    (path,) = toolkit.runs.glob("*/*")
    return RunDirectory(path)


@pytest.fixture
def four_ranks(run):
    attempt = attempt_of(run, ranks=4, nodes=2)
    for rank in range(4):
        attempt.log_file(rank).write_text(f"first of {rank}\nlast of {rank}\n")
    return attempt


def test_ranks_are_chosen_by_number_node_and_failure(toolkit, run, four_ranks) -> None:
    def logs(*words):
        return toolkit.ok("logs", run.run_id, "-n", 1, *words).splitlines()

    assert logs("--rank", 3) == ["last of 3"]
    assert logs("--rank", "all") == [f"[{rank}] last of {rank}" for rank in range(4)]
    assert logs("--node", "n1") == ["[2] last of 2", "[3] last of 3"]
    assert len(logs("--node", "n[0-1]")) == 4
    for words, fix in (
        (("--node", "n7"), "--node n0,n1"),
        (("--failed",), "toolkit explain"),
        (("--rank", 4), "0 to 3"),
    ):
        said = toolkit("logs", run.run_id, *words)
        assert (said.code, fix in said.err) == (4, True), said
    fail(four_ranks, 1)
    fail(four_ranks, 2)
    write_json(four_ranks.exit_file, {**ENDED, "rank": 2})
    assert logs("--failed") == ["[2] last of 2", "[1] last of 1"]  # first the one that is to blame


def test_failed_ranks_are_those_of_the_last_attempt_in_which_one_failed(toolkit, run) -> None:
    for number in range(3):
        attempt = attempt_of(run, ranks=2, **({"cause": "crashed"} if number < 2 else {}))
        attempt.log_file(0).write_text(f"attempt {number}\n")
        if number < 2:
            fail(attempt, 0)
    assert toolkit.ok("logs", run.run_id, "--failed") == "[0] attempt 1\n"
    assert toolkit.ok("logs", run.run_id, "--failed", "--attempt", 0) == "[0] attempt 0\n"
    assert toolkit.ok("logs", run.run_id, "--rank", 0) == "attempt 2\n"


def test_one_of_many_ranks_is_found_in_its_nodes_log(toolkit, run) -> None:
    attempt = attempt_of(run, ranks=128, nodes=2)
    for node in (0, 1):
        lines = [f"[{node * 64 + rank}] line {turn}\n" for turn in range(3) for rank in range(64)]
        attempt.node_log(f"n{node}").write_text("".join(lines))
    assert toolkit.ok("logs", run.run_id, "--rank", 70) == "line 0\nline 1\nline 2\n"
    assert toolkit.ok("logs", run.run_id, "--rank", 70, "-n", 2) == "line 1\nline 2\n"
    attempt.rank_file(70).unlink()  # nobody knows where it was
    assert toolkit.ok("logs", run.run_id, "--rank", 70, "-n", 1) == "line 2\n"
    assert toolkit.ok("logs", run.run_id, "--node", "n1", "-n", 1) == "[127] line 2\n"
    fail(attempt, 3)
    fail(attempt, 65)
    assert toolkit.ok("logs", run.run_id, "--failed", "-n", 1) == "[3] line 2\n[65] line 2\n"


def test_tasks_of_an_array_are_labelled_and_the_failed_ones_found(toolkit) -> None:
    toolkit.ok("render", toolkit.job("true"), "--site", "devcluster", "-a", "0-2")
    (path,) = toolkit.runs.glob("*/*")
    run = RunDirectory(path)
    write_json(path / "submitted-000.json", {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    for number, state in enumerate(("completed", "failed", "failed")):
        (path / f"slurm-7_{number}.out").write_text(f"job of {number}\n")
        attempt = attempt_of(make_task(run, number), ranks=2, state=state, final=True)
        attempt.log_file(1).write_text(f"rank 1 of task {number}\n")
    fail(run.task(1).attempt(0), 1)
    assert toolkit.ok("logs", run.run_id).splitlines() == [f"[task {number}] job of {number}" for number in range(3)]
    assert toolkit.ok("logs", run.run_id, "--task", 2) == "job of 2\n"
    # Of the third no rank left an error: the supervisor's words are all that there is.
    assert toolkit.ok("logs", run.run_id, "--failed").splitlines() == [
        "[task 1] [1] rank 1 of task 1", "[task 2] job of 2",
    ]  # fmt: skip
    said = toolkit("logs", run.run_id, "--rank", 0)
    assert (said.code, "--task T" in said.err) == (4, True)


def test_lines_in_the_order_of_their_times(toolkit, run, four_ranks) -> None:
    said = toolkit("logs", run.run_id, "--rank", "all", "--by-time")
    assert (said.code, "no line begins with a time" in said.err) == (1, True)
    four_ranks.log_file(0).write_text("2026-11-22 10:00:01,500 b\n  more of b\n2026-11-22 10:00:03,000 d\n")
    four_ranks.log_file(1).write_text("INFO [2026-11-22T10:00:01.400] a\n2026-11-22T10:00:02 c\n")
    lines = [line[-1] for line in toolkit.ok("logs", "--attempt", 0, "--by-time", run.run_id).splitlines()]
    assert "".join(lines[-5:]) == "abbcd"
    assert toolkit.ok("logs", "--attempt", 0, "--by-time", "-n", 1, run.run_id) == "[0] 2026-11-22 10:00:03,000 d\n"
    for words in (("--by-time", "-f"), ("--failed", "-f"), ("--rank", 0, "--failed")):
        assert toolkit("logs", run.run_id, *words).code == 2


def test_10_gb_answer_at_once_and_are_followed_from_their_end(toolkit, run, four_ranks) -> None:
    with four_ranks.log_file(0).open("wb") as stream:
        stream.truncate(10 << 30)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\nlast but one\nlast without an end")
    before, began = int(Path("/proc/self/io").read_text().split()[1]), time.monotonic()
    assert toolkit.ok("logs", run.run_id, "--rank", 0, "-n", 2) == "last but one\nlast without an end\n"
    assert toolkit.ok("logs", run.run_id, "--rank", "all", "-n", 1).startswith("[0] last without an end\n")
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 4 << 20
    assert time.monotonic() - began < 60
    said = toolkit("logs", run.run_id, "--rank", 0, "-n", 9)
    assert (said.code, "found only 3 of 9 lines" in said.err) == (0, True), said.err

    part, reader = LogPart(four_ranks.log_file(0)), LogReader()
    assert list(reader.read_last(part, 1, to_the_end=False, say=print)) == ["last but one\n"]
    with part.path.open("ab") as stream:
        stream.write(b", and now with one\n")
    assert list(reader.read([part])) == ["last without an end, and now with one\n"]


def test_ranks_that_wrote_nothing_are_not_passed_over_in_silence(toolkit, run) -> None:
    attempt_of(run, ranks=1).log_file(0).touch()
    said = toolkit("logs", run.run_id, "--rank", 0)
    assert (said.code, said.out, "the log is empty" in said.err) == (0, "", True)


def test_a_line_of_many_megabytes_is_passed_on_in_pieces(tmp_path) -> None:
    path = tmp_path / "rank-0.log"
    with path.open("wb") as stream:
        stream.write(b"first\n")
        stream.truncate(64 << 20)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\n\xff last")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = LogReader().read([LogPart(path, "[0] ")], to_the_end=True)
    assert next(pieces) == "[0] first\n"
    sizes = [(len(piece), piece.startswith("[0] "), piece.endswith("\n")) for piece in pieces]
    assert sum(size for size, _, _ in sizes) == (64 << 20) - len("first\n") + len("\n") + len("? last\n") + 2 * len(
        "[0] "
    )
    assert [begins for _, begins, _ in sizes] == [True] + [False] * (len(sizes) - 2) + [True]
    assert [ends for _, _, ends in sizes] == [False] * (len(sizes) - 2) + [True, True]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_bytes_that_are_no_text_go_through_a_pipe_as_they_are(tmp_path, capfdbinary) -> None:
    from toolkit.cli.options import echo_log

    path = tmp_path / "rank-0.log"
    path.write_bytes(b"\xff\xfe \x1b[31mred\n")
    for text in LogReader().read([LogPart(path)]):
        echo_log(text)
    assert capfdbinary.readouterr().out == b"\xff\xfe \x1b[31mred\n"
