"""Containers around ranks: the commands against golden files. `tests/cluster/test_containers_on_slurm.py` runs them.

After a change on purpose: `TOOLKIT_GOLDEN=write .venv/bin/pytest tests/supervise/test_containers.py -k golden`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import toolkit as package
from toolkit.config.request import resolve_job
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.site.load import load_site
from toolkit.supervise.launch import rank_command

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = RunDirectory(Path("/runs of/all/train/20261120-142233-9f3a"))

APPTAINER = """
[container]
runtime = "apptainer"
mounts = ["/scratch"]
options = ["--nv"]
"""
PYXIS = """
[container]
runtime = "pyxis"
image = "nvcr.io#nvidia/pytorch:25.10-py3"
options = ["--no-container-mount-home"]
"""


def resolved(folder: Path, site_table: str, job_table: str, kind: str = "local") -> dict[str, Any]:
    """The job as the supervisor reads it."""
    site = folder / "here.toml"
    site.write_text(f'name = "here"\n[scheduler]\nkind = "{kind}"\n[env]\nvars = {{ FROM_SITE = "1" }}\n{site_table}')
    job = folder / "train.toml"
    job.write_text(f'[job]\nentry = ["true"]\n[env]\nvars = {{ MINE = "$(a) \'b\'" }}\n{job_table}')
    value = json.loads(resolve_job(job, site=load_site(str(site)), environ={}).to_json())
    value["job_directory"] = "/home/ada/my job"
    return dict(value)


@pytest.mark.parametrize(
    ("name", "site", "job"),
    [
        ("apptainer", APPTAINER, '[container]\nimage = "/images/torch.sif"\nmounts = ["/data/v2:/data:ro"]\npython = "/opt/py/bin/python"\n'),
        ("pyxis", PYXIS, ""),
    ],
)  # fmt: skip
def test_golden(tmp_path: Path, name: str, site: str, job: str) -> None:
    table = resolved(tmp_path, site, job)
    base = {"PATH": "/bin", "FROM_SITE": "1", "SLURM_JOB_ID": "7", "LANG": "C.UTF-8"}
    environment = {**base, "MINE": "$(a) 'b'", "MPI4PY_LIBMPI": "/host/libmpi.so", "TOOLKIT_ATTEMPT": "0"}
    command = rank_command(table, RUN, environment, base, launcher="srun")
    lines = ["# options of srun", *command.options, "# once a rank", *command.program, "# environment"]
    lines += [f"{key}={value}" for key, value in sorted(command.environment.items())]
    text = "\n".join(lines).replace(str(Path(package.__file__).parent), "/site-packages/toolkit") + "\n"
    path = GOLDEN / f"ranks-{name}.txt"
    if os.environ.get("TOOLKIT_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_without_an_image_nothing_changes(tmp_path: Path) -> None:
    table = resolved(tmp_path, APPTAINER, "")
    command = rank_command(table, RUN, {"MINE": "1"}, {}, launcher="srun")
    assert command.program == [sys.executable, "-P", "-m", "toolkit.rank"]
    assert (command.environment, command.options) == ({"MINE": "1"}, [])


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="has no container runtime"):
        resolved(tmp_path, "", '[container]\nimage = "x.sif"\n')
    with pytest.raises(ToolkitError, match="pyxis is a plugin of srun"):
        resolved(tmp_path, PYXIS + '[launcher]\nkind = "mpirun"\n', "")
    with pytest.raises(ToolkitError, match=r'one of "", "apptainer", "pyxis"'):
        resolved(tmp_path, '[container]\nruntime = "shifter"\n', "")
    for mount in ("data", "/a:b", "/a:/b:rx", "/a,/b"):
        with pytest.raises(ToolkitError, match=r"expected (?:SOURCE|absolute)"):
            resolved(tmp_path, APPTAINER, f'[container]\nimage = "i"\nmounts = ["{mount}"]\n')
    table = resolved(tmp_path, PYXIS, "")
    with pytest.raises(OwnFailureError, match="launcher 'local'"):
        rank_command(table, RUN, {}, {}, launcher="local")


def test_home_is_an_option_of_apptainer(tmp_path: Path) -> None:
    """It refuses APPTAINERENV_HOME, and would go on with its own."""
    image = '[container]\nimage = "i.sif"\n'
    table, base = resolved(tmp_path, APPTAINER, image), {"HOME": "/home/ada"}
    command = rank_command(table, RUN, {"HOME": "/scratch/ada"}, base, launcher="srun")
    assert command.program[command.program.index("--home") + 1] == "/scratch/ada"
    assert "APPTAINERENV_HOME" not in command.environment
    assert "--home" not in rank_command(table, RUN, base, base, launcher="srun").program


@pytest.mark.parametrize("value", ["a\r\nb", "\udcff"])
def test_what_apptainer_would_alter_is_refused(tmp_path: Path, value: str) -> None:
    table = resolved(tmp_path, APPTAINER, '[container]\nimage = "i.sif"\n')
    with pytest.raises(OwnFailureError, match="the variable MINE cannot be passed into the image unchanged"):
        rank_command(table, RUN, {"MINE": value}, {}, launcher="srun")


def test_options_that_hide_the_rank_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="'--containall' removes the variables"):
        resolved(tmp_path, '[container]\nruntime = "apptainer"\noptions = ["--containall"]\n', "")
