"""`toolkit import`: translate a batch script into a job file."""

from pathlib import Path

import click

from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say


@click.command("import")
@click.argument("script", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Job file to write [stdout].")
def import_script(script: Path, output: Path | None) -> None:
    """Translate SCRIPT, a script for sbatch, into a job file. What has no translation is named on stderr.

    \b
    toolkit import job.sh -o job.toml
    """
    from toolkit.rundir.files import write_text
    from toolkit.submission.import_script import import_script as translate

    if output is not None and output.exists():
        raise ToolkitError("the file exists", where=str(output), fix="choose another name with -o")
    text, notes = translate(script, (output.parent if output is not None else Path()).absolute())
    for note in notes:
        say(note)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text, mode=0o644)
        click.echo(f"wrote {output}")
