"""A proof holds for the file that was proved, and `site list` says so."""

import json

import pytest

from toolkit.site.findings import Finding
from toolkit.site.load import load_site
from toolkit.site.proof import checked_in_words, make_proof, save_proof

GOOD, BAD = Finding("mpi", "passed", "right"), Finding("mpi", "failed", "wrong", "mend it")
TEXT = 'checked = "by hand"\n[partitions.a]\nmax_nodes = 2\n[partitions.b]\n'


@pytest.fixture
def load(sites, monkeypatch):
    environ = sites(s=TEXT)
    monkeypatch.setenv("TOOLKIT_SITES", environ["TOOLKIT_SITES"])

    def read(text=None, name="s"):
        if text is not None:
            sites(s=text)
        return load_site(name, environ)

    return read


def prove(site, **partitions):
    return save_proof(make_proof(site, slurm="24.05.4", cluster="ours", partitions=partitions))


def test_a_proof_stands_beside_the_file_and_in_the_list(toolkit, load):
    site = load()
    assert checked_in_words(site) == "by hand"
    path = prove(site, a=[GOOD], b=[GOOD])
    assert path == site.file.with_suffix(".proof.json")
    date = json.loads(path.read_text())["date"]
    assert checked_in_words(load()) == f"checked {date}, Slurm 24.05.4"
    rows = {row["name"]: row["checked"] for row in json.loads(toolkit.ok("site", "list", "--json"))}
    assert rows["s"] == f"checked {date}, Slurm 24.05.4" and rows["lumi"].startswith("rendered only")


def test_an_edited_file_is_no_longer_proved(load):
    prove(load(), a=[GOOD], b=[GOOD])
    assert checked_in_words(load(TEXT.replace("max_nodes = 2", "max_nodes = 3"))).startswith("changed since ")
    # Words beside the values prove nothing, and take nothing away.
    assert checked_in_words(load('contact = "us"\n# a comment\n' + TEXT)).startswith("checked ")


def test_what_the_file_extends_belongs_to_it(load, sites):
    environ = sites(base="[launcher]\nkind = 'srun'\n", top="extends = 'base'\n[partitions.a]\n")
    prove(load_site("top", environ), a=[GOOD])
    sites(base="[launcher]\nkind = 'mpirun'\n")
    assert checked_in_words(load_site("top", environ)).startswith("changed since ")


def test_a_part_of_the_partitions_and_a_failure_are_said(load):
    prove(load(), a=[GOOD])
    assert checked_in_words(load()).endswith("(1 of 2 partitions)")
    prove(load(), b=[BAD])
    assert checked_in_words(load()).endswith("Slurm 24.05.4: b")
    assert checked_in_words(load()).startswith("failed ")
    prove(load(), b=[GOOD])
    assert "partitions" not in checked_in_words(load())


def test_a_probe_that_did_not_run_takes_no_proof_away(load):
    late = Finding("ranks", "unknown", "still in the queue")
    assert prove(load(), a=[late]) is None
    prove(load(), a=[GOOD], b=[GOOD])
    prove(load(), a=[late], b=[GOOD])
    assert checked_in_words(load()).startswith("checked ")


def test_the_proof_of_a_shipped_site_is_the_users_own(load, tmp_path):
    site = load(name="lumi")
    path = prove(site, dev=[GOOD])
    assert path == tmp_path / "home/.config/toolkit/proofs/lumi.json"
    assert checked_in_words(site).startswith("checked ")
    assert not site.file.with_suffix(".proof.json").exists()


def test_a_damaged_proof_proves_nothing(load):
    prove(load(), a=[GOOD]).write_text("{")
    assert checked_in_words(load()) == "by hand"
