"""How tensor-parallel ranks split the modules of a model: the styles of `Outline.tensor`, checked against the model.

The part of a module on one rank, by style:

    column            nn.Linear (out, in): out / tp outputs and their biases, from the full input.
    column by NAME    the same, in whole groups; attribute NAME of the parent module is their number, as in
                      "column by heads" if the outputs of a head are adjacent.
    row               nn.Linear (out, in): in / tp inputs, which "column" produces; outputs are summed over ranks.
    embedding         nn.Embedding (rows, width): rows / tp rows; outputs are summed over ranks.
    embedding_column  nn.Embedding (rows, width): width / tp columns; outputs are gathered.
    norm              nn.LayerNorm, nn.RMSNorm, nn.Dropout, replicated; works on each position of the residual stream.
    piece             the same modules between "column" and "row", replicated; works on the rank's heads or features.
    head              nn.Linear (vocabulary, width): vocabulary / tp outputs; logits are a DTensor, from which
                      nn.functional.cross_entropy computes the loss without gathering.
    head_gathered     the same with gathered logits, for any other loss.

"column" and "row" are from M. Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from torch import nn

from toolkit.config.table import nearest
from toolkit.config.train import ParallelTable
from toolkit.errors import ToolkitError
from toolkit.parallel.outline import Outline

_WHOLE = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)
_TAKES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "embedding_column": (nn.Embedding,),
    "norm": _WHOLE,
    "piece": _WHOLE,
    "head": (nn.Linear,),
    "head_gathered": (nn.Linear,),
}
_WHERE = "outline.tensor"


@dataclass(frozen=True)
class Split:
    """The split of one module: its style, and the number and kind of groups that are distributed over ranks."""

    word: str
    pieces: int = 0
    kind: str = ""


def tensor_plan(model: nn.Module, outline: Outline, parallel: ParallelTable, size: int) -> dict[str, Split]:
    """Return the split of each module over `parallel.tp` tensor-parallel ranks, by name; empty for one rank.

    An invalid outline is rejected for a single rank as well, so that its author notices early.

    Args:
        model: the whole model, before it is cut or split; it may be on the meta device.
        size: the number of ranks of the job.

    Raises:
        ToolkitError: the outline does not match the model, or the model is not divisible.
    """
    if parallel.tp > 1 and not outline.tensor:
        raise ToolkitError(
            f"parallel.tp is {parallel.tp}, but the Outline of {type(model).__name__} has no style for any module",
            where=_WHERE,
            fix=f"list the modules in Outline.tensor, each with one of {_words()}, or set parallel.tp to 1",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    plan: dict[str, Split] = {}
    for pattern, word in outline.tensor.items():
        for name in _matching(pattern, modules, type(model).__name__):
            if name in plan and plan[name].word != word.partition(" ")[0]:
                raise ToolkitError(
                    f"{name} has the style {plan[name].word!r} from one pattern and {word!r} from {pattern!r}",
                    where=_WHERE,
                    fix=f"let only one pattern match {name}",
                )
            plan[name] = _split(name, word, pattern, modules)
    if parallel.tp == 1:
        return {}
    _check_sizes(plan, parallel, size)
    if parallel.sequence:
        _check_nothing_left(model, plan)
    return plan


def _matching(pattern: str, modules: Mapping[str, nn.Module], model: str) -> list[str]:
    expression = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    found = [name for name in modules if expression.fullmatch(name)]
    if not found:
        with_stars = {re.sub(r"\.\d+(?=\.|$)", ".*", name) if "*" in pattern else name for name in modules if name}
        raise ToolkitError(
            f"{model} has no module {pattern!r}",
            where=_WHERE,
            fix=f"use one of its modules: {', '.join(nearest(pattern, with_stars) or sorted(with_stars))[:200]}",
        )
    return found


def _split(name: str, given: str, pattern: str, modules: Mapping[str, nn.Module]) -> Split:
    word, _, attribute = given.partition(" by ")
    module = modules[name]
    if word not in _TAKES or (attribute and word != "column"):
        raise ToolkitError(
            f"{given!r} is not a valid style for {name}",
            where=_WHERE,
            fix=f"use {' or '.join(nearest(word, _TAKES)) or _words()}",
        )
    is_own_norm = _TAKES[word] is _WHOLE and type(module).__name__.endswith("RMSNorm")  # of models of transformers
    if not is_own_norm and not isinstance(module, _TAKES[word]):
        right = [other for other, kinds in _TAKES.items() if isinstance(module, kinds)]
        takes = " or ".join(f"nn.{kind.__name__}" for kind in _TAKES[word])
        raise ToolkitError(
            f"the style {word!r} requires {takes}, but {name} is a {type(module).__name__}",
            where=_WHERE,
            fix=f"use one of {', '.join(right)}" if right else f"use the name of the {takes} in {name}",
        )
    if attribute:
        count = _count_of(modules[name.rpartition(".")[0]], attribute, given, name)
        return Split(word, count, f"{attribute} of {pattern.rpartition('.')[0] or 'the model'}")
    sizes = {
        "column": ("outputs", "out_features"),
        "row": ("inputs", "in_features"),
        "embedding": ("rows", "num_embeddings"),
        "embedding_column": ("columns", "embedding_dim"),
        "head": ("outputs", "out_features"),
        "head_gathered": ("outputs", "out_features"),
    }
    if word not in sizes:
        return Split(word)
    kind, size = sizes[word]
    return Split(word, getattr(module, size), f"{kind} of {pattern}")


def _count_of(owner: nn.Module, attribute: str, given: str, name: str) -> int:
    count = getattr(owner, attribute, None)
    if not isinstance(count, int) or count < 1:
        counts = [known for known, value in vars(owner).items() if isinstance(value, int) and not known.startswith("_")]
        raise ToolkitError(
            f"{name}: {given!r} needs a number of groups as {type(owner).__name__}.{attribute}, got {count!r}",
            where=_WHERE,
            fix=f"use an attribute that is a number: {', '.join(nearest(attribute, counts) or counts) or 'heads'}",
        )
    return count


def _check_sizes(plan: Mapping[str, Split], parallel: ParallelTable, size: int) -> None:
    uneven = {split.kind: split.pieces for split in plan.values() if split.pieces % parallel.tp}
    if not uneven:
        return
    *first, last = (f"{pieces} {kind}" for kind, pieces in uneven.items())
    raise ToolkitError(
        f"{', '.join(first)}{' and ' if first else ''}{last} are not divisible by {parallel.tp} tensor-parallel ranks",
        where="parallel.tp",
        fix=_fitting(gcd(*(split.pieces for split in plan.values())), parallel.tp, size)
        or "set parallel.tp to 1, or change these numbers to "
        + " and ".join(str(-(-pieces // parallel.tp) * parallel.tp) for pieces in uneven.values()),
    )


def _fitting(divisor: int, ranks: int, size: int) -> str:
    """Return a fix with the values of `parallel.tp` nearest to `ranks` that divide `divisor`; "" if only 1 does.

    The number of data-parallel ranks does not change, so an evenly split batch stays even.
    """
    possible = [number for number in range(2, divisor + 1) if divisor % number == 0]
    below, above = [n for n in possible if n < ranks][-1:], [n for n in possible if n > ranks][:1]
    words = [f"{number} with {size // ranks * number} ranks" for number in below + above]
    return f"set parallel.tp to {' or '.join(words)}" if words else ""


def _check_nothing_left(model: nn.Module, plan: Mapping[str, Split]) -> None:
    left = list(unplanned(model, plan))
    if left:
        raise ToolkitError(
            f"parallel.sequence requires a style for each module with parameters, because gradients from slices of the "
            f"sequence must be summed; missing: {', '.join(left[:5])}{' and others' if len(left) > 5 else ''}",
            where=_WHERE,
            fix=f"set a style for {left[0]}, one of {_words()}, or set parallel.sequence to false",
        )


def unplanned(model: nn.Module, plan: Mapping[str, Split]) -> Iterator[str]:
    """Yield the names of modules that have their own parameters but are not in the plan."""
    for name, module in model.named_modules():
        if name not in plan and any(True for _ in module.parameters(recurse=False)):
            yield name or "the model itself"


def _words() -> str:
    return ", ".join(map(repr, _TAKES))
