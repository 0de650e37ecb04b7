"""The numbers of micro-batches that a pipeline accepts: the arithmetic, for the check at submit and for the ranks."""

from __future__ import annotations

from toolkit.config.parallel import ParallelTable

SEVERAL_STAGES = ("interleaved", "zero_bubble")  # schedules of ranks with several stages


def no_micro_batches(parallel: ParallelTable, number: int) -> str:
    """Why a pipeline cannot run `number` micro-batches per step; "" if it can."""
    amount = f"{number} micro-batch{'' if number == 1 else 'es'} per step"
    if number < parallel.pp:
        return f"{amount}: too few for the {parallel.pp} ranks of the pipeline"
    rounds = number // parallel.pp
    if parallel.schedule in SEVERAL_STAGES and number % rounds:
        return f'{amount} do not divide into {rounds} equal rounds over {parallel.pp} ranks (schedule "{parallel.schedule}")'
    return ""


def fitting_micro_batch(parallel: ParallelTable, share: int, wanted: int) -> int:
    """The size of a micro-batch closest to `wanted` with which `share` samples per step fit; 0 if none does."""
    fits = [size for size in range(1, share + 1) if share % size == 0 and not no_micro_batches(parallel, share // size)]
    return min(fits, key=lambda size: (abs(size - wanted), size), default=0)


def micro_batch_fix(parallel: ParallelTable, share: int, wanted: int, data_ranks: int) -> str:
    """The settings that fit; `wanted` is the present `train.micro_batch`, 0 for a share in one piece."""
    size = fitting_micro_batch(parallel, share, wanted or share)
    if size:
        return f"micro_batch = {size}"
    size = max(1, wanted)
    present = share // size
    fits = [number for number in range(1, present + 2 * parallel.pp) if not no_micro_batches(parallel, number)]
    number = min(fits, key=lambda number: (abs(number - present), number))
    return f"batch = {data_ranks * number * size} with micro_batch = {size}"
