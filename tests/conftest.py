"""What several packages' tests start from: an empty run, and a job as the compute half reads it."""

import json
from pathlib import Path

import pytest

from toolkit.rundir.layout import RunDirectory, create_run


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "runs", "sample")


@pytest.fixture
def local_job(tmp_path: Path):
    """Resolve a job for the site `local`: the dict that the supervisor reads. `files` lie beside the job file."""
    from toolkit.config.layers import resolve_job
    from toolkit.site.load import load_site

    def resolve(entry, *, ranks=2, launcher="local", files=None, restart="crashes = 0"):
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text)
        path = tmp_path / "sample.toml"
        path.write_text(
            f"[job]\nentry = {json.dumps(entry)}\nranks_per_node = {ranks}\n[restart]\n{restart}\n"
        )
        job = json.loads(resolve_job(path, site=load_site("local"), environ={}).to_json())
        job["launcher"]["kind"] = launcher
        return job

    return resolve
