"""The rendered script: the same text for the same job, no value escapes its quotes, and the environment is built.

After a change on purpose: `TOOLKIT_GOLDEN=write .venv/bin/pytest tests/submission/test_script.py -k golden`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolkit.config.request import resolve_job
from toolkit.config.resolved import ResolvedJob
from toolkit.config.shipped import shipped_jobs
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.site.load import load_site
from toolkit.submission.script import quote_directive, render_script

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = RunDirectory(Path("/runs/of all/train_lm/20261120-142233-9f3a"))

# Where each site's rendering differs: GPUs asked for in its dialect, its options, account and partition.
GOLDEN_SETTINGS = {
    "local": [],
    "devcluster": ["job.nodes=2", "job.gpus_per_node=2", "job.ranks_per_node=2"],
    "roihu": ["job.nodes=2-4", "job.ranks_per_node=4", "job.account=project_1", "job.time=1-00:00:00"],
    "lumi": ["job.nodes=2", "train.batch=32", "job.ranks_per_node=8", "job.account=project_2", 'job.sbatch=["--mail-type=END"]'],
    "aion": ["job.nodes=2"],
    "archer2": ["job.nodes=2", "job.partition=standard", "job.account=e123", "job.time=04:00:00"],
    "betzy": ["job.nodes=4", "job.account=nn1234k", "train.batch=32"],
    "clariden": ["job.nodes=2", "job.account=a-g123"],
    "daint": ["job.nodes=2", "job.account=g123"],
    "delta": ["job.nodes=2", "job.account=abcd-delta-gpu"],
    "frontier": ["job.nodes=2", "job.ranks_per_node=8", "train.batch=32", "job.account=abc123"],
    "iris": ["job.nodes=2", "job.partition=gpu"],
    "kestrel": ["job.nodes=2", "job.partition=gpu-h100", "job.account=mine"],
    "jeanzay": ["job.nodes=2", "job.partition=gpu_p13", "job.constraint=v100-32g", "job.account=abc@v100"],
    "juwels_booster": ["job.nodes=2", "job.partition=booster", "job.account=abc"],
    "leonardo": ["job.nodes=2", "job.partition=boost_usr_prod", "job.account=EUHPC_1", "job.qos=boost_qos_dbg"],
    "mahti": ["job.nodes=2", "job.partition=gpumedium", "job.account=project_3"],
    "olivia": ["job.nodes=2", "job.partition=accel", "job.account=nn1234k"],
    "perlmutter": ["job.nodes=2", "job.gpus_per_node=4", "job.cpus_per_rank=16", "job.constraint=gpu", "job.qos=regular", "job.account=m1234_g"],
    "stampede3": ["job.nodes=2", "job.partition=spr"],
    "vista": ["job.nodes=2", "job.partition=gh", "job.ranks_per_node=1", "job.cpus_per_rank=72"],
    "snellius": ["job.nodes=2", "job.partition=gpu_h100"],
}  # fmt: skip


@pytest.mark.parametrize("site", GOLDEN_SETTINGS)
def test_golden(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/toolkit/bin/python")
    job = resolve_job(shipped_jobs()["train_lm"], site=load_site(site, {}), environ={}, settings=GOLDEN_SETTINGS[site])
    rendered = render_script(job, RUN, 0)
    # The job's values are the configuration's business; here only that they stand where they belong.
    rendered, count = re.subn(r"(<<'TOOLKIT_JOB'\n)\{.*\}(\nTOOLKIT_JOB\n)", r"\1{the resolved job}\2", rendered)
    assert count == 1
    path = GOLDEN / f"train_lm-{site}.sbatch"
    if os.environ.get("TOOLKIT_GOLDEN") == "write":
        path.write_text(rendered)
    assert rendered == path.read_text()


def a_job(folder: Path, tables: str = "", **changes: object) -> ResolvedJob:
    path = folder / "job.toml"
    path.write_text(f'[job]\nentry = ["true"]\n{tables}')
    return resolve_job(path, site=load_site("local"), environ={}).model_copy(update=changes)


def run_by_bash(
    text: str, stand_in: Path, environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a rendered script whose supervisor is `stand_in`."""
    changed, count = re.subn(r"(?m)^exec \S+ -P -m toolkit\.supervise", f"exec {stand_in}", text)
    assert count == 1
    path = folder / "rendered.sbatch"
    path.write_text(changed, encoding="utf-8")
    return subprocess.run(["bash", str(path)], capture_output=True, text=True, env=environment, check=False)


nasty = st.text(
    alphabet=st.one_of(
        st.sampled_from("'\"\\$`%#!;&|<>(){}*? \n\t~"), st.characters(codec="utf-8", exclude_characters="\0")
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(words=st.lists(nasty, max_size=3), value=nasty, folder=nasty)
@example(words=["TOOLKIT_JOB", "a\nTOOLKIT_JOB\nrm -rf x"], value="$(touch pwned)`id`", folder="a 'b' \"c\" $d #e %f")
def test_no_value_escapes(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], value: str, folder: str
) -> None:  # fmt: skip
    """The here-document, the arguments and the site's variables arrive as they were."""
    tmp_path = tmp_path_factory.mktemp("script")
    site = load_site("local")
    job = a_job(
        tmp_path,
        argv=words,
        args={"value": value},
        site_env=site.env.model_copy(update={"vars": {"SITE_VALUE": value}}),
    )
    run = RunDirectory(tmp_path / ("x" + folder.replace("/", "_")))
    try:
        text = render_script(job, run, 3)
    except ToolkitError as error:
        assert any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in folder) or "\\" in folder
        assert "\n" not in str(error)
        return
    stand_in = tmp_path / "supervisor"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "json.dump([sys.argv[1:], json.load(sys.stdin), dict(os.environ)], sys.stdout)\n"
    )
    stand_in.chmod(0o755)
    done = run_by_bash(text, stand_in, {"PATH": os.environ["PATH"]}, tmp_path)
    assert done.stderr == ""
    argv, received, environment = json.loads(done.stdout)
    assert argv == [str(run.path)]
    assert received == json.loads(job.to_json())
    assert (environment["SITE_VALUE"], environment["TOOLKIT_START"]) == (value, "3")


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\x7f", "\x85"])
def test_control_characters_are_refused(tmp_path: Path, letter: str) -> None:
    with pytest.raises(ToolkitError, match="control character"):
        quote_directive(f"--comment=a{letter}#SBATCH --uid=0")
    with pytest.raises(ToolkitError, match="control character"):
        render_script(a_job(tmp_path), RunDirectory(Path(f"/runs/a{letter}b/c")), 0)


@pytest.mark.parametrize("name", ["a\\b", os.fsdecode(b"caf\xe9")])
def test_run_directories_that_no_log_can_lie_in_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ToolkitError, match="--runs"):
        render_script(a_job(tmp_path), RunDirectory(Path("/runs") / name / "c"), 0)


def test_only_named_variables_survive(tmp_path: Path) -> None:
    site = load_site("local")
    job = a_job(
        tmp_path,
        '[env]\npass = ["MY_DATA"]\n',
        site_env=site.env.model_copy(update={"vars": {"FROM_SITE": "1"}, "setup": ["export FROM_SETUP=2"]}),
    )
    kept = {
        "PATH": os.environ["PATH"], "HOME": "/h", "LC_ALL": "C.UTF-8", "https_proxy": "http://p:1", "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c", "MY_DATA": "/data x",
    }  # fmt: skip
    polluted = {
        "SECRET_TOKEN": "s", "PYTHONPATH": "/evil", "LD_PRELOAD": "", "TOOLKIT_START": "9", "VIRTUAL_ENV": "/v",
        "OMP_NUM_THREADS": "64", "SLURM_EXPORT_ENV": "NONE", "SBATCH_PARTITION": "p", "PATHS": "no", "XPATH": "no",
        "BASH_FUNC_which%%": "() { echo mine; }", "BASH_FUNC_export%%": "() { :; }", "BASH_ENV": "/dev/null",
    }  # fmt: skip
    done = run_by_bash(render_script(job, RUN, 0), Path("/usr/bin/env; #"), {**kept, **polluted}, tmp_path)
    begins, *variables = done.stdout.splitlines()
    assert begins == "toolkit: job 7 begins (restart 0)"
    found = dict(line.split("=", 1) for line in variables)
    for shells_own in ("_", "SHLVL", "PWD", "OLDPWD"):
        found.pop(shells_own, None)
    assert found == {**kept, "TOOLKIT_START": "0", "FROM_SITE": "1", "FROM_SETUP": "2"}


@pytest.mark.parametrize(("access", "mode"), [("user", 0o600), ("group", 0o640)])
def test_the_log_of_slurm_is_private_before_anything_is_printed(tmp_path: Path, access: str, mode: int) -> None:
    job, run = a_job(tmp_path), RunDirectory(tmp_path / "of 'all'" / "work" / "r")
    job = job.model_copy(update={"paths": job.paths.model_copy(update={"access": access})})
    run.path.mkdir(parents=True)
    logs = [run.path / name for name in ("slurm-7.out", "slurm-6_3.out", "slurm-8.out")]
    for log in logs:
        log.touch(0o644)
        log.chmod(0o644)
    text = render_script(job, run, 0)
    for variables in (
        {"SLURM_JOB_ID": "7"},
        {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"},
    ):
        done = run_by_bash(text, Path("/usr/bin/env; #"), {"PATH": os.environ["PATH"], **variables}, tmp_path)
        assert done.returncode == 0
    assert [log.stat().st_mode & 0o777 for log in logs] == [mode, mode, 0o644]
    assert (
        done.stderr == ""
        and run_by_bash(
            text, Path("/usr/bin/env; #"), {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "99"}, tmp_path
        ).stderr
        == ""
    )  # the log of `-o` is elsewhere


@pytest.mark.parametrize(
    "tables",
    [{"modules": ["no such/1.0"]}, {"setup": ["export A=1", "source /nowhere.sh", "export B=2"]}, {"setup": ["false"]}],
)
def test_a_line_of_the_site_that_fails_ends_the_job(tmp_path: Path, tables: dict[str, list[str]]) -> None:
    site = load_site("local")
    job = a_job(tmp_path, site_env=site.env.model_copy(update=tables))
    done = run_by_bash(render_script(job, RUN, 0), Path("/usr/bin/env; #"), {"PATH": os.environ["PATH"]}, tmp_path)
    assert done.returncode == 125
    assert "this line of the site file failed: " in done.stderr
    assert done.stdout == ""


# `module load` of Environment Modules 3.2 says nothing by its code; 5 and Lmod do. Only a name that begins with "good" exists.
TELLING = 'module() { [[ $2 == good* ]] && LOADEDMODULES+=:$2/1.0 || { echo "no module $2" >&2; return 1; }; }'
SILENT = 'module() { [[ $2 == good* ]] && LOADEDMODULES+=:$2/1.0 || echo "no module $2" >&2; }'


@pytest.mark.parametrize("handed_on", [True, False])
@pytest.mark.parametrize("system", [TELLING, SILENT])
@pytest.mark.parametrize(("modules", "missing"), [(["good"], ""), (["good", "good"], ""), (["good", "bad"], "bad")])
def test_a_module_that_is_missing_is_named(
    tmp_path: Path, system: str, handed_on: bool, modules: list[str], missing: str
) -> None:
    """Also where `module` itself reports success, and where the shell before did not export it."""
    home = tmp_path / "home"
    (home / "init").mkdir(parents=True)
    (home / "init" / "bash").write_text(system)
    variables = {"PATH": os.environ["PATH"], "MODULESHOME": str(home)}
    if handed_on:
        variables = {"PATH": os.environ["PATH"], "BASH_FUNC_module%%": system.removeprefix("module")}
    job = a_job(tmp_path, site_env=load_site("local").env.model_copy(update={"modules": modules}))
    done = run_by_bash(render_script(job, RUN, 0), Path("/usr/bin/env; #"), variables, tmp_path)
    assert done.returncode == (125 if missing else 0), done
    assert ("this line of the site file failed: module load bad" in done.stderr) == bool(missing)


def test_a_resumes_script_says_its_start(tmp_path: Path) -> None:
    assert "export TOOLKIT_START=4\n" in render_script(a_job(tmp_path), RUN, 4)


def test_plain_values_need_no_quotes_and_others_get_sbatchs() -> None:
    assert quote_directive("--nodes=2-4") == "--nodes=2-4"
    assert quote_directive('--comment=a "b" \\c #d') == r'--comment="a \"b\" \\c #d"'
    assert quote_directive("-p main") == "-p main"
    assert quote_directive('-D "/my dir/x=1"') == '-D "/my dir/x=1"'
    assert quote_directive("--wckey=a b=c") == '--wckey="a b=c"'


def sbatch_lines(folder: Path, words: list[str], left_out: Sequence[str] = (), exclude: str = "") -> list[str]:
    """The #SBATCH lines of a job with options of its own."""
    job = a_job(folder, f"sbatch = {json.dumps(words)}\nexclude = {json.dumps(exclude)}\n")
    text = render_script(job, RUN, 0, excluded=left_out)
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("word", ['--comment "my words"', "--comment=my words", "--comment 'my words'"])
def test_a_comment_stands_behind_the_token_without_its_quotes(tmp_path: Path, word: str) -> None:
    lines = [line for line in sbatch_lines(tmp_path, ["--comment=older", word]) if "--comment" in line]
    assert lines == [f'--comment="toolkit:{RUN.run_id}:0 my words"']


@pytest.mark.parametrize("word", ["--exclude=n[8-9]", "--exclude n[8-9]", "-x n[8-9]", "-xn[8-9]", '-x "n[8-9]"'])
@pytest.mark.parametrize(("exclude", "bad"), [("", ()), ("", ("n3", "n4")), ("n1", ("n3",)), ("n1", ())])
def test_nodes_that_the_job_excludes_and_bad_ones_make_one_list(
    tmp_path: Path, word: str, exclude: str, bad: tuple[str, ...]
) -> None:
    """sbatch takes the last --exclude: with two of them a bad node would be given, though stderr said it would not."""
    lines = [
        line
        for line in sbatch_lines(tmp_path, [word, "--exclusive"], bad, exclude)
        if line.startswith(("-x", "--exclude="))
    ]
    assert lines == ["--exclude=" + ",".join(filter(None, [exclude, "n[8-9]", *bad]))]
    assert "--exclusive" in sbatch_lines(tmp_path, [word, "--exclusive"], bad, exclude)


def test_a_file_of_nodes_is_joined_with_no_list(tmp_path: Path) -> None:
    assert "--exclude=./nodes" in sbatch_lines(tmp_path, ["-x ./nodes"])
    with pytest.raises(ToolkitError, match=r"names a file, to which toolkit cannot add .*n3"):
        sbatch_lines(tmp_path, ["-x ./nodes"], ["n3"])
