"""`toolkit parse` answers the keys that its page lists, and says what it could not read."""

import json
from pathlib import Path

import pytest

from toolkit.cli.parse import KINDS, reader_of

ROOT = Path(__file__).parents[2]


def page() -> str:
    """The part of docs/parse.md that lists kinds and keys."""
    tables = []
    for kind in KINDS:
        _, keys = reader_of(kind)
        rows = "".join(f"| `{key}` | {meaning} |\n" for key, meaning in keys.items())
        tables.append(f"## {kind}\n\n`{KINDS[kind].command}`\n\n| key | means |\n|---|---|\n{rows}")
    return "\n".join(tables)


def test_the_page_lists_every_kind_with_its_keys():
    text = (ROOT / "docs" / "parse.md").read_text()
    begin, end = "<!-- kinds: begin -->\n", "<!-- kinds: end -->"
    listed = text[text.index(begin) + len(begin) : text.index(end)]
    assert listed.strip() == page().strip()


def test_stdin_text_and_wrong_use(toolkit, monkeypatch, tmp_path):
    queue = tmp_path / "queue"
    queue.write_text("JOBID|STATE\n7|RUNNING\n")
    assert "RUNNING" in toolkit.ok("parse", "squeue", queue)

    unknown = toolkit("parse", "squeu", queue)
    assert (unknown.code, "did you mean squeue" in unknown.err) == (2, True)
    missing = toolkit("parse", "squeue", tmp_path / "none")
    assert (missing.code, "No such file" in missing.err) == (2, True)
    queue.write_bytes(b"\xef\xbb\xbfJOBID ST\r\n7 CG\r\n")  # as an editor of Windows saves it
    assert "CG" in toolkit.ok("parse", "squeue", queue)
    for nothing in ("(null)", "None assigned"):
        queue.write_text(nothing)
        said = toolkit("parse", "hostlist", queue, "--json")
        assert (json.loads(said.out)["valid"], said.code, "names no host. Fix: write" in said.err) == (False, 1, True)
    queue.write_text('{"jobs": []}')
    assert "is JSON" in toolkit("parse", "squeue", queue).err
    for kind in KINDS:
        queue.write_text("\n\nHello, there is nothing here!\x1b[2J\n" if kind != "hostlist" else " \n")
        other = toolkit("parse", kind, queue)
        assert (other.code, f"{queue}:" in other.err, "\x1b" in other.err) == (1, True, False), other


def test_a_list_that_is_none_is_refused_with_the_fix_and_each_escape_once(toolkit, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n[1-\x1b2]\n")
    said = toolkit("parse", "hostlist", hosts, "--json")
    assert (said.code, json.loads(said.out)["valid"], json.loads(said.out)["expected"]) == (1, False, "reject")
    assert said.err == (
        f"toolkit: {hosts}:1: the host list 'n[1-\\x1b2]' has '1-\\x1b2' where a number or a range belongs. "
        "Fix: write it as Slurm does, such as node[1-4,8]\n"
    )
    hosts.write_text("JOBID STATE\nx\x1by RUNNING\n")
    assert "line 2: 'x\\x1by' is no job id" in toolkit("parse", "squeue", hosts).err


def test_damage_is_named_and_not_read(toolkit, tmp_path):
    queue = tmp_path / "queue"
    queue.write_text("JOBID|STATE|NODES\n7|RUNNING|1\n8|COMPLE\nx|FAILED|1\n")
    said = toolkit("parse", "squeue", queue, "--json")
    jobs = json.loads(said.out)["jobs"]
    assert [job["st"] for job in jobs] == ["RUNNING", None, None]
    assert "line 3: 2 fields under 3 columns" in said.err
    assert "line 4: 'x' is no job id" in said.err


@pytest.mark.parametrize(
    ("kind", "text", "key", "said"),
    [
        ("scontrol-show-job", "JobId=7 JobName=x\n   JobState=RUNNI", "JobState", "line 2: JobState=RUNNI is cut"),
        ("scontrol-show-node", "NodeName=n1 CPUTot=2\n   RealMemory=5 State=IDLE+DRAI", "State", "State=IDLE+DRAI is cut"),
        ("scontrol-show-partition", "PartitionName=p\n   State=INAC", "State", "line 2: State=INAC is cut"),
    ],
)  # fmt: skip
def test_a_state_that_is_cut_is_not_believed(kind, text, key, said):
    facts, warnings = reader_of(kind)[0](text)
    (record,) = next(value for value in facts.values() if isinstance(value, list))
    assert record[key] is None
    assert any(said in warning for warning in warnings)


@pytest.mark.parametrize(("state", "read"), [("IDLE+DRAIN", True), ("MIXED*", True), ("idl", False)])
def test_a_state_at_the_end_of_a_text_without_a_line_end_counts_where_it_is_whole(state, read):
    facts, _ = reader_of("scontrol-show-node")[0](f"NodeName=n1 CPUTot=2\n   RealMemory=5 State={state}")
    assert facts["nodes"][0]["State"] == (state if read else None)


def test_a_record_that_ends_early_is_named():
    node = "NodeName=n{} Arch=x86_64 CPUTot=2\n   OS=Linux 6\n   RealMemory=500 Sockets=1\n   State=IDLE\n\n"
    read = reader_of("scontrol-show-node")[0]
    assert read(node.format(1) + node.format(2))[1] == ()
    cut = "".join((node.format(1) + node.format(2)).splitlines(keepends=True)[:7])
    assert read(cut)[1] == ("line 6: the record ends early, without RealMemory, State, Sockets",)
    # What `grep -e NodeName -e State` leaves lacks nothing that its other records have.
    assert read("NodeName=n1 CPUTot=2\n   State=IDLE\nNodeName=n2 CPUTot=2\n   State=DOWN\n")[1] == ()
