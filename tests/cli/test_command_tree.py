"""What every command has: an example in its help, --json where it reads, --print-cmd where it calls Slurm."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from toolkit.cli.main import cli
from toolkit.cli.options import Named


def of(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


# Commands without --json, and why.
NO_JSON = {
    **of(
        "submit run resume rerun cancel stop save requeue session-start session-exec session-attach session-notebook "
        "session-stop alerts-ack alerts-silence alerts-unsilence alerts-test alerts-send import trace jobs-copy site-init topo-plot ckpt-index ckpt-export ckpt-import data-pack data-index "
        "metrics-serve metrics-push metrics-export metrics-send dash report",
        "does something; what it prints is a line about it",
    ),
    **of(
        "devcluster-up devcluster-down devcluster-exec devcluster-shape devcluster-fail devcluster-restore",
        "does something to the cluster",
    ),
    "render": "prints a script",
    "logs": "prints a log as it is",
    "wait": "its exit code is the answer",
    "config-schema": "prints JSON in any case",
    "completion": "prints a script",
    **of("metrics-dashboard metrics-rules", "prints a file"),
}
# Commands without --print-cmd, and why.
NO_SLURM = {
    **of(
        "alerts-list alerts-history alerts-stats alerts-ack alerts-silence alerts-unsilence alerts-test alerts-send alerts-check "
        "import jobs-list jobs-copy site-list site-show site-bad-nodes config-schema parse data-pack data-index data-show",
        "reads files of its own",
    ),
    **of("topo-show topo-check topo-groups topo-plot", "reads this node, or files"),
    **of("ckpt-ls ckpt-show ckpt-verify ckpt-diff ckpt-index ckpt-export ckpt-import", "reads checkpoints alone"),
    **of(
        "devcluster-up devcluster-down devcluster-status devcluster-exec devcluster-shape devcluster-fail "
        "devcluster-restore",
        "is Slurm's administrator: its commands are those of the daemons",
    ),
    **of("metrics-dashboard metrics-rules", "prints a file"),
    "completion": "prints a script; what TAB asks Slurm stays unsaid amid a line",
    **of(
        "bench-batch bench-collectives bench-memory bench-step",
        "runs a job here; the log of the run contains its supervisor's srun",
    ),
}


# A command keeps the help options that it has when it is first asked: other tests see what is made here.
ROOT = click.Context(cli, info_name="toolkit", **cli.context_settings)


def commands() -> Iterator[tuple[str, click.Command]]:
    def walk(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
        context = click.Context(group, ROOT)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield "-".join((*path, name)), command
            if isinstance(command, click.Group):
                yield from walk(command, (*path, name))

    yield "", cli
    yield from walk(cli, ())


COMMANDS = dict(commands())
LEAVES = {name: command for name, command in COMMANDS.items() if not isinstance(command, click.Group)}


def has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


@pytest.mark.parametrize(("option", "without"), [("--json", NO_JSON), ("--print-cmd", NO_SLURM)])
def test_every_command_has_the_option_or_a_reason(option: str, without: dict[str, str]) -> None:
    assert {name for name, command in LEAVES.items() if not has(command, option)} == set(without)


def examples_of(command: click.Command) -> list[str]:
    return re.findall(
        r"^ *(?:\w.*\| |eval \"\$\(|salloc .* |mpirun .* )?toolkit (.*?)\)?\"?$", command.help or "", re.MULTILINE
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_that_parses(name: str) -> None:
    examples = examples_of(COMMANDS[name])
    begins = name.replace("-", " ") if name in LEAVES and name != "site-bad-nodes" else ""
    assert any(example.startswith(begins) for example in examples), "no example"
    for example in examples:
        argv = shlex.split(re.split(r" (?:\||>|&&) |; ", example)[0])
        command: click.Command = cli
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command, ROOT), argv.pop(0))
            assert found is not None, example
            command = found
        command.make_context(command.name, argv, parent=ROOT)


@pytest.mark.parametrize("name", LEAVES)
def test_a_shell_completes_every_run_and_job(name: str) -> None:
    named = [one for one in LEAVES[name].params if isinstance(one, click.Argument) and one.name in ("run", "job")]
    assert all(isinstance(one.type, Named) for one in named)


def test_json_is_all_that_stdout_has(toolkit) -> None:
    """One document, of each reading command that needs neither Slurm nor a checkpoint."""
    job = toolkit.job("true")
    run = toolkit.submit(job, "--wait")
    (toolkit.folder / "hosts").write_text("node[1-2]\n")
    for line in (
        "status", "status last last", "history", "history --tree", "explain", "efficiency", "diff last last", "gc --dry-run",
        "preflight JOB", "jobs list", "site list", "site show local", "site detect", "site bad-nodes",
        "session ls", "config show", "config show JOB", "parse hostlist HOSTS", "topo show",
    ):  # fmt: skip
        words = [{"JOB": str(job), "HOSTS": str(toolkit.folder / "hosts")}.get(word, word) for word in line.split()]
        said = toolkit(*words, "--json")
        assert said.code == 0, (line, said)
        assert isinstance(json.loads(said.out), dict | list), line
    assert json.loads(toolkit.ok("status", "last", "--json"))["run_id"] == run.run_id
