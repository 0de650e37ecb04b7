"""`toolkit parse` answers the keys that its page lists, and says what it could not read."""

import json
from pathlib import Path

import pytest

from toolkit.cli.parse import KINDS, REMOVED, reader_of

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


def test_text_and_wrong_use(toolkit, tmp_path):
    numa = tmp_path / "numa"
    numa.write_text("available: 1 nodes (0)\nnode 0 cpus: 0 1\nnode 0 size: 5 MB\nnode 0 free: 1 MB\n"
                    "No distance information available.\n")  # fmt: skip
    assert 'node_ids: "0"' in toolkit.ok("parse", "numactl-H", numa)

    unknown = toolkit("parse", "numactl", numa)
    assert (unknown.code, "did you mean numactl-H" in unknown.err) == (2, True)
    missing = toolkit("parse", "numactl-H", tmp_path / "none")
    assert (missing.code, "No such file" in missing.err) == (2, True)
    numa.write_bytes(b"\xef\xbb\xbf" + numa.read_bytes().replace(b"\n", b"\r\n"))  # as an editor of Windows saves it
    assert 'node_ids: "0"' in toolkit.ok("parse", "numactl-H", numa)
    numa.write_text('{"jobs": []}')
    assert "expected text output of `lscpu`, got JSON" in toolkit("parse", "lscpu", numa).err
    for kind in KINDS:
        numa.write_text("\n\nHello, there is nothing here!\x1b[2J\n" if kind != "hostlist" else " \n")
        other = toolkit("parse", kind, numa)
        assert (other.code, f"{numa}:" in other.err, "\x1b" in other.err) == (1, True, False), other


@pytest.mark.parametrize(
    ("kind", "fix"),
    [("squeue", "`squeue --json`"), ("lstopo", "`lstopo --of xml`"), ("nvidia-smi-q", "`nvidia-smi -q -x`")],
)
def test_a_removed_kind_names_what_prints_the_same(toolkit, kind, fix):
    refused = toolkit("parse", kind, "-")
    assert refused.code == 2 and f"kind '{kind}' was removed. Fix: use {fix}" in refused.err


def test_every_removed_kind_is_on_the_page_with_its_fix():
    text = (ROOT / "docs" / "parse.md").read_text()
    assert not KINDS.keys() & REMOVED.keys()
    for kind, fix in REMOVED.items():
        assert f"| `{kind}` | {fix} |\n" in text


def test_an_invalid_host_list_is_refused_with_the_fix_and_each_escape_once(toolkit, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n[1-3],n2\n")
    assert json.loads(toolkit.ok("parse", "hostlist", hosts, "--json")) == {
        "valid": True, "count": 3, "expansion": ["n1", "n2", "n3"], "first": "n1", "last": "n3"
    }  # fmt: skip
    for nothing in ("(null)", "None assigned"):
        hosts.write_text(nothing)
        said = toolkit("parse", "hostlist", hosts, "--json")
        assert (
            json.loads(said.out)["valid"],
            said.code,
            "expected at least one host, got none. Fix: use Slurm's form" in said.err,
        ) == (False, 1, True)
    hosts.write_text("n[1-\x1b2]\n")
    said = toolkit("parse", "hostlist", hosts, "--json")
    assert (said.code, json.loads(said.out)["valid"], json.loads(said.out)["expansion"]) == (1, False, None)
    assert said.err == (
        f"toolkit: {hosts}:1: the host list 'n[1-\\x1b2]' contains '1-\\x1b2' instead of a number or a range. "
        "Fix: use Slurm's form, such as node[1-4,8]\n"
    )


def test_damage_is_named_and_not_read(toolkit, tmp_path):
    numa = tmp_path / "numa"
    numa.write_text("available: 1 nodes (0)\nnode 0 cpus: 0 1 x\nnode 0 size: 5 MB\nnode 0 fr")
    said = toolkit("parse", "numactl-H", numa, "--json")
    assert json.loads(said.out)["nodes"] == {"0": {"cpus": None, "size_mb": 5}}
    assert f"{numa}: line 2: expected ascending CPUs of node 0" in said.err and "(and 3 more)" in said.err
