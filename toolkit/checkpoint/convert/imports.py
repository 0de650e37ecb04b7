"""Other formats as checkpoints: what is at a path, and where it goes."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint.convert.beginnings import format_of_beginning
from toolkit.checkpoint.convert.dcp_metadata import METADATA
from toolkit.checkpoint.convert.destination import told_in_words
from toolkit.checkpoint.convert.import_safetensors import tensors_of_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor, write_checkpoint
from toolkit.checkpoint.convert.safetensors_format import refuse_safetensors
from toolkit.checkpoint.convert.selection import below, refuse_unknown_prefix
from toolkit.checkpoint.convert.source_files import beginning_of, reading_source
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps, step_folder
from toolkit.checkpoint.format.manifest import Manifest, ObjectRecord
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.layout import RunDirectory

FORMATS = ("safetensors", "torch", "dcp")
_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
Record = TypeVar("Record", NewTensor, ObjectRecord)


def format_of_name(path: Path) -> str | None:
    """The format that the ending of a file's name tells."""
    return _ENDINGS.get(path.suffix)


def format_of(source: Path) -> str:
    """The format of a file or folder, by the names that it has, or by how the file begins.

    Raises:
        NotFoundError: nothing is there.
        ToolkitError: neither tells one, or it is a checkpoint already.
    """
    with reading_source(source):
        if not stat.S_ISDIR(source.stat().st_mode):
            known = format_of_name(source) or format_of_beginning(*beginning_of(source, "the file to import"))
        elif (source / MANIFEST).is_file():
            raise ToolkitError("is a checkpoint already", where=str(source), fix="use it as it is")
        else:
            known = _format_of_folder(source)
    if known is None:
        fix = "name another file, or a folder of dcp.save"
        raise ToolkitError("is neither a safetensors file nor one of torch.save", where=str(source), fix=fix)
    return known


def _format_of_folder(source: Path) -> str:
    inside = sorted(path for path in source.iterdir())
    if (source / METADATA) in inside:
        return "dcp"
    if any(".safetensors" in path.name for path in inside):
        return "safetensors"
    files = [path for path in inside if format_of_name(path) == "torch" and path.is_file()]
    raise ToolkitError(
        f"is a folder with neither a {METADATA} of dcp.save nor safetensors",
        where=str(source),
        fix=f"name the file to import, as {files[0]}" if files else "name a file, or the folder that holds these",
    )


def import_checkpoint(
    source: Path, destination: Path, *, kind: str, step: int = 0, only: str = "", under: str = ""
) -> tuple[Path, Manifest]:
    """Make the checkpoint `destination/step-XXXXXXXX` of what `source` holds; safetensors need no torch.

    Args:
        kind: one of `FORMATS`.
        only: what is taken, the first parts of keys joined with dots; it is taken off.
        under: what is put in front of every key, with a dot.

    Raises:
        NotFoundError: the source is not there.
        ToolkitError: the source cannot be read safely or not be stored, or the destination is taken.
        OwnFailureError: the disk is full.
    """
    final = step_folder(_outside_of_runs(destination), step)
    _refuse_taken(final, step)
    with reading_source(source):
        tensors, values = _found(source, kind, only)
    if not tensors and not values:
        raise ToolkitError("holds nothing", where=str(source), fix="name another source")
    _refuse_unplain(values, source)
    with told_in_words(final):
        written = write_checkpoint(final, step, _put(tensors, under), _put(values, under), made_from=source.name)
    return final, written


def _refuse_taken(final: Path, step: int) -> None:
    """Before the source is read: a step has one checkpoint, so that a second import needs another step."""
    with told_in_words(final):
        if final.exists():
            free = max([step, *committed_steps(final.parent)]) + 1
            raise ToolkitError("is there already", where=str(final), fix=f"give --step {free}, or name another folder")


def _outside_of_runs(destination: Path) -> Path:
    """A run's checkpoints are those that its attempts saved, in their order; retention may delete any other."""
    for folder in (destination, destination.parent):
        if RunDirectory(folder).attempts.is_dir():
            raise ToolkitError(
                "belongs to a run", where=str(destination), fix="name another folder, and begin a run from that"
            )
    return destination


def _found(source: Path, kind: str, only: str) -> tuple[Mapping[str, NewTensor], Mapping[str, ObjectRecord]]:
    if kind == "safetensors":
        tensors = tensors_of_safetensors(source)
        refuse_unknown_prefix(only, tensors.keys(), where=str(source))
        return _below(tensors, only), {}
    # Torch is imported here, because only these formats need it.
    from toolkit.checkpoint.convert.import_torch import found_in_dcp, found_in_file

    if kind == "torch":
        refuse_safetensors(source)
        found = found_in_file(source, only)
        return found.tensors, found.values
    if not stat.S_ISDIR(source.stat().st_mode):
        fix = f"name the folder with {METADATA}, or leave --format out"
        raise ToolkitError("is a file, and dcp.save makes folders", where=str(source), fix=fix)
    if not (source / METADATA).is_file():
        raise NotFoundError(f"holds no {METADATA}", where=str(source), fix="name a folder of dcp.save")
    found = found_in_dcp(source)
    refuse_unknown_prefix(only, [*found.tensors, *found.values], where=str(source))
    return _below(found.tensors, only), _below(found.values, only)


def _below(records: Mapping[str, Record], only: str) -> dict[str, Record]:
    """What lies below `only`, under its shorter keys."""
    return {one.name: replace(records[one.key], path=one.path) for one in below(only, records)}


def _refuse_unplain(values: Mapping[str, ObjectRecord], source: Path) -> None:
    """Refuse values that no checkpoint holds, before anything is written."""
    for key, record in values.items():
        try:
            jsonvalues.encode(record.value, key)
        except ToolkitError as error:
            raise ToolkitError(
                error.message,
                where=f"{source}: {error.where}",
                fix="save it as numbers, text, lists or dicts (a tensor in a list or a dict), "
                "or take another part with --only",
            ) from None


def _put(records: Mapping[str, Record], under: str) -> dict[str, Record]:
    """The records with `under` in front of their keys."""
    if not under:
        return dict(records)
    parts: tuple[str | int, ...] = tuple(under.split("."))
    return {f"{under}.{key}": replace(record, path=parts + record.path) for key, record in records.items()}
