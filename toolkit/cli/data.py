"""`toolkit data`: make ready what a training reads."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.group()
def data() -> None:
    """Make token files of text, and indexes of JSON lines."""


@data.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The token file.")
@click.option("--tokenizer", default="bytes", metavar="NAME", help="bytes, or module:name of a function [bytes].")
@click.option("--dtype", default="uint16", metavar="TYPE", help="uint16 or uint32 [uint16].")
@click.option("--end-token", type=click.IntRange(min=0), metavar="N", help="A token behind each file [none].")
@click.option(
    "--vocabulary", default=0, type=click.IntRange(0, 2**32 - 1), metavar="N", help="Written into the header."
)
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="N", help="How many tokenise [one a CPU; 1 for bytes]."
)
@click.option("--force", is_flag=True, help="Replace the output if it is there.")
def pack(
    files: tuple[Path, ...], output: Path, tokenizer: str, dtype: str, end_token: int | None, vocabulary: int,
    processes: int | None, force: bool,
) -> None:  # fmt: skip
    """Tokenise text FILES, in their order, into one file that ranks map into memory.

    The file is the same whatever the number of processes, and has its name only when it is whole.

    \b
    toolkit data pack corpus/*.txt -o corpus.tokens
    toolkit data pack corpus/*.txt -o corpus.tokens --tokenizer my_tokens:encode --dtype uint32
    """
    from toolkit.cli.ckpt_print import reading_bar, size
    from toolkit.train.data.pieces import size_of
    from toolkit.train.data.preprocess import Packing, pack
    from toolkit.train.data.tokenizers import BYTES

    total = sum(map(size_of, files))
    packing = Packing(tokenizer, dtype, end_token, vocabulary)
    # Bytes are read as fast as one process writes them.
    processes = processes or (1 if tokenizer == BYTES else len(os.sched_getaffinity(0)))
    with reading_bar("tokenising", total) as advance:
        header = pack(files, output, packing, processes=processes, replace=force, advance=advance)
    click.echo(f"{output}: {header.tokens:,} tokens ({header.dtype}) of {len(files):,} files, {size(total)}")


@data.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), help="Where indexes go [beside each file].")
def index(files: tuple[Path, ...], folder: Path | None) -> None:
    """Find the lines of JSON-lines FILES once, before a thousand ranks would.

    An index that is of today is left as it is. FOLDER is that of data.index_folder.
    """
    from toolkit.train.data.line_index import line_index

    for path in files:
        click.echo(f"{path}: {len(line_index(path, folder).starts):,} records")


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
def show(file: Path) -> None:
    """What a token FILE holds, by its header."""
    from toolkit.errors import ToolkitError
    from toolkit.train.data.token_file import read_header

    header = read_header(file)
    if header is None:
        raise ToolkitError(
            "has no header of a token file", where=str(file), fix="make one: toolkit data pack FILES -o OUT"
        )
    vocabulary = f"{header.vocabulary:,}" if header.vocabulary else "unknown"
    click.echo(f"{header.tokens:,} tokens ({header.dtype}) of {header.texts:,} files, vocabulary {vocabulary}")
    click.echo(f"xxh3_128 {header.digest.hex()}")
