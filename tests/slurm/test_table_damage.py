"""Damage of a table whose rows can all be read is named, and what Slurm prints by itself is not."""

import pytest

from toolkit.slurm.parse_sacct import parse_sacct
from toolkit.slurm.parse_sinfo import parse_sinfo
from toolkit.slurm.parse_squeue import parse_squeue

HEADER = "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
ROWS = """\
                 7       gpu    train     alma  R       1:00      1 n1
                 8       gpu    train     alma  R       1:00      2 n[2-3]
                 9       gpu    train     alma PD       0:00      2 (Priority)
"""
QUEUE = HEADER + ROWS
SINFO = """\
PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST
main*        up   infinite      3   idle n[1-3]
gpu          up 1-00:00:00      2 alloc* g[1-2]
gpu          up 1-00:00:00      1  down* g3
"""
AGAIN = "                 7       gpu    train     alma  R       1:00      1 n1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (QUEUE[:-1], "line 4: has no line end, so that it may be cut"),
        (QUEUE + AGAIN, "line 5: the same row stands on line 2"),
        (QUEUE + HEADER, "line 5: the header stands there again"),
        (
            QUEUE.replace("train     alma PD", "train    ma PD"),
            "line 4: its cells do not stand below the header's words",
        ),
        (QUEUE.replace("n[2-3]", "n[2-4]"), "line 3: says 2 nodes and names 3: 'n[2-4]'"),
        (QUEUE.replace("n[2-3]", "n[2-"), "line 3: the host list 'n[2-' has"),
        (QUEUE.replace("1:00      2", " two      2"), "line 3: its columns cannot be told apart"),
    ],
)
def test_damage_of_a_queue_is_named(text, said):
    facts, warnings = parse_squeue(text)
    assert [warning for warning in warnings if said in warning], warnings
    assert facts["rows"] >= 3


def test_an_undamaged_queue_says_nothing():
    for text in (QUEUE, QUEUE.replace("\n", "\r\n"), f"CLUSTER: a\n{QUEUE}CLUSTER: b\n{QUEUE.replace('7', '6')}"):
        assert parse_squeue(text)[1] == ()
    # A job that ends gives its nodes back one by one, and without its id two jobs may look alike.
    assert parse_squeue(QUEUE.replace("alma  R       1:00      2", "alma CG       1:00      9"))[1] == ()
    assert parse_squeue("USER|STATE\nalma|RUNNING\nalma|RUNNING\n")[1] == ()
    # One row alone may lie beside its header: its names were replaced, or a paste lost blanks.
    assert parse_squeue(HEADER + ROWS.splitlines(keepends=True)[0].replace("alma ", "a_longer "))[1] == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  3   idle n[1-3]", "  3   idle n[1-4]", "line 2: says 3 nodes and names 4"),
        ("   up   infinite", "idle   infinite", "line 2: its columns cannot be told apart"),
        (
            "g[1-2]\n",
            "g[1-2]\ngpu          up 1-00:00:00      2 alloc* g[1-2]\n",
            "line 4: the same row stands on line 3",
        ),
        ("g3\n", "g3", "line 4: has no line end"),
    ],
)
def test_damage_of_partitions_is_named(old, new, said):
    assert parse_sinfo(SINFO)[1] == ()
    _, warnings = parse_sinfo(SINFO.replace(old, new))
    assert [warning for warning in warnings if said in warning], warnings


def test_a_record_of_sacct_that_is_printed_twice_is_named_but_not_where_names_were_taken_out():
    text = "JobID|State\n7|FAILED\n8|FAILED\n"
    assert parse_sacct(text)[1] == ()
    assert parse_sacct(text + "7|FAILED\n")[1] == ("line 4: the same row stands on line 2",)
    assert parse_sacct(text + "7|FAILED\n7|FAILED\n")[1] == ()
