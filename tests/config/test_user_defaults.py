"""`~/.config/toolkit/config.toml`: a layer between the site and the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import ToolkitError


def resolved(folder: Path, defaults: str, job: str = "", **environ: str) -> ResolvedJob:
    path = folder / ".config/toolkit/config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(defaults)
    (folder / "work.toml").write_text(f"[job]\nentry = ['true']\n{job}")
    return resolve_job(folder / "work.toml", site=None, environ={"HOME": str(folder), **environ})


def test_the_job_file_and_variables_override_the_defaults(tmp_path: Path) -> None:
    defaults = '[job]\naccount = "mine"\npartition = "gpu"\nqos = "high"\n[notify]\nmail = ["me@example.org"]\n'
    job = resolved(tmp_path, defaults, 'partition = "cpu"\n', SBATCH_QOS="low")
    assert (job.job.account, job.job.partition, job.job.qos, job.notify.mail) == (
        "mine",
        "cpu",
        "low",
        ["me@example.org"],
    )
    origin = job.origin("job.account")
    assert (origin.layer, origin.detail) == ("user", f"{tmp_path}/.config/toolkit/config.toml:2")
    assert job.origin("job.partition").layer == "job" and job.origin("job.qos").layer == "SBATCH_*"


@pytest.mark.parametrize(
    ("defaults", "fix"),
    [("[job]\nacount = 'x'\n", "job.account"), ("[job]\nnodes = 4\n", "job.account, job.partition")],
)
def test_other_keys_are_rejected_with_their_line(tmp_path: Path, defaults: str, fix: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        resolved(tmp_path, defaults)
    assert caught.value.where == f"{tmp_path}/.config/toolkit/config.toml:2" and fix in caught.value.fix


def test_a_wrong_value_names_the_file_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as caught:
        resolved(tmp_path, "[job]\naccount = 5\n")
    assert f"{tmp_path}/.config/toolkit/config.toml:2" in caught.value.where
