"""Which numbers of micro-batches a pipeline takes: the arithmetic, for the check at submit and for the ranks."""

from __future__ import annotations

from toolkit.config.parallel import ParallelTable

SEVERAL_STAGES = ("interleaved", "zero_bubble")  # schedules of ranks with several stages


def no_micro_batches(parallel: ParallelTable, number: int) -> str:
    """Why `number` micro-batches a step are none that this pipeline takes; "" where it takes them."""
    said = f"{number} micro-batch{'' if number == 1 else 'es'} a step"
    if number < parallel.pp:
        return f"{said}: too few for the {parallel.pp} ranks of the pipeline"
    rounds = number // parallel.pp
    if parallel.schedule in SEVERAL_STAGES and number % rounds:
        return (
            f'{said} do not divide into {rounds} equal rounds over {parallel.pp} ranks (schedule "{parallel.schedule}")'
        )
    return ""


def fitting_micro_batch(parallel: ParallelTable, share: int, wanted: int) -> int:
    """The samples of a micro-batch nearest to `wanted` that make `share` samples a step fit; 0 where none do."""
    fits = [size for size in range(1, share + 1) if share % size == 0 and not no_micro_batches(parallel, share // size)]
    return min(fits, key=lambda size: (abs(size - wanted), size), default=0)


def micro_batch_fix(parallel: ParallelTable, share: int, wanted: int, data_ranks: int) -> str:
    """What to write so that it fits; `wanted` is the present `train.micro_batch`, 0 for a share in one piece."""
    size = fitting_micro_batch(parallel, share, wanted or share)
    if size:
        return f"micro_batch = {size}"
    size = max(1, wanted)
    present = share // size
    fits = [number for number in range(1, present + 2 * parallel.pp) if not no_micro_batches(parallel, number)]
    number = min(fits, key=lambda number: (abs(number - present), number))
    return f"batch = {data_ranks * number * size} with micro_batch = {size}"
