"""Other formats as checkpoints: what is at a path, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint.convert.dcp_metadata import METADATA
from toolkit.checkpoint.convert.destination import told_in_words
from toolkit.checkpoint.convert.import_safetensors import tensors_of_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor, write_checkpoint
from toolkit.checkpoint.convert.selection import path_below
from toolkit.checkpoint.format.layout import MANIFEST, step_folder
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
    """The format of a file or folder, by the names that it has.

    Raises:
        NotFoundError: nothing is there.
        ToolkitError: it tells none, or is a checkpoint already.
    """
    _need(source)
    if (source / MANIFEST).is_file():
        raise ToolkitError("is a checkpoint already", where=str(source), fix="use it as it is")
    if source.is_dir():
        if (source / METADATA).is_file():
            return "dcp"
        if any(source.glob("*.safetensors*")):
            return "safetensors"
    elif (known := format_of_name(source)) is not None:
        return known
    raise ToolkitError("does not tell its format", where=str(source), fix=f"give --format {' or '.join(FORMATS)}")


def _need(source: Path) -> None:
    if not source.exists():
        raise NotFoundError("is not there", where=str(source), fix="name a file or a folder")


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
    tensors, values = _found(source, kind, only)
    if not tensors and not values:
        raise ToolkitError("holds nothing", where=str(source), fix="name another source")
    with told_in_words(final):
        written = write_checkpoint(final, step, _put(tensors, under), _put(values, under), made_from=source.name)
    return final, written


def _outside_of_runs(destination: Path) -> Path:
    """A run's checkpoints are those that its attempts saved, in their order; retention may delete any other."""
    for folder in (destination, destination.parent):
        if RunDirectory(folder).attempts.is_dir():
            raise ToolkitError(
                "belongs to a run", where=str(destination), fix="name another folder, and begin a run from that"
            )
    return destination


def _found(source: Path, kind: str, only: str) -> tuple[Mapping[str, NewTensor], Mapping[str, ObjectRecord]]:
    _need(source)
    if kind == "safetensors":
        return _below(tensors_of_safetensors(source), only, source), {}
    # Torch is imported here, because only these formats need it.
    from toolkit.checkpoint.convert.import_torch import found_in_dcp, found_in_file

    if kind == "torch":
        if not source.is_file():
            raise ToolkitError("is no regular file", where=str(source), fix="name a file of torch.save")
        found = found_in_file(source, only)
        return found.tensors, found.values
    if not (source / METADATA).is_file():
        raise NotFoundError(f"holds no {METADATA}", where=str(source), fix="name a folder of dcp.save")
    found = found_in_dcp(source)
    known = (*found.tensors, *found.values)
    return _below(found.tensors, only, source, known), _below(found.values, only, source, known)


def _below(
    records: Mapping[str, Record], only: str, source: Path, known: Iterable[str] | None = None
) -> dict[str, Record]:
    """What lies below `only`, under its shorter keys. `known` are the keys of the whole source, by default these."""
    if not only:
        return dict(records)
    found = {
        key.removeprefix(f"{only}."): replace(record, path=path_below(only, record.path))
        for key, record in records.items()
        if key.startswith(f"{only}.")
    }
    if not any(key.startswith(f"{only}.") for key in known or records):
        first = sorted({key.partition(".")[0] for key in known or records if "." in key})
        raise NotFoundError(
            f"holds nothing below {only!r}", where=str(source), fix=f"choose one of: {', '.join(first[:20]) or 'none'}"
        )
    return found


def _put(records: Mapping[str, Record], under: str) -> dict[str, Record]:
    """The records with `under` in front of their keys."""
    if not under:
        return dict(records)
    parts: tuple[str | int, ...] = tuple(under.split("."))
    return {f"{under}.{key}": replace(record, path=parts + record.path) for key, record in records.items()}
