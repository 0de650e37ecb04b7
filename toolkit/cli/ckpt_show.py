"""`toolkit ckpt show`: print the contents of a checkpoint as a tree, with norms on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.ckpt_places import manifest_of, one_folder
from toolkit.cli.ckpt_print import print_out, reading_bar, shortened, size
from toolkit.cli.options import RUN_OR_STEP, json_option, runs_option
from toolkit.errors import CHECK_FAILED, CheckFailedError
from toolkit.terminal.talk import plain

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from toolkit.checkpoint.contents.norms import Norms
    from toolkit.checkpoint.contents.tensor_tree import Branch
    from toolkit.checkpoint.format.manifest import Manifest, Piece, TensorRecord

only_option = click.option(
    "--only", multiple=True, metavar="PATTERN", help="Show keys such as '*.weight', or all below model.blocks.0."
)


@click.command()
@click.argument("run", type=RUN_OR_STEP)
@runs_option
@click.option("--step", type=click.IntRange(min=0), help="Select the checkpoint of this step.")
@only_option
@click.option("--depth", type=click.IntRange(min=1), help="Number of levels of the tree to show.")
@click.option("--pieces", is_flag=True, help="Show every piece with its file and offset.")
@click.option("--norms", is_flag=True, help="Read the tensors: 2-norm, largest |x|, zeros, NaN and infinities.")
@json_option
def show(
    run: str, runs: Path | None, step: int | None, only: tuple[str, ...], depth: int | None, pieces: bool, norms: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Show the tensors and the state of one checkpoint (the newest).

    Similar layers are grouped: blocks.[0-31].

    \b
    toolkit ckpt show last
    toolkit ckpt show last:400 --norms
    """
    from toolkit.checkpoint.contents.tensor_tree import matches, refuse_unknown
    from toolkit.checkpoint.format.manifest_file import manifest_text

    folder = one_folder(run, runs, step)
    manifest = manifest_of(folder)
    refuse_unknown(only, manifest.tensors)
    tensors = {key: record for key, record in manifest.tensors.items() if matches(key, only)}
    read = _read_norms(folder, manifest, tensors) if norms else {}
    if as_json:
        body = json.loads(manifest_text(manifest))
        if norms:
            body["norms"] = {key: _norms_json(found) for key, found in read.items()}
        click.echo(json.dumps(body, indent=2))
    else:
        shown = Shown(read, pieces=pieces, depth=depth or 1_000_000)
        _print_tree(folder, manifest, tensors, shown)
    return CHECK_FAILED if any(isinstance(found, str) for found in read.values()) else 0


def _read_norms(folder: Path, manifest: Manifest, tensors: Mapping[str, TensorRecord]) -> dict[str, Norms | str]:
    """Return the norms of each tensor, or the problem of a damaged one."""
    from toolkit.checkpoint.contents.norms import norms_of
    from toolkit.checkpoint.contents.stored_tensors import StoredTensors

    norms: dict[str, Norms | str] = {}
    with ExitStack() as stack:
        stored = stack.enter_context(StoredTensors(folder, manifest))
        total = sum(record.size_bytes for record in tensors.values())
        read = stack.enter_context(reading_bar(folder.name, total))
        for key in tensors:
            try:
                norms[key] = norms_of(stored, key, read)
            except CheckFailedError as error:
                norms[key] = str(error)
    return norms


def _norms_json(found: Norms | str) -> dict[str, Any]:
    from toolkit.checkpoint.format.jsonvalues import encode

    if isinstance(found, str):
        return {"damaged": found}
    return {key: encode(value, key) for key, value in asdict(found).items()}


@dataclass(frozen=True)
class Shown:
    """The options of the output."""

    norms: Mapping[str, Norms | str]
    pieces: bool
    depth: int

    @property
    def each(self) -> bool:
        """Whether to print every layer, because the options distinguish them."""
        return bool(self.norms) or self.pieces


def _print_tree(folder: Path, manifest: Manifest, tensors: Mapping[str, TensorRecord], shown: Shown) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from toolkit.checkpoint.contents.tensor_tree import tree_of

    title = (
        f"{folder.name}: step {manifest.step}, {manifest.world_size} ranks, {size(manifest.size_bytes)}, "
        f"{manifest.saved_at}, attempt {manifest.attempt}, {manifest.written_by}"
    )
    tree = Tree(Text(plain(title)))
    for mesh in manifest.mesh:
        tree.add(Text(plain(f"mesh {mesh.get('dims')} {mesh.get('shape')}")))
    root = tree_of(tensors.items())
    _add(tree.add(_inner("tensors", [root])), root, shown, 1)
    values = tree.add(Text(f"values ({len(manifest.objects)})"))
    for name, value in manifest.objects.items():
        values.add(Text(f"{plain(name)} = {shortened(value.value)}"))
    state = tree.add(Text("state"))
    for key, item in manifest.state.items():
        state.add(Text(f"{plain(key)} = {shortened(item)}"))
    print_out(tree)


def _add(node: Tree, branch: Branch, shown: Shown, depth: int) -> None:
    from toolkit.checkpoint.contents.tensor_tree import groups

    for label, alike in groups(branch, alike=not shown.each):
        first = alike[0]
        if first.record is not None:
            below = node.add(_leaf(label, alike, shown))
            if shown.pieces:
                _add_pieces(below, first.record)
        else:
            below = node.add(_inner(label, alike))
        if depth < shown.depth:
            _add(below, first, shown, depth + 1)


def _inner(label: str, alike: list[Branch]) -> Text:
    from rich.text import Text

    one, each = alike[0], "" if len(alike) == 1 else " each"
    return Text.assemble((plain(label), "bold"), (f"  {_tensors(one.tensors)}, {size(one.size_bytes)}{each}", "dim"))


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _leaf(label: str, alike: list[Branch], shown: Shown) -> Text:
    from rich.text import Text

    first = alike[0]
    record = first.record
    assert record is not None
    each = "" if len(alike) == 1 else " each"
    pieces = "1 piece" if len(record.pieces) == 1 else f"{len(record.pieces)} pieces"
    text = Text.assemble(
        (plain(label) or '""', "bold"),
        f"  {record.dtype} {list(record.shape)} {size(record.size_bytes)}{each}",
        (f"  {pieces}", "dim"),
    )
    if (found := shown.norms.get(first.key)) is not None:
        text.append_text(_norms_text(found))
    return text


def _norms_text(found: Norms | str) -> Text:
    from rich.text import Text

    if isinstance(found, str):
        return Text(f"  DAMAGED: {plain(found)}", "red")
    zeros = 100 * found.zeros / max(1, found.elements)
    text = Text(f"  norm {found.norm:.6g}  largest {found.largest:.6g}  zeros {zeros:.3g} %", "cyan")
    for count, word in ((found.nans, "NaN"), (found.infinities, "inf")):
        if count:
            text.append(f"  {count} {word}", "red")
    return text


def _place(piece: Piece) -> str:
    if piece.chunks is None:
        return f"byte {piece.byte_offset}"
    places, stored = piece.chunks.places, sum(size for _, size in piece.chunks.places)
    return f"{stored} bytes of {piece.chunks.filters[-1]} in {len(places)} chunks from byte {places[0][0]}"


def _add_pieces(node: Tree, record: TensorRecord) -> None:
    from rich.text import Text

    for piece in record.pieces:
        node.add(Text(f"{list(piece.shape)} at {list(piece.offset)} in {piece.file}, {_place(piece)}"))
