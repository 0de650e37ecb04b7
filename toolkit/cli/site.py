"""`toolkit site`: list, show, detect, create and check site files; score partitions; list bad nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.options import (
    JOB,
    PARTITION,
    SITE,
    job_options,
    json_option,
    print_command_option,
    request_of,
    runs_option,
)
from toolkit.runs.named_runs import site_runs
from toolkit.terminal.talk import print_table, say

if TYPE_CHECKING:
    from toolkit.site.partitions import Candidate
    from toolkit.site.proof import Proof


@click.group()
def site() -> None:
    """Manage site files: list, show, detect, init, check, partitions, bad-nodes.

    \b
    toolkit site detect
    """


@site.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_command(as_json: bool) -> None:
    """List every site file: name, scheduler, result of its last check, documentation.

    An invalid file is reported on stderr, and the exit code is 1.

    \b
    toolkit site list
    """
    from toolkit.errors import CHECK_FAILED
    from toolkit.site.load import list_sites
    from toolkit.site.proof import checked_in_words

    sites, wrong = list_sites()
    rows = [
        {"name": one.name, "kind": one.scheduler.kind, "checked": checked_in_words(one), "docs": one.docs}
        for one in sites
    ]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        print_table(
            ("NAME", "SCHEDULER", "CHECKED", "DOCS"), [tuple(row.values()) for row in rows],
            shed=("DOCS", "SCHEDULER"),
        )  # fmt: skip
    for error in wrong:
        say(str(error))
    if wrong:
        raise click.exceptions.Exit(CHECK_FAILED)


@site.command()
@click.argument("name", type=SITE)
@click.option("--json", "as_json", is_flag=True, help="Print the site as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show the site NAME, or the site file at that path, merged with the sites that it extends.

    \b
    toolkit site show local
    """
    from toolkit.cli.config import print_values
    from toolkit.site.load import load_site

    loaded = load_site(name)
    if as_json:
        click.echo(loaded.model_dump_json(by_alias=True))
    else:
        print_values(loaded.values(), loaded.origins, with_origin=True)


@site.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@print_command_option
def detect(as_json: bool) -> None:
    """Print the site of this machine, and how it was recognized.

    \b
    toolkit site detect
    """
    from toolkit.site.load import detect_site

    found = detect_site()
    if as_json:
        click.echo(json.dumps({"site": found.site.name, "reason": found.reason}))
    else:
        click.echo(f"{found.site.name}: {found.reason}")


@site.command()
@click.option("--name", default="", help="Name of the site [name of -o, else ClusterName].")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File [~/.config/toolkit/sites/NAME.toml].")
@click.option("--print", "to_stdout", is_flag=True, help="Print the file instead of writing it.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@print_command_option
def init(name: str, output: Path | None, to_stdout: bool, force: bool) -> None:
    """Write a site file from the live cluster: facts with the command that reported them, guesses with a way to verify them.

    \b
    toolkit site init
    toolkit site init --name ours --print
    """
    from toolkit.errors import ToolkitError
    from toolkit.site.init import init_site, path_of, write_site

    if output is not None and output.suffix != ".toml":
        raise ToolkitError(f"expected a .toml file, got {output.name!r}", where="-o", fix=f"-o {output}.toml")
    if output is not None and name and output.stem != name:
        raise ToolkitError(
            f"expected the file name {name}.toml, got {output.name!r}",
            where=str(output),
            fix=f"-o {output.with_stem(name)}",
        )
    chosen, text = init_site(name or (output.stem if output else ""))
    if to_stdout:
        click.echo(text, nl=False)
        return
    path = output or path_of(chosen)
    write_site(text, path, force=force)
    guesses = text.count("# guess: ")
    click.echo(f"{path}: verify {guesses} guesses, then run `toolkit site check {output or chosen}`")


@site.command()
@click.argument("name", type=SITE, required=False)
@click.option(
    "--partition",
    "partitions",
    type=PARTITION,
    multiple=True,
    metavar="NAME",
    help="Check only this partition; may be repeated.",
)
@click.option("-A", "--account", default="", help="Account to charge.")
@click.option("-t", "--time", default="", metavar="TIME", help="Walltime of the probes, in Slurm's format [1 minute].")
@click.option("--wait", "wait_s", type=float, default=600.0, show_default=True, help="Seconds to wait for the probes.")
@runs_option
@json_option
@print_command_option
def check(
    name: str | None, partitions: tuple[str, ...], account: str, time: str, wait_s: float, runs: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Check the site NAME, by default this one: a one-minute job on two nodes of each partition reports what it finds.

    The result is stored next to the site file, and `toolkit site list` shows it. The exit code is 1 if a check failed.

    \b
    toolkit site check
    toolkit site check ours --partition gpu -A myproject
    """
    from dataclasses import asdict

    from toolkit.errors import CHECK_FAILED
    from toolkit.site.load import choose_site
    from toolkit.site.proof import save_proof
    from toolkit.upkeep.site_check import Wanted, check_site

    wanted = Wanted(partitions=partitions, account=account, time=time, runs=runs, wait_s=wait_s)
    proof = check_site(choose_site(name).site, wanted, lambda message: click.echo(message, err=True))
    if as_json:
        click.echo(json.dumps(asdict(proof)))
    else:
        _print_proof(proof)
    path = save_proof(proof)
    click.echo(f"result stored in {path}" if path else "no probe ran; nothing was checked", err=True)
    if proof.failed:
        raise click.exceptions.Exit(CHECK_FAILED)


def _print_proof(proof: Proof) -> None:
    print_table(
        ("PARTITION", "CHECK", "STATE", "DETAIL"),
        [
            (name, found.check, found.state, found.detail)
            for name, findings in proof.partitions.items()
            for found in findings
        ],
        shed=("DETAIL",),
    )
    for name, findings in proof.partitions.items():
        for found in findings:
            if found.fix:
                click.echo(f"fix {name}, {found.check}: {found.fix}")


@site.command("partitions")
@click.argument("job", type=JOB)
@click.option("--site", "site_name", type=SITE, metavar="NAME", help="Site name or file [TOOLKIT_SITE, detected].")
@job_options
@json_option
@print_command_option
def partitions_command(
    job: str, site_name: str | None, settings: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Score the partitions for JOB, best first, by waste, idle nodes and limits; report why the others were not chosen.

    `-p auto` uses the best partition; so does a job without a partition on a site without a default partition.

    \b
    toolkit site partitions train_lm -N 4 -t 2:00:00
    """
    from dataclasses import asdict

    from toolkit.site.load import choose_site
    from toolkit.site.partitions import candidates

    request = request_of(job, values, settings=settings)
    ranked, silence = candidates(request, choose_site(site_name).site)
    if as_json:
        click.echo(json.dumps([asdict(one) | {"behind": _behind(one, ranked)} for one in ranked]))
    else:
        rows = [(one.name, _verdict(one, ranked), _why(one, ranked)) for one in ranked]
        print_table(("PARTITION", "SERVES", "REASON"), rows)
    if silence:
        say(silence)


def _verdict(one: Candidate, ranked: list[Candidate]) -> str:
    if one.refused:
        return "cannot"
    return "best" if one is ranked[0] else "can"


def _behind(one: Candidate, ranked: list[Candidate]) -> str:
    return "" if one.refused or one is ranked[0] else one.why_not_best(ranked[0])


def _why(one: Candidate, ranked: list[Candidate]) -> str:
    """Return why the partition was not chosen, then the components of its score."""
    return one.refused or "; ".join(filter(None, (_behind(one, ranked), one.in_words())))


@site.command("bad-nodes")
@runs_option
@click.option(
    "--clear", "node", metavar="NODE", help="Remove this node from the list, so that jobs may run on it again."
)
@json_option
def bad_nodes_command(runs: Path | None, node: str | None, as_json: bool) -> None:
    """List the nodes that submissions exclude: they failed a check or a run within the last day.

    \b
    toolkit site bad-nodes
    toolkit site bad-nodes --clear node3
    """
    from dataclasses import asdict

    from toolkit.errors import NotFoundError
    from toolkit.rundir.bad_nodes import bad_nodes, forget_bad_node, sites_with_bad_nodes
    from toolkit.submission.script import describe

    folder = site_runs(runs)
    sites = sites_with_bad_nodes(folder)
    if node is not None:
        forgotten = [forget_bad_node(folder, name, node) for name in sites]
        if not any(forgotten):
            raise NotFoundError(
                f"node {node} is not excluded",
                where=str(folder),
                fix="`toolkit site bad-nodes` lists the excluded nodes",
            )
        return
    found = [(name, bad) for name in sites for bad in bad_nodes(folder, name)]
    if as_json:
        click.echo(json.dumps([{"site": name, **asdict(bad)} for name, bad in found]))
    else:
        for name, bad in found:
            click.echo(f"{name}: {describe(bad)}")
