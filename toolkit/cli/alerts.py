"""`alerts`: the alerts of a run, and what to do about them."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from toolkit.cli.options import JOB, RUN, Command, json_option, runs_option
from toolkit.config.request import JobRequest, resolve
from toolkit.metrics.alert_rules import rules_of
from toolkit.metrics.alerts import Alert
from toolkit.metrics.verdicts import Severity
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.alerts import all_alerts, latest_alerts, quiet, require_rule, runs_to_send, send_alerts
from toolkit.runs.named_runs import find, folders_of_runs
from toolkit.supervise.channels import post
from toolkit.terminal.ages import Age, Moment
from toolkit.terminal.talk import print_table


class ListByDefault(click.Group):
    """A group whose command `list` may be omitted."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_named = bool(args) and args[0] in (*self.commands, *ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else ["list", *args])


@click.group(cls=ListByDefault)
def alerts() -> None:
    """Show, silence and send the alerts of a run; `list` may be omitted.

    \b
    toolkit alerts list last
    toolkit alerts silence slow last --for 2h
    """


def _lists(function: Command) -> Command:
    return click.argument("run", type=RUN, default="last")(runs_option(json_option(function)))


def _quiets(function: Command) -> Command:
    comment = click.option("--comment", default="", help="The reason.")
    return click.argument("rule")(click.argument("run", type=RUN, default="last")(runs_option(comment(function))))


def _print(rows: Sequence[dict[str, Any]], columns: str, as_json: bool, otherwise: str) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif rows:
        print_table(columns.upper().split(), [[row[name] for name in columns.split()] for row in rows])
    else:
        click.echo(otherwise)


@alerts.command("list")
@_lists
def list_alerts(run: str, runs: Path | None, as_json: bool) -> None:
    """Show the state of each rule of RUN.

    \b
    toolkit alerts list last --json
    """
    directory = find(run, runs)
    parts = [part for part in directory.with_tasks() if part.last_attempt()] or [directory]
    rows = [{"run": part.run_id, **asdict(one)} for part in parts for one in latest_alerts(part).values()]
    _print(rows, "run rule state severity time hidden_by message", as_json, "the job has no table [alerts.rules.NAME]")


@alerts.command()
@_lists
@click.option("--rule", help="Only this rule.")
@click.option("--severity", type=click.Choice([one.value for one in Severity]), help="Only this severity.")
@click.option("--since", type=Moment(), metavar="AGE", help="Only changes since an age (2h) or a date.")
def history(
    run: str, runs: Path | None, as_json: bool, rule: str | None, severity: str | None, since: datetime | None
) -> None:
    """Show the changes of the alerts of RUN, oldest first.

    \b
    toolkit alerts history last --severity critical --since 2h
    """
    changes = _changes(run, runs)
    if rule is not None:  # one that the job no longer has may have changes
        directory = find(run, runs)
        require_rule(directory, rule, {*latest_alerts(directory), *(one.rule for _, one in changes)})
    rows = [
        {"run": part.run_id, **asdict(one)}
        for part, one in changes
        if rule in (None, one.rule) and severity in (None, one.severity)
        if since is None or datetime.fromisoformat(one.time) >= since
    ]
    _print(rows, "time run rule state severity hidden_by action message", as_json, "no alert has changed")


@alerts.command()
@_lists
def stats(run: str, runs: Path | None, as_json: bool) -> None:
    """Count the alerts of RUN by rule and severity.

    \b
    toolkit alerts stats last
    """
    found = {(part, one.key): one for part, one in _changes(run, runs) if one.state == "firing"}
    counts = Counter((one.rule, one.severity) for one in found.values()).most_common()
    rows = [{"rule": rule, "severity": severity, "count": count} for (rule, severity), count in counts]
    _print(rows, "rule severity count", as_json, "no alert has fired")


def _changes(run: str, runs: Path | None) -> list[tuple[RunDirectory, Alert]]:
    return [(part, one) for part in find(run, runs).with_tasks() for one in all_alerts(part)]


def _quiet(rule: str, run: str, runs: Path | None, comment: str, age: timedelta | None = None) -> None:
    directory, until_s = find(run, runs, changes=True), None if age is None else time.time() + age.total_seconds()
    quiet(directory, rule, until_s, comment)
    done = "acknowledged" if until_s is None else f"silenced until {datetime.fromtimestamp(until_s):%Y-%m-%d %H:%M}"
    click.echo(f"run {directory.run_id}, rule {rule}: {done}")


@alerts.command()
@_quiets
def ack(**names: Any) -> None:
    """Acknowledge the firing alert of RULE.

    \b
    toolkit alerts ack slow last
    """
    _quiet(**names)


@alerts.command()
@_quiets
@click.option("--for", "age", type=Age(), required=True, metavar="AGE", help="How long, such as 30m or 2h.")
def silence(**names: Any) -> None:
    """Notify no channel of alerts of RULE for a time.

    \b
    toolkit alerts silence slow last --for 2h --comment known
    """
    _quiet(**names)


@alerts.command()
@_quiets
def unsilence(**names: Any) -> None:
    """End the silence of RULE.

    \b
    toolkit alerts unsilence slow last
    """
    _quiet(**names, age=timedelta(0))


@alerts.command()
@click.argument("channel")
@click.argument("job", type=JOB)
def test(channel: str, job: str) -> None:
    """Send a test message to CHANNEL of a job file.

    \b
    toolkit alerts test team train_lm.toml
    """
    notify = resolve(JobRequest(job), None).notify.model_dump(mode="json")
    post(channel, {"text": "a test message of toolkit", "event": "test", "run_id": "test"}, notify, os.environ)
    click.echo(f"{channel} accepted a test message")


@alerts.command()
@click.argument("run", type=RUN, nargs=-1)
@runs_option
def send(run: tuple[str, ...], runs: Path | None) -> None:
    """Send the notifications that wait in the outbox of each RUN, by default of all runs.

    The exit code is 1 if some still wait.

    \b
    toolkit alerts send
    """
    named = [part for name in run for part in find(name, runs).with_tasks()]
    found = [send_alerts(one) for one in (named if run else runs_to_send(folders_of_runs(runs)))]
    sent, waiting = (sum(one[of] for one in found) for of in (0, 1))
    click.echo(f"sent: {sent}, waiting: {waiting}")
    if waiting:
        sys.exit(1)


@alerts.command()
@click.argument("job", type=JOB)
@json_option
def check(job: str, as_json: bool) -> None:
    """Check and print the rules of a job file.

    \b
    toolkit alerts check train_lm.toml
    """
    rules = rules_of(resolve(JobRequest(job), None).model_dump(mode="json", by_alias=True))
    rows = [asdict(one) | {"condition": one.condition._asdict(), "notifies": ", ".join(one.channels)} for one in rules]
    _print(rows, "name when for_s severity notifies action", as_json, "no table [alerts.rules.NAME]")
