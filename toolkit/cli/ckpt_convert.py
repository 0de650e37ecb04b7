"""`toolkit ckpt export` and `import`: convert checkpoints to and from safetensors and torch's own formats."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.ckpt_places import manifest_for_export, naming_other_steps, one_folder, refuse_empty
from toolkit.cli.options import RUN_OR_STEP, runs_option
from toolkit.errors import ToolkitError
from toolkit.terminal.talk import say

if TYPE_CHECKING:
    from toolkit.checkpoint.convert.selection import Selection
    from toolkit.checkpoint.format.manifest import Manifest

_FORMATS = click.Choice(["safetensors", "torch", "dcp"])
_EXPORT_FORMATS = click.Choice([*_FORMATS.choices, "peft"])
_MODEL, _SHARD = "model", "5GB"
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?) ?(?:([KMGT])(i?))?B", re.IGNORECASE)
_OTHER_UNIT = re.compile(r"\d+(?:\.\d+)? ?(\D*)")
_UNITS = "B, or K, M, G or T with B (powers of 1000) or iB (powers of 1024), such as 5GB or 2GiB"


class NamedPath(click.Path):
    """A path that must not be empty: with an unset shell variable, it would mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" and param is not None:
            refuse_empty((param.name or "").upper())
        return super().convert(value, param, ctx)


@click.command()
@click.argument("run", type=RUN_OR_STEP)
@click.argument("dest", type=NamedPath(path_type=Path))
@click.option(
    "--format", "kind", type=_EXPORT_FORMATS, help="Output format [from the suffix of DEST: .safetensors, .pt, .pth]."
)
@click.option("--only", metavar="PREFIX", help="Keys below PREFIX, which is stripped; '' for all [safetensors: model].")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Round floating-point tensors to this type."
)
@click.option(
    "--max-shard-size", metavar="SIZE", help="Limit of each safetensors file: 5GB (10^9), 500MB, 2GiB (2^30)."
)
@click.option(
    "--merge", is_flag=True, help="Add the adapters to their base; export its weights as x.safetensors or a folder."
)
@click.option("--force", is_flag=True, help="Replace the file DEST; in a folder, replace the files of earlier exports.")
@click.option("--step", type=click.IntRange(min=0), help="Select the checkpoint of this step.")
@runs_option
def export(
    run: str,
    dest: Path,
    kind: str | None,
    only: str | None,
    dtype: str | None,
    max_shard_size: str | None,
    merge: bool,
    force: bool,
    step: int | None,
    runs: Path | None,
) -> None:
    """Export one checkpoint (the newest) to another format.

    DEST is a folder for safetensors, dcp and peft (or one file, x.safetensors), and a file for torch. It appears when it is
    complete.

    \b
    toolkit ckpt export last model.safetensors
    """
    from toolkit.checkpoint.convert.destination import resolve_destination
    from toolkit.checkpoint.convert.selection import ExportRequest

    kind = _format_of_destination(dest, kind, merge=merge)
    _refuse_unfit(kind, dtype, max_shard_size, dest)
    if merge and (kind != "safetensors" or only is not None):
        fix = "omit --only, and choose a folder or a file such as model.safetensors as DEST"
        raise ToolkitError("writes a whole model as safetensors", where="--merge", fix=fix)
    folder = one_folder(run, runs, step)
    dest = resolve_destination(dest)
    manifest = manifest_for_export(folder)
    selection = _selection(manifest, folder, kind, only)

    def report() -> None:
        say(_summary(selection, manifest, folder, kind))

    request = ExportRequest(folder, manifest, selection, dest, force, report)
    with naming_other_steps(folder):
        if kind == "peft" or merge:
            from toolkit.checkpoint.convert.adapters import export_merged, export_peft

            most_bytes = _bytes(max_shard_size or _SHARD)
            export_merged(request, dtype, most_bytes) if merge else export_peft(request)
        elif kind == "safetensors":
            from toolkit.checkpoint.convert.export_safetensors import export_safetensors

            export_safetensors(request, dtype, _bytes(max_shard_size or _SHARD))
        else:
            _need_torch(kind)
            from toolkit.checkpoint.convert.export_torch import export_dcp, export_torch

            (export_torch if kind == "torch" else export_dcp)(request)
    click.echo(dest)


@click.command(name="import")
@click.argument("source", type=NamedPath(path_type=Path, readable=False))
@click.argument("dest", type=NamedPath(path_type=Path))
@click.option("--format", "kind", type=_FORMATS, help="Input format [from the name or the files of SOURCE].")
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="Step of the new checkpoint.")
@click.option("--only", metavar="PREFIX", default="", help="Import only the keys below PREFIX, without PREFIX.")
@click.option("--under", metavar="PREFIX", default="", help="Add PREFIX to all keys, such as `model`.")
def import_(source: Path, dest: Path, kind: str | None, step: int, only: str, under: str) -> None:
    """Import safetensors, a torch.save file or a dcp.save folder as the checkpoint DEST/step-XXXXXXXX.

    \b
    toolkit ckpt import model.safetensors checkpoints --under model
    """
    from toolkit.checkpoint.convert.imports import format_of, import_checkpoint, omitted_files

    _refuse_unfit_import(step, under)
    _refuse_checkpoint_for_import(dest)
    kind = kind or format_of(source)
    if kind != "safetensors":
        _need_torch(kind)
    final, manifest, omitted = import_checkpoint(source, dest.absolute(), kind=kind, step=step, only=only, under=under)
    values = f" and {len(manifest.objects)} values" if manifest.objects else ""
    say(f"imported {len(manifest.tensors)} tensors{values} from {source}")
    if kind in ("safetensors", "dcp") and (files := omitted_files(source)):
        say(f"omitted these files of {source}: {', '.join(files)}")
    for key, name in omitted.items():
        say(f"omitted {key}: it contains {name}, which cannot be read without running code")
    click.echo(final)


def _format_of_destination(dest: Path, kind: str | None, *, merge: bool) -> str:
    """Return the format from --format, --merge or DEST's suffix, which must not contradict each other."""
    from toolkit.checkpoint.convert.imports import format_of_name

    suffix_kind = format_of_name(dest)
    if kind is None and suffix_kind is None and not merge:
        fix = "pass --format safetensors, torch or dcp"
        raise ToolkitError("the suffix of DEST does not determine the format", where=str(dest), fix=fix)
    if kind is not None and suffix_kind not in (None, kind):
        fix = f"omit --format, or choose a suffix of DEST other than {dest.suffix}"
        raise ToolkitError(f"DEST has the suffix of {suffix_kind}, but --format is {kind}", where=str(dest), fix=fix)
    return kind or suffix_kind or "safetensors"


def _refuse_unfit_import(step: int, under: str) -> None:
    from toolkit.checkpoint.format.manifest_body import LARGEST

    if step > LARGEST:
        raise ToolkitError(f"{step} is too large", where="--step", fix=f"choose a number up to {LARGEST}")
    if under and not all(under.split(".")):
        fix = "separate names by one dot, as in model.encoder"
        raise ToolkitError(f"{under!r:.80} has an empty name between its dots", where="--under", fix=fix)


def _refuse_checkpoint_for_import(dest: Path) -> None:
    """Refuse a checkpoint as DEST: the new checkpoint would be inside of it."""
    from toolkit.checkpoint.convert.destination import resolve_destination
    from toolkit.checkpoint.format.layout import step_of

    try:
        resolve_destination(dest)
    except ToolkitError:
        step = step_of(dest)
        if step is None or dest.exists():
            raise
        fix = f"pass {dest.parent} as DEST, and --step {step}"
        raise ToolkitError("DEST must not be the folder of one step", where=str(dest), fix=fix) from None


def _refuse_unfit(kind: str, dtype: str | None, max_shard_size: str | None, dest: Path) -> None:
    for option, value in (("--dtype", dtype), ("--max-shard-size", max_shard_size)):
        if value is not None and kind != "safetensors":
            raise ToolkitError(f"requires safetensors, but the format is {kind}", where=option, fix=f"omit {option}")
    if max_shard_size is not None and dest.suffix == ".safetensors":
        raise ToolkitError("applies only if DEST is a folder", where="--max-shard-size", fix="omit --max-shard-size")


def _selection(manifest: Manifest, folder: Path, kind: str, only: str | None) -> Selection:
    """Return the part to export: --only, or for safetensors the model if the checkpoint has one."""
    from toolkit.checkpoint.convert.selection import select

    if only is None:
        has_model = any(key.startswith(f"{_MODEL}.") for key in manifest.tensors)
        only = _MODEL if kind in ("safetensors", "peft") and has_model else ""
    return select(manifest, only, where=str(folder))


def _summary(selection: Selection, manifest: Manifest, folder: Path, kind: str) -> str:
    """Describe what is exported and what is not, for a message before the first tensor is read."""
    below = f" (below `{selection.prefix}`)" if selection.prefix else ""
    summary = f"exporting {len(selection.tensors)} of {len(manifest.tensors)} tensors{below}"
    if kind in ("safetensors", "peft"):
        names = ", ".join(value.key for value in selection.values[:3])
        summary += f", without {len(selection.values)} values that are not tensors: {names}" if names else ""
    else:
        summary += f" and {len(selection.values)} of {len(manifest.objects)} values"
    return f"{summary} of {folder}"


def _bytes(size_string: str) -> int:
    """Return the bytes in a size such as "5GB" (10^9) or "2GiB" (2^30)."""
    match = _SIZE.fullmatch(size_string.strip())
    size = 0
    if match is not None:
        number, power, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index((power or " ").upper()))
    if size < 1:
        other = _OTHER_UNIT.fullmatch(size_string.strip()) if match is None else None
        message, fix = f"expected a size, got {size_string!r:.40}", "write 5GB, 500MB or 2GiB"
        if other is not None:
            unit = f"the unknown unit {other[1]!r:.40}" if other[1] else "no unit"
            message, fix = f"{size_string!r:.40} has {unit}", f"write one of {_UNITS}"
        raise ToolkitError(message, where="--max-shard-size", fix=fix)
    return size


def _need_torch(kind: str) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise ToolkitError(
            f"{kind} requires torch", where="--format", fix="pip install 'toolkit[train]', or use safetensors"
        )
