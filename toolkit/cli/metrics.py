"""`toolkit metrics`: the metrics of runs for Prometheus, Grafana and other programs."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import click

from toolkit.cli.options import RUN, print_command_option, runs_option
from toolkit.errors import ToolkitError
from toolkit.runs.named_runs import find
from toolkit.terminal.talk import say

_PATH = click.Path(path_type=Path)
_RANKS = {"worst": 16, "all": sys.maxsize}


@click.group()
def metrics() -> None:
    """Provide the metrics of runs to other programs: serve, push, export, send, dashboard, rules.

    \b
    toolkit metrics serve last
    """


@metrics.command()
@click.argument("run", type=RUN, nargs=-1, required=True)
@runs_option
@print_command_option
@click.option("--socket", type=_PATH, help="Unix socket [in XDG_RUNTIME_DIR or /tmp/toolkit-UID].")
@click.option("--listen", default="", metavar="ADDRESS:PORT", help="TCP address; requires the secret of RUN as token.")
@click.option("--ranks", type=click.Choice(list(_RANKS)), default="worst", help="Ranks to show [worst: 16 by work].")
@click.option("--sd-file", type=_PATH, help="With --listen: write a target for Prometheus into this .json file.")
def serve(run: tuple[str, ...], runs: Path | None, socket: Path | None, listen: str, ranks: str, sd_file: Path) -> None:
    """Serve the metrics of RUNs to Prometheus, until Ctrl-C. The token is that of the first RUN.

    \b
    toolkit metrics serve last
    toolkit metrics serve last --listen 127.0.0.1:9464 --sd-file targets/last.json
    """
    from toolkit.observe.exporter import MetricsServer
    from toolkit.observe.sockets import private_folder
    from toolkit.supervise.secrets import read_secret_file

    found = [find(one, runs) for one in run]
    (host, _, port), secret = listen.rpartition(":"), found[0].secret
    if (socket if listen else sd_file) or (listen and not (host and port.isdigit() and int(port) < 65536)):
        raise click.UsageError("expected --socket PATH, or --listen ADDRESS:PORT with or without --sd-file PATH")
    token = read_secret_file(str(secret), where="--listen") if listen else ""
    address = (host, int(port)) if listen else socket or private_folder() / f"{found[0].run_id}.sock"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    with MetricsServer(address, found, _RANKS[ranks], token, sd_file) as server:
        say(f"serving {server.target}{listen and f'; the token is in {secret}'}")
        server.serve_forever()


@metrics.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
@click.option("--gateway", metavar="URL", required=True, help="URL of the Pushgateway.")
@click.option("--delete", "is_deletion", is_flag=True, help="Delete the group of the job and site instead.")
def push(run: str, runs: Path | None, gateway: str, is_deletion: bool) -> None:
    """Push the result of RUN, which has ended, to a Prometheus Pushgateway.

    \b
    toolkit metrics push last --gateway http://localhost:9091
    """
    from toolkit.runs.outputs import push_end

    click.echo(push_end(find(run, runs), gateway, is_deletion=is_deletion))


@metrics.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
@click.option("--csv", type=click.File("w"), help="Write CSV; - is stdout.")
@click.option(
    "--what", type=click.Choice(["training", "windows", "verdicts"]), default="training", help="For --csv [training]."
)
@click.option("--tensorboard", type=_PATH, metavar="FOLDER", help="Write event files of TensorBoard.")
@click.option("--otlp", metavar="URL|FILE", help="Send spans to an OpenTelemetry collector, or write them as JSON.")
def export(run: str, runs: Path | None, csv: TextIO | None, what: str, tensorboard: Path | None, otlp: str) -> None:
    """Export the records of RUN as CSV, events of TensorBoard, or spans of OpenTelemetry.

    \b
    toolkit metrics export last --csv steps.csv
    toolkit metrics export last --tensorboard tb --otlp http://localhost:4318
    """
    from toolkit.runs.outputs import write_csv, write_events
    from toolkit.runs.spans import export_spans

    if not (csv or tensorboard or otlp):
        raise click.UsageError("expected --csv, --tensorboard or --otlp")
    found = find(run, runs)
    if csv:
        write_csv(found, what, csv)
    if tensorboard:
        write_events(found, tensorboard)
    if otlp:
        to = otlp if otlp.startswith(("http://", "https://")) else click.File("w")(otlp)
        say(f"exported {export_spans(found, to)} spans")


@metrics.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
@click.option(
    "--tracker",
    multiple=True,
    type=click.Choice(["wandb", "mlflow", "tensorboard"]),
    help="Tracker [those of the job].",
)
def send(run: str, runs: Path | None, tracker: tuple[str, ...]) -> None:
    """Send the metrics of RUN that its trackers have not received.

    \b
    toolkit metrics send last --tracker tensorboard
    """
    from toolkit.runs.compare import job_of
    from toolkit.runs.status.state import run_status
    from toolkit.supervise.secrets import read_reference
    from toolkit.trackers.sender import send_metrics

    for one in find(run, runs).with_tasks():
        job, status = job_of(one).model_dump(mode="json"), run_status(one)
        own = job["observe"]["trackers"]
        if not (names := tracker or own):
            raise click.UsageError("expected --tracker, since the job has no observe.trackers")
        if not status.state.final and (active := sorted({*names} & {*own})):
            raise ToolkitError(
                f"the run is {status.state}, and sends its metrics to {active[0]} itself",
                where=status.run_id, fix="wait for its end: `toolkit wait`",
            )  # fmt: skip
        for variable, value in job["env"]["vars"].items():  # those of this shell override them
            os.environ.setdefault(variable, str(value))
        for variable, reference in job["env"]["secrets"].items():
            if reference.startswith("file:") and variable not in os.environ:
                os.environ[variable] = read_reference(reference, os.environ, f"env.secrets.{variable}")
        state = status.state.value
        codes = [send_metrics(one, job, name, iter([state]), is_live=False) for name in names]
        if any(codes):
            sys.exit(max(codes))


@metrics.command()
def dashboard() -> None:
    """Print the shipped dashboard for Grafana.

    \b
    toolkit metrics dashboard > dashboard.json
    """
    from toolkit.observe.dashboard import dashboard as shipped

    click.echo(json.dumps(shipped(), indent=1))


@metrics.command()
def rules() -> None:
    """Print the shipped alert rules for Prometheus.

    \b
    toolkit metrics rules > rules.yml
    """
    from toolkit.observe.series import data_file

    click.echo(data_file("rules.yml"), nl=False)
