"""Containers around ranks: the commands against golden files, and ranks that live on what the command mounts and sets.

After a change on purpose: `TOOLKIT_GOLDEN=write .venv/bin/pytest tests/supervise/test_containers.py -k golden`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toolkit as package
from toolkit.config.layers import resolve_job
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.site.load import load_site
from toolkit.supervise.containers import rank_command

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
    site.write_text(
        f'name = "here"\n[scheduler]\nkind = "{kind}"\n[env]\nvars = {{ FROM_SITE = "1" }}\n{site_table}'
    )
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
    with pytest.raises(ToolkitError, match="says nothing of containers"):
        resolved(tmp_path, "", '[container]\nimage = "x.sif"\n')
    with pytest.raises(ToolkitError, match="pyxis is a part of srun"):
        resolved(tmp_path, PYXIS + '[launcher]\nkind = "mpirun"\n', "")
    with pytest.raises(ToolkitError, match=r'one of "", "apptainer", "pyxis"'):
        resolved(tmp_path, '[container]\nruntime = "shifter"\n', "")
    for mount in ("data", "/a:b", "/a:/b:rx", "/a,/b"):
        with pytest.raises(ToolkitError, match=r"which is n"):
            resolved(tmp_path, APPTAINER, f'[container]\nimage = "i"\nmounts = ["{mount}"]\n')
    table = resolved(tmp_path, PYXIS, "")
    with pytest.raises(OwnFailureError, match="launcher 'local'"):
        rank_command(table, RUN, {}, {}, launcher="local")


# `apptainer exec` as its manual describes it, with a folder for an image: what is not mounted is not there, the image's
# own values win over the host's, and APPTAINERENV_* wins over both. /usr and its links come from this machine.
STAND_IN = """#!/bin/bash
[ -n "$INSIDE" ] || exec env INSIDE=1 unshare --mount --propagation private "$0" "$@"
[ "$1 $2" = "exec --no-eval" ] || exit 64
shift 2; binds=()
while :; do case $1 in
  --bind) binds+=("$2"); shift 2 ;;
  --pwd) folder=$2; shift 2 ;;
  *) image=$1; shift; break ;;
esac; done
for system in usr proc dev; do binds+=("/$system:/$system"); done
for bind in "${binds[@]}"; do
  IFS=: read -r source target flags <<<"$bind"
  mkdir -p "$image$target" && mount --rbind "$source" "$image$target" || exit 65
done
for link in bin lib lib64 sbin; do ln -sfn "usr/$link" "$image/$link"; done
mkdir -p "$image/tmp"
export PATH=/usr/bin:/bin MINE=of-the-image IMAGES=1
for name in $(compgen -e APPTAINERENV_); do export "${name#APPTAINERENV_}=${!name}"; done
exec /usr/sbin/chroot "$image" /bin/sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_ranks_live_on_what_is_mounted_and_set(toolkit, tmp_path_factory) -> None:
    """With the image's own Python, and without any folder of this machine but those that the command names."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this root may not mount")
    assert shutil.which("python3", path="/usr/bin"), "the stand-in's image takes this machine's Python"
    programs, image = toolkit.folder / "bin", tmp_path_factory.mktemp("image")
    programs.mkdir()
    (programs / "apptainer").write_text(STAND_IN)
    (programs / "apptainer").chmod(0o755)
    site = toolkit.folder / "boxed.toml"
    site.write_text(
        'name = "boxed"\n[scheduler]\nkind = "local"\n[launcher]\nkind = "local"\n[container]\nruntime = "apptainer"\n'
        f'[env]\nvars = {{ FROM_SITE = "s" }}\nsetup = ["export PATH={programs}:$PATH"]\n'
    )
    (toolkit.folder / "show.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([os.environ['RANK'], os.getcwd(), sys.executable, os.path.exists('/root'),"
        " [os.environ.get(name) for name in ('MINE', 'FROM_SITE', 'IMAGES', 'OMP_NUM_THREADS')]]))\n"
    )
    job = toolkit.folder / "work.toml"
    job.write_text(
        '[job]\nentry = "show.py"\nranks_per_node = 2\n[env]\nvars = { MINE = "$(id) `id`" }\n'
        f'[container]\nimage = "{image}"\n'
    )
    out = toolkit.ok("run", job, "--site", site)
    said = sorted(json.loads(line.partition("] ")[2]) for line in out.splitlines())
    values = ["$(id) `id`", "s", "1", "1"]
    assert said == [[rank, str(toolkit.folder), "/usr/bin/python3", False, values] for rank in ("0", "1")]
