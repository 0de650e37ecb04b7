"""`toolkit ckpt diff`: compare two checkpoints tensor by tensor."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.ckpt_places import manifest_of, one_folder
from toolkit.cli.ckpt_print import print_out, reading_bar, shortened
from toolkit.cli.ckpt_show import only_option
from toolkit.cli.options import RUN_OR_STEP, json_option, runs_option
from toolkit.errors import CHECK_FAILED
from toolkit.terminal.talk import plain

if TYPE_CHECKING:
    from rich.table import Table

    from toolkit.checkpoint.contents.differences import NumberDifference, TensorDifference, ValueDifference
    from toolkit.checkpoint.format.manifest import Manifest, TensorRecord

_WORDS = {
    "only_in_a": "only in A",
    "only_in_b": "only in B",
    "shape": "different shape",
    "type": "different type",
    "values": "differ",
    "damaged": "DAMAGED",
}


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Compared:
    """The result of the comparison."""

    a: Side
    b: Side
    compared: int  # number of compared tensors
    tensors: list[TensorDifference]
    values: list[ValueDifference]

    @property
    def equal(self) -> bool:
        return not self.tensors and not self.values


@click.command()
@click.argument("a", type=RUN_OR_STEP)
@click.argument("b", type=RUN_OR_STEP)
@runs_option
@only_option
@click.option("-n", "--most", type=click.IntRange(min=1), metavar="N", help="Show the N tensors that differ most.")
@json_option
def diff(a: str, b: str, runs: Path | None, only: tuple[str, ...], most: int | None, as_json: bool) -> int:
    """Compare two checkpoints: A and B are RUN, for its newest checkpoint, or RUN:STEP.

    Exit code 0 if all tensors and values are bitwise equal, 1 if any differs.

    \b
    toolkit ckpt diff last:200 last:400
    """
    one, other = (Side(folder, manifest_of(folder)) for folder in (one_folder(a, runs), one_folder(b, runs)))
    found = _compare(one, other, only)
    shown = sorted(found.tensors, key=_how_much, reverse=True)[:most] if most else found.tensors
    if as_json:
        click.echo(json.dumps(_as_json(found, shown), indent=2))
    else:
        _print(found, shown)
    return 0 if found.equal else CHECK_FAILED


def _compare(a: Side, b: Side, only: tuple[str, ...]) -> Compared:
    from toolkit.checkpoint.contents.differences import keys_of, tensor_differences, value_differences, value_keys
    from toolkit.checkpoint.contents.stored_tensors import StoredTensors
    from toolkit.checkpoint.contents.tensor_tree import refuse_unknown

    known = [key for side in (a, b) for key in (*side.manifest.tensors, *value_keys(side.manifest))]
    refuse_unknown(only, known)
    keys = keys_of(a.manifest, b.manifest, only)
    total = sum(
        side.manifest.tensors[key].size_bytes for key in keys for side in (a, b) if key in side.manifest.tensors
    )
    with ExitStack() as stack:
        one, other = (stack.enter_context(StoredTensors(side.folder, side.manifest)) for side in (a, b))
        read = stack.enter_context(reading_bar("comparing", total))
        tensors = list(tensor_differences(one, other, keys, read))
    return Compared(a, b, len(keys), tensors, value_differences(a.manifest, b.manifest, only))


def _how_much(difference: TensorDifference) -> float:
    """Return a sort key: tensors that cannot be compared come first, tensors of only one side last."""
    if difference.a is None or difference.b is None:
        return -1.0
    return difference.numbers.relative_norm if difference.numbers is not None else float("inf")


def _as_json(found: Compared, shown: list[TensorDifference]) -> dict[str, Any]:
    return {
        "a": {"path": str(found.a.folder), "step": found.a.manifest.step},
        "b": {"path": str(found.b.folder), "step": found.b.manifest.step},
        "equal": found.equal,
        "tensors": {"compared": found.compared, "equal": found.compared - len(found.tensors)},
        "differences": [_tensor_json(difference) for difference in shown],
        "values": [
            {"key": one.key} | _values_json("a", one.key, one.a) | _values_json("b", one.key, one.b)
            for one in found.values
        ],
    }


def _tensor_json(difference: TensorDifference) -> dict[str, Any]:
    from toolkit.checkpoint.format.jsonvalues import encode

    answer: dict[str, Any] = {"key": difference.key, "what": difference.what}
    for side, record in (("a", difference.a), ("b", difference.b)):
        answer[side] = None if record is None else {"dtype": record.dtype, "shape": list(record.shape)}
    if difference.numbers is not None:
        answer |= {name: encode(value, name) for name, value in asdict(difference.numbers).items()}
    return answer | ({"why": difference.why} if difference.why else {})


def _values_json(side: str, key: str, value: Any) -> dict[str, Any]:
    """Return the JSON of one side; {} if it lacks the key, because null would be a value."""
    from toolkit.checkpoint.contents.differences import MISSING
    from toolkit.checkpoint.format.jsonvalues import encode

    return {} if value is MISSING else {side: encode(value, key)}


def _print(found: Compared, shown: list[TensorDifference]) -> None:
    for name, side in (("A", found.a), ("B", found.b)):
        click.echo(plain(f"{name}: {side.folder} (step {side.manifest.step}, {side.manifest.world_size} ranks)"))
    if shown:
        print_out(_table(shown))
    for one in found.values:
        click.echo(plain(one.key) + f": {_value(one.a)} -> {_value(one.b)}")
    differ = len(found.tensors)
    hidden = f" ({differ - len(shown)} not shown)" if len(shown) < differ else ""
    words = [f"{found.compared - differ} of {found.compared} tensors are equal"]
    words += [f"{count} {word}" for what, word in _WORDS.items() if (count := _count(found.tensors, what))]
    words += [f"{len(found.values)} values differ"] if found.values else []
    click.echo(", ".join(words) + hidden)


def _count(tensors: list[TensorDifference], what: str) -> int:
    return sum(1 for difference in tensors if difference.what == what)


def _value(value: Any) -> str:
    from toolkit.checkpoint.contents.differences import MISSING

    return "(none)" if value is MISSING else shortened(value)


def _table(shown: list[TensorDifference]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("", no_wrap=True)
    for title in ("elements", "largest", "relative", "norm", "of norm"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in shown:
        numbers = _columns(one.numbers) if one.numbers is not None else [""] * 5
        table.add_row(
            Text(plain(one.key)),
            "differs" if one.what == "values" else _WORDS[one.what],
            *numbers,
            Text(plain(_remark(one))),
        )
    return table


def _columns(numbers: NumberDifference) -> list[str]:
    return [
        f"{numbers.differing} of {numbers.elements}", f"{numbers.largest:.3g}", f"{numbers.largest_relative:.3g}",
        f"{numbers.norm:.3g}", f"{numbers.relative_norm:.3g}",
    ]  # fmt: skip


def _remark(one: TensorDifference) -> str:
    if one.what == "damaged":
        return one.why
    if one.a is None or one.b is None:
        record = one.a or one.b
        return "" if record is None else _form(record)
    remarks = [] if (one.a.dtype, one.a.shape) == (one.b.dtype, one.b.shape) else [f"{_form(one.a)} -> {_form(one.b)}"]
    if one.numbers is not None and (one.numbers.nans_a or one.numbers.nans_b):
        remarks.append(f"NaN: {one.numbers.nans_a} -> {one.numbers.nans_b}")
    return ", ".join(remarks)


def _form(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"
