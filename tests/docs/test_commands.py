"""The commands of the pages: each parses, and the README's way is walked once for real."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from toolkit.cli.alerts import ListByDefault
from toolkit.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "scripts" / "demo.py"]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\s)toolkit (?P<words>[a-z].*)$")


def code_lines(text: str) -> Iterator[str]:
    """Lines of fenced and indented blocks; of fenced ones only shells'."""
    for block in FENCE.finditer(text):
        if block["language"] in ("", "sh", "bash", "console"):
            yield from block["body"].splitlines()
    yield from (line for line in FENCE.sub("", text).splitlines() if line.startswith("    "))
    # Also a whole command in the running text.
    yield from re.findall(r"`(toolkit [^`]+)`", FENCE.sub("", text))


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for line in code_lines(page.read_text(encoding="utf-8")):
            found = COMMAND.search(line)
            if found:
                yield page.name, found["words"]


@pytest.mark.parametrize(("page", "words"), sorted(set(commands())))
def test_parses(page: str, words: str) -> None:
    """A renamed command or option breaks this. What stands in capitals is a placeholder."""
    # An explanation may stand behind the command, in a column of its own.
    argv = shlex.split(re.split(r"\s{2,}", words)[0], comments=True)
    for stop in ("|", ">", "&&", "&"):
        argv = argv[: argv.index(stop)] if stop in argv else argv
    argv = [word for word in argv if word != "..."]
    command: click.Command = cli
    # A command keeps the help options that it has when it is first asked: other tests see what is made here.
    context = click.Context(cli, info_name="toolkit", **cli.context_settings)
    while isinstance(command, click.Group) and argv:
        name = argv.pop(0)
        if name in (word for option in command.params for word in option.opts):
            argv.pop(0)  # an option of the group, with its value
            continue
        found = command.get_command(context, name)
        if found is None and isinstance(command, ListByDefault):
            found, argv = command.commands["list"], [name, *argv]
        assert found is not None, f"{page}: there is no command {name!r}"
        command, context = found, click.Context(found, context, info_name=name)
    if isinstance(command, click.Group) or argv == ["--help"] or "[" in words:
        return  # the page speaks of the group, or of the command's form
    try:
        command.make_context(command.name, list(argv), parent=context.parent)
    except click.MissingParameter:
        assert not argv, f"{page}: toolkit {words}"  # the command is only named
    except click.UsageError as error:
        pytest.fail(f"{page}: toolkit {words}: {error.format_message()}")


def test_pages_have_commands() -> None:
    """The search itself: it must find the README's."""
    found = {words for page, words in commands() if page == "README.md"}
    assert (
        "history --state failed --since 7d" in found
        and "resume last -N 4                       # later, on twice the nodes" in found
    )
    # What the demo prints in the end is typed as it stands, and tries nothing in the folder of its runs.
    (dry_run,) = (words for page, words in commands() if page == "demo.py" and "--dry-run" in words)
    assert "--runs elsewhere" in dry_run and "(" not in dry_run


def test_the_readmes_install_line_names_this_project() -> None:
    """pip reads the line's words as a requirement; nothing is fetched."""
    (words,) = re.findall(r"^    (pip install \S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    argv = [sys.executable, "-m", *shlex.split(words), "--dry-run", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install toolkit-" in done.stdout


def test_the_readmes_way(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a job, train for a few steps, follow the run, and resume it on another number of ranks."""
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    toolkit.ok("jobs", "copy", "train_lm", ".")
    assert {path.name for path in Path().iterdir()} == {"train_lm.py", "train_lm.toml"}
    small = (
        "--set",
        "train.batch=4",
        "--set",
        "train.micro_batch=0",
        "--set",
        "args.layers=1",
        "--set",
        "args.width=32",
    )
    submitted = toolkit("submit", "train_lm.toml", "-n", 2, "--set", "train.steps=4", *small, "--wait")
    assert submitted.code == 0, submitted
    assert "completed" in toolkit.ok("status", "last")
    assert toolkit("wait", "last").code == 0
    assert toolkit.ok("logs", "last", "--rank", 0)
    resumed = toolkit("resume", "last", "-n", 1, "--set", "train.steps=6", "--wait")
    assert resumed.code == 0, resumed
    assert "resumed at step 4" in toolkit.ok("logs", "last", "--rank", 0)
    assert "step 6/6" in resumed.err
    assert len(toolkit.ok("history").splitlines()) == 2
    shutil.rmtree("runs")


def test_the_site_page_works_as_written(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two examples, written into files, and the commands that need no cluster."""
    monkeypatch.chdir(toolkit.folder)
    monkeypatch.setenv("USER", "ada")  # the page writes $USER; a container may have none
    page = (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    examples = [block["body"] for block in FENCE.finditer(page) if block["language"] == "toml"]
    assert len(examples) == 2
    for text in examples:
        name = text.split()[1]  # "# ourcluster.toml"
        Path(name).write_text(text, encoding="utf-8")
        toolkit.ok("site", "show", f"./{name}")
    ran = 0
    for line in code_lines(page):
        if line.startswith("    toolkit ") and not re.search(r" detect| init| check ", line.partition("#")[0]):
            toolkit.ok(*shlex.split(line, comments=True)[1:])
            ran += 1
    assert ran == 6
    script = toolkit.ok("render", "mpi_hello", "--site", "./ourcluster.toml", "-N", 2, "-A", "myproject")
    for directive in ("--partition=gpu", "--account=myproject", "--gres=gpu:4", "--nodes=2"):
        assert f"#SBATCH {directive}\n" in script
    assert "load_module openmpi/5.0\n" in script and "export HF_HOME=/scratch/hf\n" in script
    assert "#SBATCH --partition=short\n" in toolkit.ok(
        "render", "mpi_hello", "--site", "./short.toml", "-t", 2, "--set", "restart.warn_s=30"
    )
