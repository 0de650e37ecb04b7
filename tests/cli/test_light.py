"""The login side stays light: no command imports torch, and the help costs hardly more than click itself."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from toolkit.cli.main import COMMANDS, cli

# Each line is one command; FOLDER is a fresh folder, RUN a run that has ended, CKPT a folder that holds checkpoints.
LOGIN_COMMANDS = [
    "submit JOB --dry-run", "submit JOB --wait", "render JOB", "import JOB", "status", "metrics dashboard", "logs RUN", "wait RUN", "cancel RUN", "history",
    "resume RUN --wait", "jobs list", "jobs copy mpi_hello FOLDER", "site list", "site show local", "site detect", "site partitions JOB", "site check local",
    "config show JOB", "config schema job", "topo show --help", "topo check --help", "topo groups --help",
    "ckpt ls CKPT", "ckpt show CKPT", "ckpt verify CKPT",
    "ckpt export CKPT FOLDER --format safetensors", "ckpt import JOB FOLDER --format safetensors",
    "ckpt show CKPT --norms", "ckpt verify CKPT --full", "ckpt diff CKPT CKPT", "ckpt index CKPT", "ckpt prune CKPT",
    "devcluster --help", "devcluster status", "run JOB", "parse hostlist JOB",
    "bench collectives --ranks 1", "bench collectives --ranks 2 --sizes 64 --iterations 1 --warmup 0",
    "bench step JOB -n 1", "bench step --result last", "bench collectives --result last --json", "bench collectives --result last -o FOLDER.png",
    "data pack JOB -o FOLDER.tokens --processes 1", "data show FOLDER.tokens", "data index JOB",
    "preflight JOB", "efficiency RUN", "timeline RUN", "watch RUN",
    "alerts RUN", "alerts history RUN", "alerts send RUN", "alerts check JOB --against RUN", "explain RUN", "verdict RUN",
    "advise RUN", "stacks RUN", "trace RUN -o FOLDER.json", "report RUN -o FOLDER.html", "dash NONE", "rehearse RUN preempt", "stop RUN", "save RUN", "requeue RUN", "rerun RUN --wait", "diff RUN last",
    "session ls", "session start", "session exec NONE -- true",
    "gc --dry-run",
    "doctor", "completion fish",
]  # fmt: skip
PROBE = """
import sys
from toolkit.cli.main import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["toolkit", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, 1, 2, 4), (line, end.code)
    assert "torch" not in sys.modules, line
print("probed", file=sys.stderr)
"""


def test_no_login_command_imports_torch(toolkit) -> None:
    """All in one fresh process, asked after each command."""
    job = toolkit.job("true")
    lines = "\n".join(LOGIN_COMMANDS)
    run = toolkit.submit(job)
    toolkit.ok("wait", "last")
    for word, value in (
        ("JOB", job),
        ("FOLDER", toolkit.folder / "copied"),
        ("RUN", run.run_id),
        ("CKPT", run.checkpoints),
    ):
        lines = lines.replace(word, str(value))
    done = subprocess.run([sys.executable, "-c", PROBE], input=lines, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stderr.endswith("probed\n"), done.stderr
    assert "Traceback" not in done.stderr
    probed = {line.split()[0] for line in LOGIN_COMMANDS}
    assert probed == set(COMMANDS), "a command is missing in the list above"


HEAVY = {"torch", "numpy", "h5py", "pydantic", "jinja2", "submitit", "rich", "tomlkit", "matplotlib"}


def test_a_history_that_is_remembered_imports_nothing_heavy(toolkit) -> None:
    """Reading jobs and asking Slurm takes four times as long to import as to tell what is remembered."""
    toolkit.submit(toolkit.job("true"))
    toolkit.ok("wait", "last")
    toolkit.ok("history")  # which remembers
    probe = PROBE.replace('"torch" not in sys.modules', f"not {HEAVY} & set(sys.modules)")
    line = f"history --runs {toolkit.runs}"
    done = subprocess.run([sys.executable, "-c", probe], input=line, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("probed\n"), done.stderr
    assert "completed" in done.stdout


def test_a_submission_imports_nothing_that_it_does_not_use(toolkit) -> None:
    probe = PROBE.replace('"torch" not in sys.modules', f"not {HEAVY - {'pydantic', 'jinja2'}} & set(sys.modules)")
    line = f"submit {toolkit.job('true')} --dry-run"
    done = subprocess.run([sys.executable, "-c", probe], input=line, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("probed\n"), done.stderr


def test_the_help_imports_click_and_little_else() -> None:
    """Counted in modules, since wall-clock time depends on the other tests of the machine."""
    count = "import sys; print(len(sys.modules))"
    base = int(subprocess.check_output([sys.executable, "-c", f"import click; {count}"]))
    probe = PROBE.replace('"torch" not in sys.modules', f"len(sys.modules) <= {base} + 40")
    done = subprocess.run([sys.executable, "-c", probe], input="--help", capture_output=True, text=True, check=False)
    assert done.stderr.endswith("probed\n"), done.stderr


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]

    def walk(group: click.Group, path: tuple[str, ...]) -> None:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            found.append((*path, name))
            if isinstance(command, click.Group):
                walk(command, (*path, name))

    walk(cli, ())
    return found


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_every_help(toolkit, path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        said = toolkit(*path, flag)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"Usage: toolkit {' '.join(path)}".rstrip())


def test_the_table_says_what_each_command_says_of_itself(toolkit) -> None:
    """The one-line helps stand twice, so that the table needs no imports; they must not part."""
    table = toolkit.ok("--help")
    for name, (_, _, text) in COMMANDS.items():
        assert name in table and text.rstrip(".") in " ".join(table.split())
        command = cli.get_command(click.Context(cli), name)
        assert command is not None and command.name == name
