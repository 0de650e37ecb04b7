"""`toolkit jobs`: list and copy the jobs that come with the package."""

import json
import shutil
from itertools import takewhile
from pathlib import Path

import click

from toolkit.cli.options import SHIPPED_JOB, json_option


@click.group()
def jobs() -> None:
    """List the jobs that come with the package, or copy one to change it.

    \b
    toolkit jobs list
    """


@jobs.command("list")
@json_option
def list_jobs(as_json: bool) -> None:
    """List the shipped jobs, each with its summary.

    \b
    toolkit jobs list
    """
    from toolkit.config.shipped import shipped_jobs

    summaries = {name: _first_sentence(path) for name, path in shipped_jobs().items()}
    if as_json:
        click.echo(json.dumps([{"name": name, "says": says} for name, says in summaries.items()], indent=1))
        return
    width = max(16, *map(len, summaries))
    for name, summary in summaries.items():
        click.echo(f"{name:<{width}} {summary}")


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a job file; a decimal point does not end a sentence."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.lstrip("# ").rstrip() for line in lines)
    return comment.partition(". ")[0].rstrip(".")


@jobs.command("copy")
@click.argument("name", type=SHIPPED_JOB)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def copy_job(name: str, folder: Path) -> None:
    """Copy the job NAME, its file and its program, into FOLDER.

    \b
    toolkit jobs copy train_lm .
    """
    from toolkit.config.shipped import shipped_jobs
    from toolkit.config.table import nearest
    from toolkit.errors import NotFoundError, ToolkitError

    known = shipped_jobs()
    if name not in known:
        near = nearest(name, known)
        raise NotFoundError(
            f"no shipped job {name!r}", fix=f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot create the folder: {error.strerror}"
        raise ToolkitError(message, where=str(folder), fix="choose another folder") from error
    sources = [path for path in (known[name], known[name].with_suffix(".py")) if path.exists()]
    for source in sources:
        if (folder / source.name).exists():
            raise ToolkitError(
                "the file already exists", where=str(folder / source.name), fix="remove it, or choose another folder"
            )
    for source in sources:
        shutil.copyfile(source, folder / source.name)
        click.echo(folder / source.name)
