"""`toolkit data`: prepare the files that a training job reads."""

import json
import os
from pathlib import Path

import click

from toolkit.cli.options import json_option
from toolkit.terminal.talk import say

_UNKNOWN_VOCABULARY = (
    "the file does not state its vocabulary size, which train_lm needs. Fix: pack the file again with --vocabulary N, "
    "the number of tokens of the tokenizer"
)


@click.group()
def data() -> None:
    """Pack texts into token files, and index JSON lines.

    \b
    toolkit data pack corpus/*.txt -o corpus.tokens
    """


@data.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The token file.")
@click.option("--tokenizer", default="bytes", metavar="NAME", help="Tokenizer: bytes, or module:function [bytes].")
@click.option("--dtype", default="uint16", metavar="TYPE", help="Type of a token: uint16 or uint32 [uint16].")
@click.option("--end-token", type=click.IntRange(min=0), metavar="N", help="Token to append to each file [none].")
@click.option(
    "--vocabulary",
    default=0,
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="Vocabulary size, stored in the header.",
)
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="N", help="Processes that tokenise [one per CPU; 1 for bytes]."
)
@click.option("--force", is_flag=True, help="Overwrite an existing output.")
def pack(
    files: tuple[Path, ...], output: Path, tokenizer: str, dtype: str, end_token: int | None, vocabulary: int,
    processes: int | None, force: bool,
) -> None:  # fmt: skip
    """Tokenise FILES, in the given order, into one file that ranks map into memory.

    The result does not depend on the number of processes. The file gets its name only when it is complete.

    \b
    toolkit data pack corpus/*.txt -o corpus.tokens
    toolkit data pack corpus/*.txt -o corpus.tokens --tokenizer my_tokens:encode --dtype uint32
    """
    from toolkit.cli.ckpt_print import reading_bar, size
    from toolkit.errors import counted
    from toolkit.train.data.pieces import size_of
    from toolkit.train.data.preprocess import Packing, pack
    from toolkit.train.data.tokenizers import BYTES

    total = sum(map(size_of, files))
    packing = Packing(tokenizer, dtype, end_token, vocabulary)
    # For bytes, which need no tokenizer, one process is as fast as the disk.
    processes = processes or (1 if tokenizer == BYTES else len(os.sched_getaffinity(0)))
    with reading_bar("tokenising", total) as advance:
        header = pack(files, output, packing, processes=processes, replace=force, advance=advance)
    of_files = f"{counted(header.tokens, 'token')} ({header.dtype}) of {counted(header.texts, 'file')}"
    click.echo(f"{output}: {of_files}, {size(output.stat().st_size)}")
    if not header.vocabulary:
        say(_UNKNOWN_VOCABULARY)


@data.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of the indexes [next to each file].")
def index(files: tuple[Path, ...], folder: Path | None) -> None:
    """Index the lines of JSON-lines FILES once, so that no rank has to do it.

    An index that is up to date is kept. FOLDER is the value of data.index_folder.

    \b
    toolkit data index corpus/*.jsonl
    """
    from toolkit.errors import ToolkitError, counted
    from toolkit.train.data.line_index import line_index

    total = 0
    for path in files:
        records = len(line_index(path, folder).starts)
        click.echo(f"{path}: {counted(records, 'record')}")
        total += records
    if not total:
        raise ToolkitError(
            "no line contains a record", where=str(files[0]), fix="pass files with one JSON document per line"
        )


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def show(file: Path, as_json: bool) -> None:
    """Show the header of a token FILE.

    \b
    toolkit data show corpus.tokens
    """
    from toolkit.errors import ToolkitError, counted
    from toolkit.train.data.token_file import read_header

    header = read_header(file)
    if header is None:
        raise ToolkitError(
            "expected a token file, got a file without its header",
            where=str(file),
            fix="create one: toolkit data pack FILES -o OUT",
        )
    if as_json:
        known = {name: getattr(header, name) for name in ("tokens", "dtype", "texts", "vocabulary")}
        click.echo(json.dumps({**known, "xxh3_128": header.digest.hex()}, indent=1))
        return
    vocabulary = f"{header.vocabulary:,}" if header.vocabulary else "unknown"
    of_files = f"{counted(header.tokens, 'token')} ({header.dtype}) of {counted(header.texts, 'file')}"
    click.echo(f"{of_files}, vocabulary {vocabulary}")
    click.echo(f"xxh3_128 {header.digest.hex()}")
    if not header.vocabulary:
        say(_UNKNOWN_VOCABULARY)
