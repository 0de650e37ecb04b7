"""Hostile names, paths, words and values on a real Slurm: byte for byte in the rank, and never a command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from clusters import ACCOUNTING
from hostile_values import FOLDERS, NO_RUNS, VALUES, canaries, check_shown, variables, write_job
from on_slurm import Site, make_site, wait_for

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.cluster

ONE_LINE = [value for value in VALUES.values() if value and value.isprintable() and len(value) < 100]


@pytest.fixture
def here(cluster, shared_path: Path):
    yield make_site(cluster, shared_path)
    assert canaries(shared_path) == []


def test_words_variables_and_arguments_arrive_below_any_folder(here: Site) -> None:
    """Submitted by us, and the same script by hand, from a file with such a name."""
    runs = here.folder.joinpath("runs", *[name for name in FOLDERS if name not in NO_RUNS])
    passed = variables("P") | {"LATIN": os.fsdecode(b"\xe9\xff")}
    job = write_job(here.folder.joinpath(*FOLDERS), sys.executable, tables="time = '5'")
    names = ", ".join(f'"{name}"' for name in passed)
    job.write_text(job.read_text().replace("[env]\n", f"[env]\npass = [{names}]\n"))
    words = list(VALUES.values())
    done = here.toolkit("submit", job, "--runs", runs, "--wait", "--", *words, **passed)
    assert done.returncode == 0, done.stderr
    (path,) = runs.glob("hostile/*")
    check_shown(here.ok("logs", path, "--rank", 0), words, variables("P"))
    assert [one.name for one in path.glob("slurm-*")] == [
        f"slurm-{json.loads(here.ok('status', path, '--json'))['job_id']}.out"
    ]

    script = here.folder / "; touch CANARY # $(touch CANARY).sbatch"
    script.write_text(here.ok("render", job, "--runs", runs, "--", *words))
    here.command(["sbatch", str(script)], **passed)
    by_hand = RunDirectory(max(runs.glob("hostile/*")))
    wait_for(lambda: by_hand.start_numbers())
    assert here.toolkit("wait", by_hand.path).returncode == 0
    check_shown(here.ok("logs", by_hand.path, "--rank", 0), words, variables("P"))


def test_a_function_gets_its_words_and_arguments(here: Site) -> None:
    """`main(world, config)` of a file and a folder with such names; values that Slurm itself keeps."""
    folder = here.folder.joinpath(*FOLDERS)
    job = write_job(folder, sys.executable)
    (folder / "it's $(touch CANARY).py").write_text(
        "import json, sys\ndef main(world, config):\n"
        "    print(json.dumps([sys.argv[1:], config.args, config.argv, config.env.vars]))\n"
    )
    kept = "[env]" + job.read_text().partition("[env]")[2]
    job.write_text('[job]\nname = "hostile"\nentry = "it\'s $(touch CANARY).py:main"\ntime = "5"\n' + kept)
    comment = " ".join(ONE_LINE).strip()
    option = json.dumps([f"--comment={comment}"])
    # Where Slurm keeps accounts it takes only those that it knows; else it writes any, in small letters.
    account, written = ([], "toolkit") if ACCOUNTING else (["-A", VALUES["substitution"]], "$(touch canary)")
    job_id, run = here.submit(job, "--set", f"job.sbatch={option}", *account, "--", *VALUES.values())
    shown = here.command(["squeue", "-h", "-j", job_id, "-o", "%a|%k"]).stdout.removesuffix("\n")
    assert here.wait(run).returncode == 0
    argv, args, config_argv, config_vars = json.loads(here.ok("logs", run.run_id, "--rank", 0))
    assert argv == config_argv == list(VALUES.values())
    assert (args, config_vars) == (VALUES, variables())
    assert shown.startswith(f"{written}|toolkit:") and shown.endswith(f" {comment}")
