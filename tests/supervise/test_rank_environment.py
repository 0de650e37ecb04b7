"""What a login shell exports and nobody named does not reach the ranks."""

from __future__ import annotations


def test_names_that_bash_cannot_remove_stay_outside(toolkit, monkeypatch) -> None:
    for name in ("foo-bar", "a.b", "0start", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "leaks")
    said = toolkit.ok("run", toolkit.job("env"))
    assert "PATH=" in said
    assert "leaks" not in said
