"""Names, paths, words and values that break shells: each arrives byte for byte, or is refused with a fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_values import FOLDERS, NO_RUNS, VALUES, canaries, check_shown, hexed, toml, variables, write_job

ONE_LINE = {name: value for name, value in VALUES.items() if value.isprintable() and value and name != "long"}


def nested(folder: Path, names: list[str]) -> Path:
    return folder.joinpath(*names)


@pytest.fixture(autouse=True)
def no_canary(toolkit, monkeypatch):
    """Everything happens in the test's own folder, and no value was read as a command."""
    monkeypatch.chdir(toolkit.folder)
    yield
    assert canaries(toolkit.folder) == []


def test_words_variables_and_arguments_arrive_below_any_folder(toolkit) -> None:
    job = write_job(nested(toolkit.folder, FOLDERS), sys.executable)
    runs = nested(toolkit.folder / "runs", [name for name in FOLDERS if name not in NO_RUNS])
    said = toolkit("run", job, "--runs", runs, "--", *VALUES.values())
    assert said.code == 0, said.err
    check_shown(said.out, list(VALUES.values()))
    (run,) = (runs / "hostile").iterdir()
    assert f"in {run}\n" in said.err
    # The same script, as somebody gives it to a shell.
    toolkit.ok("render", job, "--runs", runs, "--", *VALUES.values())
    by_hand = max((runs / "hostile").iterdir())
    subprocess.run(["bash", by_hand / "job.sbatch"], env={**os.environ, "TOOLKIT_LOCAL": "1"}, check=True)
    check_shown(toolkit.ok("logs", by_hand, "--rank", 0), list(VALUES.values()))


def test_variables_of_the_shell_are_passed_on(toolkit, monkeypatch) -> None:
    """Also under names that the script might use itself, and with bytes that are no text."""
    passed = variables("P") | {"name": "mine", "esac": "b", "in": ":", "i": "c", "LATIN": os.fsdecode(b"\xe9\xff")}
    for name, value in passed.items():
        monkeypatch.setenv(name, value)
    names = ", ".join(f'"{name}"' for name in passed)
    job = write_job(toolkit.folder, sys.executable, tables="ranks_per_node = 1")
    job.write_text(job.read_text().replace("[env]\n", f"[env]\npass = [{names}]\n"))
    shown = json.loads(toolkit.ok("run", job))["environment"]
    expected = {name.encode().hex(): os.fsencode(value).hex() for name, value in passed.items()}
    assert {name: shown.get(name) for name in expected} == expected


def test_the_sites_values_arrive(toolkit, monkeypatch) -> None:
    """Modules are words of a command of the shell's own; its lines are shell by design."""
    monkeypatch.setenv(
        "BASH_FUNC_module%%", f'() {{ printf "%s\\0" "$@" >>"{toolkit.folder}/modules"; LOADEDMODULES+=:; }}'
    )
    table = ", ".join(f"{name} = {toml(value)}" for name, value in variables("S").items())
    network = ", ".join(f"{name} = {toml(value)}" for name, value in variables("N").items())
    site = toolkit.folder / "odd.toml"
    site.write_text(
        f'name = "odd"\n[scheduler]\nkind = "local"\n[launcher]\nkind = "local"\n[network]\nvars = {{ {network} }}\n'
        f"[env]\nmodules = [{', '.join(map(toml, ONE_LINE.values()))}]\nvars = {{ {table} }}\n"
    )
    shown = json.loads(toolkit.ok("run", write_job(toolkit.folder, sys.executable), "--site", site))
    expected = hexed(variables("S") | variables("N"))
    assert {name: shown["environment"].get(name) for name in expected} == expected
    loaded = (toolkit.folder / "modules").read_text().split("\0")[:-1]
    assert loaded == [word for value in ONE_LINE.values() for word in ("load", value)]


# What --set reads as TOML, which quotes prevent.
READ_AS_TOML = {
    "TOML true": True, "TOML number": 16, "TOML date": "1979-05-27", "TOML list": [1, "a"], "TOML table": {"a": 1},
    "TOML text": "a", "out of single quotes": "; touch CANARY; ", "out of double quotes": "; touch CANARY; ",
}  # fmt: skip


def job_in(script: str) -> dict:
    return json.loads(script.rpartition("<<'TOOLKIT_JOB'\n")[2].rpartition("\nTOOLKIT_JOB")[0])


def test_settings_and_variables_of_the_toolkit_arrive(toolkit, monkeypatch) -> None:
    job = toolkit.job("true")
    plain = {f"v{number}": VALUES[name] for number, name in enumerate(VALUES) if name != "TOML float"}
    words = [word for name, value in plain.items() for word in ("--set", f"args.{name}={value}")]
    quoted = [word for name, value in variables("q").items() for word in ("--set", f"args.{name}={toml(value)}")]
    for name, value in variables("TOOLKIT_ENV_VARS_").items():
        monkeypatch.setenv(name.replace("ENV_VARS_", "ARGS_E"), toml(value))
    args = job_in(toolkit.ok("render", job, *words, *quoted))["args"]
    expected = {f"v{number}": READ_AS_TOML.get(name, value) for number, (name, value) in enumerate(VALUES.items()) if name != "TOML float"}  # fmt: skip
    assert args == expected | variables("q") | variables("e")


@pytest.mark.parametrize("key", ["account", "partition", "qos", "constraint", "nodelist", "exclude"])
def test_slurms_options_stand_in_one_line_or_are_refused(toolkit, key: str) -> None:
    job = toolkit.job("true")
    for value in VALUES.values():
        said = toolkit("render", job, "--set", f"job.{key}={value}")
        lines = [line for line in said.out.splitlines() if line.startswith(f"#SBATCH --{key}=")]
        if said.code == 0:
            assert len(lines) == bool(value)
            assert value.isprintable() or not set(value) & set(map(chr, range(32)))
        else:
            assert (said.code, said.out) == (2, "")
            assert "control character" in said.err and said.err.count("\n") == 1 and "Fix: " in said.err


LATIN = os.fsdecode(b"\xe9\xff")
LONG = "x" * 131_072
MANY = "".join(f", '{number:0100000}'" for number in range(11))
# name: (lines of the job file, more words, words of the error)
REFUSED = {
    "no UTF-8 behind --": ("", ["--", "a", LATIN], ["argument 2 after --", "UTF-8"]),
    "no UTF-8 in --set": ("", ["--set", f"args.x={LATIN}"], ["args.x", "UTF-8"]),
    "no UTF-8 in a key": ("", ["--set", f"args.{LATIN}=1"], ["args.", "UTF-8"]),
    "no UTF-8 in a variable": ("", ["--set", f"env.vars.X={LATIN}"], ["env.vars.X", "UTF-8"]),
    "no UTF-8 in an account": ("", ["-A", LATIN], ["job.account", "UTF-8"]),
    "no UTF-8 in a log's name": ("", ["-o", LATIN], ["--output", "UTF-8"]),
    "no UTF-8 in a run's path": ("", ["--runs", LATIN], ["--runs", "UTF-8"]),
    "newline in a log's name": ("", ["-o", "a\n#SBATCH --hold"], ["--output", "control character"]),
    "newline in an account": ('account = "a\\nb"', [], ["job.toml:3:job.account", "control character"]),
    "newline in an option": ('sbatch = ["--comment=a\\nb"]', [], ["job.toml:3:job.sbatch", "control character"]),
    "newline in a file entry": ('entry = "a\\nb.py"', [], ["job.entry", "is not a valid entry"]),
    "NUL in a word": ('entry = ["true", "a\\u0000b"]', [], ["job.entry", "NUL"]),
    "NUL in a variable": ('[env]\nvars = { A = "a\\u0000b" }', [], ["job.toml:4:env.vars.A", "NUL"]),
    "too long a word": (f'entry = ["true", "{LONG}"]', [], ["job.entry", "131071"]),
    "too long a variable": (f'[env]\nvars = {{ A = "{LONG}" }}', [], ["env.vars", "131071"]),
    "too many words": (f"entry = ['true'{MANY}]", [], ["job.entry", "1000000"]),
    "variable without a name": ('[env]\nvars = { "" = "1" }', [], ["env.vars", "not a valid variable name"]),
    "variable that is none": ('[env]\nvars = { "A=B" = "1" }', [], ["env.vars", "not a valid variable name"]),
    "function's name": ('[env]\nvars = { "BASH_FUNC_x%%" = "() { touch CANARY; }" }', [], ["env.vars", "not a valid variable name"]),
    "pass a pattern": ('[env]\npass = ["A*) touch CANARY ;; *"]', [], ["env.pass", "not a valid variable name"]),
    "bash's own": ('[env]\npass = ["IFS"]', [], ["job.toml:4:env.pass", "`vars`"]),
    "whose run": ('[env]\nvars = { TOOLKIT_RUN_DIR = "/x" }', [], ["env.vars.TOOLKIT_RUN_DIR", "TOOLKIT_RUN_DIR is reserved: toolkit, Slurm or MPI sets it"]),
    "whose job": ('[env]\nvars = { SLURM_JOB_ID = "1" }', [], ["env.vars.SLURM_JOB_ID", "SLURM_JOB_ID is reserved: toolkit, Slurm or MPI sets it"]),
    "whose rank": ('[env]\nvars = { PMI_RANK = "1" }', [], ["env.vars.PMI_RANK", "PMI_RANK is reserved: toolkit, Slurm or MPI sets it"]),
    "no number": ("[args]\na = [1.0, nan]", [], ["job.toml:4:args.a", "nan"]),
    "no end": ("[args.b]\na = -inf", [], ["job.toml:4:args.b.a", "-inf"]),
    "too deep": (f"[args]\na = {'[' * 101}{']' * 101}", [], ["job.toml", "100"]),
    "much too deep": (f"[args]\na = {'[' * 9000}{']' * 9000}", [], ["job.toml", "100"]),
    "too deep in --set": ("", ["--set", f"args.a={'[' * 9000}{']' * 9000}"], ["args.a", "recursion"]),
    "too many digits": (f"[args]\na = {'9' * 5000}", [], ["job.toml", "digits"]),
    "more than 64 bits": ("ranks_per_node = 9223372036854775808", [], ["job.ranks_per_node", "64 bits"]),
    "too many nodes": ('nodes = "1-99999999"', [], ["job.nodes", "range of nodes"]),
    "names that are paths": ("", ["-J", "../../x"], ["job.name"]),
    "name of the folder": ("", ["-J", ".."], ["job.name"]),
    "name with a pattern": ("", ["-J", "a%j"], ["job.name"]),
    "no name": ("", ["-J", ""], ["job.name"]),
    "name with a command": ("", ["-J", "$(touch CANARY)"], ["job.name"]),
    "long name": ("", ["-J", "a" * 65], ["job.name"]),
    "long path": ("", ["--runs", "x" * 300], ["--runs"]),
    "array that is a command": ("", ["-a", "1; touch CANARY"], ["-a", "job.array"]),
    "nodes that are a command": ("", ["-N", "$(touch CANARY)"], ["-N", "job.nodes"]),
    "time that is a command": ("", ["-t", "`touch CANARY`"], ["-t", "job.time"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_and_fix(toolkit, name: str) -> None:
    lines, words, expected = REFUSED[name]
    job = toolkit.folder / "job.toml"
    entry = "" if "entry" in lines else 'entry = ["true"]\n'
    job.write_text(f"[job]\n{entry}{lines}\n")
    said = toolkit("submit", job, *words)
    assert (said.code, said.out) == (2, ""), said
    assert said.err.startswith("toolkit: ") and said.err.count("\n") == 1
    assert "Fix: " in said.err and len(said.err) < 5000
    for word in expected:
        assert word in said.err, said.err
    assert not list(toolkit.runs.glob("*/*"))


@pytest.mark.parametrize("run", ["~nobody-here", "x" * 300, "$(touch CANARY)", "\x1b[31m", LATIN, "", "--", "../.."])
def test_no_such_run_job_or_site(toolkit, run: str) -> None:
    for words in (["status", "--", run], ["render", "--", run], ["render", toolkit.job("true"), f"--site={run}.toml"]):
        said = toolkit(*words)
        assert said.code in (2, 4) and said.out == "", said
        assert said.err.startswith("toolkit: ") and said.err.count("\n") == 1 and "\x1b" not in said.err


def test_a_folder_called_as_a_variable_is_that_folder(toolkit) -> None:
    """The shell has expanded what the user wanted expanded."""
    toolkit.ok("render", toolkit.job("true"), "--runs", "$HOME")
    assert list((toolkit.folder / "$HOME").glob("work/*"))


def test_a_working_folder_that_is_no_text(toolkit, monkeypatch) -> None:
    folder = toolkit.folder / LATIN
    folder.mkdir()
    monkeypatch.chdir(folder)
    toolkit.ok("render", toolkit.job("true"))
    (record,) = toolkit.runs.glob("work/*/record.json")
    assert json.loads(record.read_text())["working_directory"] == str(folder)


def test_a_log_keeps_its_bytes_in_a_file_and_only_colours_on_a_terminal(toolkit, terminal) -> None:
    escapes = "\x1b[31mred\x1b[0m \x1b]0;owned\x07title \x1b[2Jclear \x9b1mbold \x08\x7fdel"
    (toolkit.folder / "escapes").write_text(escapes + "\n10%\r90%\r100%\n", newline="")
    run = toolkit.submit(toolkit.job("cat escapes; exit 3", more="[restart]\ncrashes = 0\n"))
    toolkit("wait", run.run_id)
    assert toolkit.ok("logs", "--rank", 0) == escapes + "\n10%\r90%\r100%\n"
    command = str(Path(sys.executable).with_name("toolkit"))
    for words in (["logs", "--rank", "0"], ["status"], ["wait"], ["explain"], ["history"]):
        window = terminal([command, *words], cwd=toolkit.folder, env=dict(os.environ))
        window.wait()
        for letters in ("\x1b]", "\x07", "\x1b[2Jc", "\x9b", "\x7f", "owned"):
            assert letters not in window.screen, (words, window.screen)
        if words[0] == "logs":
            assert window.screen == "\x1b[31mred\x1b[0m title clear bold del\x1b[0m\r\n100%\r\n"
