"""Variables in a site's paths."""

import pytest

from toolkit.config.request import resolve_job
from toolkit.errors import ToolkitError
from toolkit.site.load import load_site


@pytest.fixture
def resolve_paths(tmp_path):
    def resolve(lines, environ):
        (tmp_path / "s.toml").write_text(f'name = "s"\nextends = "local"\n[paths]\n{lines}\n')
        (tmp_path / "job.toml").write_text('[job]\nentry = ["true"]\n')
        site = load_site(str(tmp_path / "s.toml"), {})
        return resolve_job(tmp_path / "job.toml", site=site, environ=environ).paths

    return resolve


def test_variables_are_those_of_the_submission_but_for_the_nodes_own_folder(resolve_paths, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = resolve_paths(
        'runs = "/scratch/$USER/${WORK}s"\nscratch = "~/fast"\nlocal_scratch = "$TMPDIR"', {"USER": "me", "WORK": "run"}
    )
    assert (paths.runs, paths.scratch) == ("/scratch/me/runs", "/home/me/fast")
    assert paths.local_scratch == "$TMPDIR"


def test_a_variable_that_is_not_set_is_refused(resolve_paths, tmp_path, toolkit, monkeypatch):
    with pytest.raises(ToolkitError) as caught:
        resolve_paths('runs = "/scratch/$PROJECT/runs"', {})
    said = f"{tmp_path}/s.toml:4:paths.runs: $PROJECT is not set. Fix: export PROJECT, or write the path without it"
    assert str(caught.value) == said
    # Also where runs are only looked for: ./runs would be another folder.
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "s.toml"))
    monkeypatch.delenv("TOOLKIT_RUNS")
    answer = toolkit("status")
    assert (answer.code, answer.err) == (2, f"toolkit: {said}\n")
