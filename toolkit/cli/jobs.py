"""`jobs list` and `jobs copy`: the jobs that come with the package."""

from __future__ import annotations

import json
import shutil
from itertools import takewhile
from pathlib import Path

import click

from toolkit.cli.options import json_option
from toolkit.cli.param_types import SHIPPED_JOB


@click.group()
def jobs() -> None:
    """Jobs that come with the package: list them, copy one to make it yours.

    \b
    toolkit jobs list
    """


@jobs.command("list")
@json_option
def list_jobs(as_json: bool) -> None:
    """Shipped jobs, with the first sentence of what each says of itself.

    \b
    toolkit jobs list
    """
    from toolkit.config.shipped import shipped_jobs

    told = {name: _first_sentence(path) for name, path in shipped_jobs().items()}
    if as_json:
        click.echo(json.dumps([{"name": name, "says": says} for name, says in told.items()], indent=1))
        return
    width = max(16, *map(len, told))
    for name, says in told.items():
        click.echo(f"{name:<{width}} {says}")


def _first_sentence(path: Path) -> str:
    """Of the comment at the top, over its lines; a number's point ends no sentence."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    said = " ".join(line.lstrip("# ").rstrip() for line in lines)
    return said.partition(". ")[0].rstrip(".")


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
            f"no shipped job {name!r}", fix=f"write {near[0]}" if near else f"one of {', '.join(known)}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"cannot make the folder: {error.strerror}"
        raise ToolkitError(said, where=str(folder), fix="name another folder") from error
    sources = [path for path in (known[name], known[name].with_suffix(".py")) if path.exists()]
    for source in sources:
        if (folder / source.name).exists():
            raise ToolkitError(
                "the file is there already", where=str(folder / source.name), fix="remove it, or name another folder"
            )
    for source in sources:
        shutil.copyfile(source, folder / source.name)
        click.echo(folder / source.name)
