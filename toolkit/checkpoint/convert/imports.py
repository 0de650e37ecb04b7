"""Imports other formats: recognizes the format of a source, reads it, and writes it as a checkpoint."""

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from toolkit.checkpoint.convert.dcp_metadata import METADATA
from toolkit.checkpoint.convert.destination import writing_to
from toolkit.checkpoint.convert.import_safetensors import read_safetensors
from toolkit.checkpoint.convert.lone_writer import NewTensor, write_checkpoint
from toolkit.checkpoint.convert.nesting import omitted_in
from toolkit.checkpoint.convert.selection import below, refuse_unknown_prefix
from toolkit.checkpoint.convert.source_files import format_from_prefix, read_prefix, reading_source
from toolkit.checkpoint.format import jsonvalues
from toolkit.checkpoint.format.layout import MANIFEST, committed_steps, step_folder
from toolkit.checkpoint.format.manifest import Manifest, ObjectRecord
from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.layout import RunDirectory

__all__ = ["format_of", "format_of_name", "import_checkpoint", "omitted_files"]

_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_CONVERTER = "zero_to_fp32.py"  # DeepSpeed writes it into each checkpoint
_STATES_OF_TRAINERS = ("trainer_state.json", "latest")
Record = TypeVar("Record", NewTensor, ObjectRecord)
Contents = tuple[Mapping[str, NewTensor], Mapping[str, ObjectRecord]]


def format_of_name(path: Path) -> str | None:
    """Return the format of a file according to its name's suffix, or None if it is unknown."""
    return _SUFFIXES.get(path.suffix)


def format_of(source: Path) -> str:
    """Return the format of a file or folder, according to file names or the first bytes of the file.

    Raises NotFoundError if it does not exist, and ToolkitError if its format is unknown or it already is a checkpoint.
    """
    with reading_source(source):
        if not stat.S_ISDIR(source.stat().st_mode):
            known = format_of_name(source) or format_from_prefix(*read_prefix(source, "the file to import"))
        elif (source / MANIFEST).is_file():
            raise ToolkitError("is already a checkpoint", where=str(source), fix="use this checkpoint directly")
        else:
            known = _format_of_folder(source)
    if known is None:
        fix = "pass a file of these formats, or a dcp.save folder"
        raise ToolkitError("is neither a safetensors file nor a torch.save file", where=str(source), fix=fix)
    return known


def _format_of_folder(source: Path) -> str:
    paths = sorted(source.iterdir())
    if (source / METADATA) in paths:
        return "dcp"
    if any(".safetensors" in path.name for path in paths):
        return "safetensors"
    refuse_unended(source)
    if (script := _script_of_deepspeed(source)) is not None:
        raise ToolkitError(
            "is a checkpoint of DeepSpeed, in which each rank stored flat parts of the parameters", where=str(source),
            fix=f"convert it first, with `python {script} {script.parent} OUT`, and import OUT",
        )  # fmt: skip
    files = [path for path in paths if format_of_name(path) == "torch" and path.is_file()]
    raise ToolkitError(
        f"expected a folder with safetensors files, or with the {METADATA} file of dcp.save",
        where=str(source),
        fix=f"pass the file to import, such as {files[0]}" if files else "pass a file, or a folder with such files",
    )


def refuse_unended(source: Path) -> None:
    """Raise a ToolkitError for a folder of dcp.save without the file that the save writes last."""
    if any(source.glob("*.distcp")) and not (source / METADATA).is_file():
        raise ToolkitError(
            f"contains parts of dcp.save, but no {METADATA}, which is written last: this save never ended",
            where=str(source), fix="import an earlier checkpoint",
        )  # fmt: skip


def _script_of_deepspeed(source: Path) -> Path | None:
    """Return the path of DeepSpeed's converter for a checkpoint, or for its folder of one step; None for others."""
    folders = (source, *source.glob("global_step*"))
    if not (source / _CONVERTER).is_file() and not any(any(one.glob("*_optim_states.pt")) for one in folders):
        return None
    return (source.parent if (source.parent / _CONVERTER).is_file() else source) / _CONVERTER


def omitted_files(source: Path) -> list[str]:
    """Return the names of files in a folder that an import of its model omits, such as the state of an optimizer."""
    if not source.is_dir():
        return []
    return sorted(
        path.name for path in source.iterdir() if format_of_name(path) == "torch" or path.name in _STATES_OF_TRAINERS
    )


def import_checkpoint(
    source: Path, destination: Path, *, kind: str, step: int = 0, only: str = "", under: str = ""
) -> tuple[Path, Manifest, dict[str, str]]:
    """Write the checkpoint `destination/step-XXXXXXXX` from `source`. Imports torch only for torch's own formats.

    Also returns the omitted values by key, with the class that cannot be read safely.

    Args:
        kind: "safetensors", "torch" or "dcp".
        only: the prefix, without its last dot, of the keys to import; it is removed from them.
        under: a prefix, without its last dot, to add to every key.

    Raises:
        NotFoundError: the source does not exist.
        ToolkitError: the source cannot be read safely, a value cannot be stored, or the destination exists.
        OwnFailureError: the disk is full.
    """
    final = step_folder(_outside_of_runs(destination), step)
    _refuse_existing(final, step)
    with reading_source(source):
        tensors, values = _contents(source, kind, only)
    omitted = {key: name for key, record in values.items() if (name := omitted_in(record.value))}
    values = {key: record for key, record in values.items() if key not in omitted}
    if not tensors and not values:
        raise ToolkitError("contains no tensors or values", where=str(source), fix="pass another source")
    _check_values(values, source)
    with writing_to(final):
        manifest = write_checkpoint(
            final, step, _prefixed(tensors, under), _prefixed(values, under), made_from=source.name
        )
    return final, manifest, omitted


def _refuse_existing(final: Path, step: int) -> None:
    """Raise a ToolkitError if the checkpoint exists, before reading the source; the fix suggests the next free step."""
    with writing_to(final):
        if final.exists():
            free = max([step, *committed_steps(final.parent)]) + 1
            raise ToolkitError("already exists", where=str(final), fix=f"pass --step {free}, or another folder")


def _outside_of_runs(destination: Path) -> Path:
    """Return `destination`. Raises ToolkitError if it is in a run, because retention could delete the import."""
    for folder in (destination, destination.parent):
        if RunDirectory(folder).attempts.is_dir():
            fix = "choose another folder, and start a run from the checkpoint there"
            raise ToolkitError("is in a run directory", where=str(destination), fix=fix)
    return destination


def _contents(source: Path, kind: str, only: str) -> Contents:
    """Return the tensors and values of `source` below `only`."""
    if kind == "safetensors":
        return _below(only, source, read_safetensors(source), {})
    # Imported here, because only torch's own formats need torch.
    from toolkit.checkpoint.convert.import_torch import read_dcp, read_torch

    if kind == "torch":
        return read_torch(source, only)
    if not stat.S_ISDIR(source.stat().st_mode):
        fix = f"pass the folder with {METADATA}, or omit --format"
        raise ToolkitError("expected a dcp.save folder, got a file", where=str(source), fix=fix)
    refuse_unended(source)
    if not (source / METADATA).is_file():
        raise NotFoundError(f"contains no {METADATA}", where=str(source), fix="pass a dcp.save folder")
    return _below(only, source, *read_dcp(source))


def _below(only: str, source: Path, tensors: Mapping[str, NewTensor], values: Mapping[str, ObjectRecord]) -> Contents:
    """Return the records below `only`, with the prefix removed from their keys."""
    refuse_unknown_prefix(only, [*tensors, *values], where=str(source))
    return _renamed(tensors, only), _renamed(values, only)


def _renamed(records: Mapping[str, Record], only: str) -> dict[str, Record]:
    return {chosen.name: replace(records[chosen.key], path=chosen.path) for chosen in below(only, records)}


def _check_values(values: Mapping[str, ObjectRecord], source: Path) -> None:
    """Raise a ToolkitError for values that a checkpoint cannot contain, before any file is written."""
    for key, record in values.items():
        try:
            jsonvalues.encode(record.value, key)
        except ToolkitError as error:
            fix = (
                "save numbers, strings, lists or dicts instead (tensors only in lists or dicts), "
                "or select another part with --only"
            )
            raise ToolkitError(error.message, where=f"{source}: {error.where}", fix=fix) from None


def _prefixed(records: Mapping[str, Record], under: str) -> dict[str, Record]:
    """Return the records with `under` in front of their keys."""
    if not under:
        return dict(records)
    parts: tuple[str | int, ...] = tuple(under.split("."))
    return {f"{under}.{key}": replace(record, path=parts + record.path) for key, record in records.items()}
