"""Other formats as checkpoints: recognizes the format of a source, reads it, and writes the checkpoint."""

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint.convert.dcp_metadata import METADATA
from toolkit.checkpoint.convert.destination import writing_to
from toolkit.checkpoint.convert.import_safetensors import read_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor, write_checkpoint
from toolkit.checkpoint.convert.selection import below, refuse_unknown_prefix
from toolkit.checkpoint.convert.source_files import format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps, step_folder
from toolkit.checkpoint.format.manifest import Manifest, ObjectRecord
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.layout import RunDirectory

__all__ = ["format_of", "format_of_name", "import_checkpoint"]

_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
Record = TypeVar("Record", NewTensor, ObjectRecord)
Contents = tuple[Mapping[str, NewTensor], Mapping[str, ObjectRecord]]


def format_of_name(path: Path) -> str | None:
    """The format of a file by the suffix of its name."""
    return _SUFFIXES.get(path.suffix)


def format_of(source: Path) -> str:
    """The format of a file or folder, by its names or by the first bytes of the file.

    Raises NotFoundError if it does not exist, and ToolkitError if the format is unknown or a checkpoint's.
    """
    with reading_source(source):
        if not stat.S_ISDIR(source.stat().st_mode):
            known = format_of_name(source) or format_from_prefix(*read_prefix(source, "the file to import"))
        elif (source / MANIFEST).is_file():
            raise ToolkitError("is a checkpoint already", where=str(source), fix="use it as it is")
        else:
            known = _format_of_folder(source)
    if known is None:
        fix = "name another file, or a folder of dcp.save"
        raise ToolkitError("is neither a safetensors file nor a file of torch.save", where=str(source), fix=fix)
    return known


def _format_of_folder(source: Path) -> str:
    paths = sorted(source.iterdir())
    if (source / METADATA) in paths:
        return "dcp"
    if any(".safetensors" in path.name for path in paths):
        return "safetensors"
    files = [path for path in paths if format_of_name(path) == "torch" and path.is_file()]
    raise ToolkitError(
        f"is a folder with neither a {METADATA} of dcp.save nor safetensors",
        where=str(source),
        fix=f"name the file to import, as {files[0]}" if files else "name a file, or the folder that contains these",
    )


def import_checkpoint(
    source: Path, destination: Path, *, kind: str, step: int = 0, only: str = "", under: str = ""
) -> tuple[Path, Manifest]:
    """Write the checkpoint `destination/step-XXXXXXXX` from `source`; safetensors need no torch.

    Args:
        kind: "safetensors", "torch" or "dcp".
        only: a prefix of keys, without its last dot: imports only these keys, and removes the prefix from them.
        under: a prefix to add to every key, without its last dot.

    Raises:
        NotFoundError: the source does not exist.
        ToolkitError: the source cannot be read safely, a value cannot be stored, or the destination exists.
        OwnFailureError: the disk is full.
    """
    final = step_folder(_outside_of_runs(destination), step)
    _refuse_existing(final, step)
    with reading_source(source):
        tensors, values = _contents(source, kind, only)
    if not tensors and not values:
        raise ToolkitError("contains no tensors or values", where=str(source), fix="name another source")
    _check_values(values, source)
    with writing_to(final):
        manifest = write_checkpoint(
            final, step, _prefixed(tensors, under), _prefixed(values, under), made_from=source.name
        )
    return final, manifest


def _refuse_existing(final: Path, step: int) -> None:
    """Raise a ToolkitError for an existing checkpoint, before the source is read; suggests the next free step."""
    with writing_to(final):
        if final.exists():
            free = max([step, *committed_steps(final.parent)]) + 1
            raise ToolkitError("exists already", where=str(final), fix=f"pass --step {free}, or name another folder")


def _outside_of_runs(destination: Path) -> Path:
    """`destination`; ToolkitError for a run's checkpoints, from which retention may delete any other."""
    for folder in (destination, destination.parent):
        if RunDirectory(folder).attempts.is_dir():
            fix = "name another folder, and start a run from that"
            raise ToolkitError("belongs to a run", where=str(destination), fix=fix)
    return destination


def _contents(source: Path, kind: str, only: str) -> Contents:
    """The tensors and values of `source` below `only`."""
    if kind == "safetensors":
        return _below(only, source, read_safetensors(source), {})
    # Imported here, because only these formats need torch.
    from toolkit.checkpoint.convert.import_torch import read_dcp, read_torch

    if kind == "torch":
        return read_torch(source, only)
    if not stat.S_ISDIR(source.stat().st_mode):
        fix = f"name the folder with {METADATA}, or omit --format"
        raise ToolkitError("expected a folder of dcp.save, got a file", where=str(source), fix=fix)
    if not (source / METADATA).is_file():
        raise NotFoundError(f"contains no {METADATA}", where=str(source), fix="name a folder of dcp.save")
    return _below(only, source, *read_dcp(source))


def _below(only: str, source: Path, tensors: Mapping[str, NewTensor], values: Mapping[str, ObjectRecord]) -> Contents:
    """The records below `only`, with the prefix removed from their keys."""
    refuse_unknown_prefix(only, [*tensors, *values], where=str(source))
    return _renamed(tensors, only), _renamed(values, only)


def _renamed(records: Mapping[str, Record], only: str) -> dict[str, Record]:
    return {chosen.name: replace(records[chosen.key], path=chosen.path) for chosen in below(only, records)}


def _check_values(values: Mapping[str, ObjectRecord], source: Path) -> None:
    """Refuse values that a checkpoint cannot contain, before anything is written."""
    for key, record in values.items():
        try:
            jsonvalues.encode(record.value, key)
        except ToolkitError as error:
            fix = (
                "save it as numbers, strings, lists or dicts (a tensor in a list or a dict), "
                "or select another part with --only"
            )
            raise ToolkitError(error.message, where=f"{source}: {error.where}", fix=fix) from None


def _prefixed(records: Mapping[str, Record], under: str) -> dict[str, Record]:
    """The records with `under` in front of their keys."""
    if not under:
        return dict(records)
    parts: tuple[str | int, ...] = tuple(under.split("."))
    return {f"{under}.{key}": replace(record, path=parts + record.path) for key, record in records.items()}
