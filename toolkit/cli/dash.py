"""`dash` and `report`: runs on a page of a browser."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import click

from toolkit.cli.options import RUN, print_command_option, runs_option
from toolkit.errors import ToolkitError
from toolkit.runs.named_runs import find, folders_of_runs
from toolkit.terminal.progress import given_back

PORT = 8080  # on the user's computer


@click.command()
@click.argument("names", nargs=-1, type=RUN, metavar="[RUN]...")
@runs_option
@print_command_option
@click.option("--socket", "path", type=click.Path(path_type=Path), help="Listen on this unix socket.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on this port of 127.0.0.1, with a token.")
def dash(names: tuple[str, ...], runs: Path | None, path: Path | None, port: int | None) -> None:
    """Show RUN, the comparison of two runs, or all runs on a page of a browser, until Ctrl-C.

    \b
    toolkit dash last
    toolkit dash --port 8080
    """
    if path is not None and port is not None:
        raise ToolkitError("expected --socket or --port, got both", fix="omit one of them")
    try:
        import uvicorn

        from toolkit.observe.server import application
    except ImportError as error:
        raise ToolkitError(f"{error.name} is not installed", fix='pip install "toolkit[dash]"') from error
    from toolkit.observe.sockets import listen, private_folder
    from toolkit.runs.follow.pages import Pages

    chosen = [find(name, runs) for name in names]
    query, token = "&".join(f"run={run.run_id}" for run in chosen), ""
    if port is not None:
        listener = listen(("127.0.0.1", port))
        is_own = bool(chosen) and os.access(chosen[0].whole.secret, os.R_OK)
        token = chosen[0].whole.secret.read_text(encoding="ascii").strip() if is_own else secrets.token_hex(32)
        click.echo(f"http://localhost:{listener.getsockname()[1]}/?token={token}&{query}".rstrip("&"))
    else:
        path = (path or private_folder() / "-".join(["dash", *(run.run_id for run in chosen[:1])])).absolute()
        listener = listen(path)
        click.echo(f"on your computer: ssh -N -L {PORT}:{path} {socket.gethostname()}")
        click.echo(f"in its browser:   http://localhost:{PORT}/?{query}".rstrip("?"))
    app = application(Pages(chosen, () if chosen else folders_of_runs(runs)).look, token)
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    try:
        with given_back(), suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


@click.command()
@click.argument("run", type=RUN, default="last")
@runs_option
@print_command_option
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The HTML file.")
def report(run: str, runs: Path | None, output: Path) -> None:
    """Write the page of RUN to one HTML file, which needs no network.

    \b
    toolkit report last -o report.html
    """
    from toolkit.observe.page import report_page
    from toolkit.observe.view import HEAT
    from toolkit.rundir.files import write_text
    from toolkit.runs.follow.pages import Pages

    directory = find(run, runs)
    page = report_page(Pages([directory]).events(directory.run_id, tuple(HEAT))[0])
    try:
        write_text(output, page)
    except OSError as error:
        raise ToolkitError(f"cannot write: {error.strerror}", where=str(output), fix="choose another file") from error
