"""What sbatch reads in scripts of the forms that users have, compared with what it reads in the scripts of toolkit."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from clusters import RELEASE
from on_slurm import Site

from toolkit.config.script_document import WITHOUT_EFFECT

pytestmark = pytest.mark.cluster

SCRIPTS = tomllib.loads(Path(__file__).with_name("public_scripts.toml").read_text(encoding="utf-8"))["script"]
# The options that toolkit adds, and the partition of its site file.
OWN = ("open-mode", "partition", "verbose", "test-only", "requeue")


def read_by_sbatch(here: Site, path: Path) -> list[dict[str, str]]:
    """The options that sbatch prints with --verbose, for each component."""
    done = here.command(["sbatch", "--verbose", "--test-only", str(path)])
    blocks = re.findall(r"sbatch: defined options\n(.*?)sbatch: end of defined options", done.stderr, re.DOTALL)
    assert blocks, done
    pairs = [[line.removeprefix("sbatch: ").partition(":") for line in block.splitlines()] for block in blocks]
    return [{name.strip(): value.strip() for name, equals, value in block if equals} for block in pairs]


def differences(here: Site, path: Path) -> Counter[str]:
    """How many options of a script toolkit passes on, names, loses and changes."""
    rendered = here.toolkit("render", path)
    assert rendered.returncode == 0, (path.read_text(), rendered)
    ours = here.folder / "rendered.sbatch"
    ours.write_text(rendered.stdout)
    counts: Counter[str] = Counter()
    for theirs, mine in zip(read_by_sbatch(here, path), read_by_sbatch(here, ours), strict=True):
        mine["comment"] = re.sub(r"^toolkit:\S+ ?", "", mine.get("comment", ""))
        for name, value in theirs.items():
            if name in OWN and name not in ("partition", "requeue"):
                continue
            kept = value == mine.get(name) or (name == "signal" and mine[name].split("@")[1:] == value.split("@")[1:])
            # Slurm 26.05 takes only the last of several (docs/devcluster.md).
            kept |= RELEASE == "26.05" and name == "mail-type" and value in mine[name].split(",")
            counts["taken" if kept else "named" if name in WITHOUT_EFFECT else f"lost or wrong: {name} {value}"] += 1
        added = mine.keys() - theirs.keys() - {*OWN, "comment", "output", "job-name"}
        counts.update(f"added: {name} {mine[name]}" for name in added)
    return counts


def write(folder: Path, script: dict[str, str]) -> Path:
    path = folder / "job.sh"
    path.write_text(f"#!{script.get('interpreter', '/bin/bash')}\n{script['text']}")
    return path


@pytest.mark.evidence
def test_no_directive_of_public_forms_is_lost(here: Site) -> None:
    assert len({script["source"] for script in SCRIPTS}) >= 25
    counts = sum((differences(here, write(here.folder, script)) for script in SCRIPTS), Counter())
    assert counts.keys() == {"taken"} and counts["taken"] > 180, counts


@pytest.mark.parametrize(
    "lines",
    [
        "#SBATCH -N2 -n3 -c1 -t 1-2 --mem=10G --gpus=2 -J 'a job' --comment='x y'",
        "#SBATCH --signal=B:USR1@300 --requeue --wait --quiet",
        "#SBATCH --signal=USR2@30 --no-requeue --begin=2030-01-01 --deadline=2030-02-01",
        "#SBATCH --mail-type=END --mail-type=FAIL --mail-user=a@example.org -H",
        "#SBATCH -N1-4 --array=0-7:2%3 --exclude=node4 -w node1 -d singleton --nice=5",
        "#SBATCH -N4 -n16\n#SBATCH -N2 # the later one\n#SBATCH --tasks-per-node=2",
        "#SBATCH -N1 -A toolkit -t 5 --export=NONE\n#SBATCH hetjob\n#SBATCH -N2 -n4 -t 7 --mem-per-cpu=100M",
        "#SBATCH --constraint='a|b' --licenses=x:2 --tmp=5 --mincpus=2 --switches=1@60 --propagate=NOFILE --exclusive=user",
        "#SBATCH --job-n=x --err=e --ntasks-per-n=2 -Dsub -k -O -s",
    ],
)
def test_forms_of_directives(here: Site, lines: str) -> None:
    (here.folder / "sub").mkdir()
    counts = differences(here, write(here.folder, {"text": f"{lines}\nhostname\n"}))
    assert counts.keys() <= {"taken", "named"} and counts["taken"], counts


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["source"].replace("/", "_") for script in SCRIPTS])
def test_import_of_public_forms(here: Site, script: dict[str, str]) -> None:
    done = here.toolkit("import", write(here.folder, script))
    assert done.returncode == 0, done
    job = tomllib.loads(done.stdout)["job"]
    assert ("script" if job.get("once") else "translated") == script["import"], done
    assert ("the script stays the entry of the job: " in done.stderr) == bool(job.get("once"))
