"""`toolkit jobs list`: what each shipped job says of itself."""

import json

import pytest


def test_the_whole_first_sentence(toolkit, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.jobs.__path__", [str(tmp_path)])
    (tmp_path / "mine.toml").write_text("# Falls from 5.5 to\n# 2.7. And more.\n\n# not this\n[job]\n")
    assert toolkit.ok("jobs", "list") == f"{'mine':<16} Falls from 5.5 to 2.7\n"


def test_one_of_a_thing_is_no_plural(toolkit) -> None:
    job = toolkit.job("true", more="[parallel]\nshard = 2\n")
    said = toolkit("submit", job)
    assert "= 2 does not divide 1 rank (1 node x 1)" in said.err


def test_the_list_as_json(toolkit, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.jobs.__path__", [str(tmp_path)])
    (tmp_path / "mine.toml").write_text("# Does this. And that.\n[job]\n")
    assert json.loads(toolkit.ok("jobs", "list", "--json")) == [{"name": "mine", "says": "Does this"}]
