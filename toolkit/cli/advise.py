"""`advise`, `stacks` and `trace`: what to change in a run, and what its ranks do at the moment or in some steps."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from toolkit.cli.options import RUN, json_option, print_command_option, runs_option
from toolkit.errors import ToolkitError, counted
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import plain, say


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
@click.option("--apply", "is_applying", is_flag=True, help="Print the command that applies what changes no result.")
def advise(run: str, runs: Path | None, as_json: bool, is_applying: bool) -> None:
    """Advise at most five changes of RUN for its next attempt, and measure what earlier ones have gained.

    \b
    toolkit advise last
    toolkit advise last --apply
    """
    from toolkit.runs.advise import advise_on, measured_gains, record_advice
    from toolkit.runs.status.state import run_status

    directory = find(run, runs)
    found, gains = advise_on(directory), measured_gains(directory)
    try:
        record_advice(directory, found, is_applying=is_applying)
    except OSError as error:  # of another user, or on a full disk
        say(f"cannot record this advice: {error}")
    if as_json:
        rows = [{"priority": number, **asdict(one)} for number, one in enumerate(found, start=1)]
        click.echo(json.dumps({"advice": rows, "measured": gains}, indent=1))
        return
    flags = []
    for number, one in enumerate(found, start=1):
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in one.evidence.items())
        gain = f"{100 * one.gain:.0f} % of the time = {one.formula}" if one.gain else "no time, or unknown"
        click.echo(plain(f"{number}. {one.line}"))
        click.echo(plain(f"   evidence: {f'{numbers} ({one.source})' if numbers else one.source}"))
        click.echo(f"   expected gain: {gain}; effort: {one.effort}")
        if one.is_neutral:
            flags += [f"--set {setting}" for setting in one.settings]
            click.echo(f"   setting that changes no result: {' '.join(flags[-len(one.settings) :])}")
    for row in gains:
        since = f"{' '.join(row['settings'])} since attempt {row['attempt']}"
        click.echo(f"{since}: predicted {100 * row['predicted']:.0f} %, {row['outcome']}")
    if not found:
        click.echo("nothing to change, according to these figures")
    elif is_applying and flags:
        name, is_over = directory.run_id, run_status(directory).state.final
        first = "" if is_over else f"toolkit stop {name} && toolkit wait {name}; "
        click.echo(f"{first}toolkit resume {name} {' '.join(flags)}")
    elif is_applying:
        say("no change has a setting that changes no result")


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@json_option
@print_command_option
@click.option("--rank", type=click.IntRange(0), help="Show only this rank.")
def stacks(run: str, runs: Path | None, as_json: bool, rank: int | None) -> None:
    """Show what the ranks of a running RUN do: their Python stacks, grouped, and collectives in which they differ.

    \b
    toolkit stacks last
    toolkit stacks last --rank 3
    """
    from toolkit.metrics.verdicts import VerdictKind
    from toolkit.rundir.attempt_records import StartRecord
    from toolkit.runs.requests.control import request_stacks
    from toolkit.runs.verdicts import raised_verdicts
    from toolkit.slurm.array import write_array
    from toolkit.supervise.stacks import NO_STACKS, culprit_of, differing_collectives, main_thread, ranks_by

    directory = find(run, runs)
    attempt = request_stacks(directory)
    begun, differing = StartRecord.read(attempt), differing_collectives(attempt)
    ranks = range(begun.ranks if begun else 0)
    if rank is not None and rank not in ranks:
        raise ToolkitError(
            f"expected a rank below {len(ranks)}, got {rank}", where="--rank", fix="choose a smaller one"
        )
    groups = ranks_by(main_thread, attempt, ranks if rank is None else [rank])
    if as_json:
        rows = [{"ranks": members, "stack": text.splitlines()} for text, members in groups.items()]
        click.echo(json.dumps({"stacks": rows, "collectives": differing}, indent=1))
        return
    found = culprit_of(attempt, ranks)
    is_stalled = any(one.kind is VerdictKind.STALL for one in raised_verdicts(directory))
    # In a run that makes steps, a rank may well compute while the others wait for it.
    if found.sentence == NO_STACKS or (found.ranks and (is_stalled or found.cause != "elsewhere")):
        click.echo(plain(found.sentence))
    for text, members in groups.items():
        click.echo(f"rank{'s' * (len(members) > 1)} {write_array(members).replace(',', ', ')}:")
        click.echo("\n".join(f"  {plain(line)}" for line in text.splitlines()))
    for line in differing:
        click.echo(plain(line))


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write, for Perfetto.")
@click.option("--kernels", type=click.IntRange(1, 100), metavar="STEPS", help="Record the kernels of the next steps.")
def trace(run: str, runs: Path | None, output: Path, kernels: int | None) -> None:
    """Merge the profiled steps and kernels of all ranks of RUN, with aligned clocks, into one file for Perfetto.

    \b
    toolkit trace last -o trace.json
    toolkit trace last -o trace.json --kernels 3
    """
    from toolkit.rundir.files import write_text
    from toolkit.runs.trace import request_kernels, trace_of

    directory = find(run, runs)
    if not output.parent.is_dir():
        raise ToolkitError("folder not found", where=str(output.parent), fix="choose a file in an existing folder")
    if kernels is not None:
        request_kernels(directory, kernels)
    merged = trace_of(directory)
    write_text(output, json.dumps(merged, allow_nan=False))
    clocks = merged["otherData"]["clocks"].values()
    within_ms = 1e3 * max((one["uncertainty_s"] for one in clocks), default=0.0)
    events = f"{len(merged['traceEvents']):,} events"
    click.echo(f"{output}: {events}, clocks of {counted(len(clocks), 'host')} aligned within {within_ms:.1f} ms")
