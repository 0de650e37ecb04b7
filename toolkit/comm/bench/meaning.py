"""What each operation is given for the check, and what every rank must hold after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.comm.bench.trial import NOTHING, pattern, pattern_sum


@dataclass(frozen=True)
class Meaning:
    """One operation on `elements` of all data, for one rank of a number of ranks. The root is rank 0.

    In send_recv every rank sends to the next and receives from the one before, as in nccl-tests.
    """

    operation: str
    rank: int
    ranks: int
    elements: int
    device: str

    @property
    def part(self) -> int:
        """The elements of one rank, where data is divided."""
        return self.elements // self.ranks

    def handed_in(self) -> torch.Tensor:
        """What this rank puts in."""
        if self.operation == "all_gather":
            return pattern(self.rank, self.part, device=self.device)
        if self.operation == "broadcast" and self.rank != 0:
            return torch.full((self.elements,), NOTHING, device=self.device)
        return pattern(self.rank, self.elements, device=self.device)

    def expected(self) -> torch.Tensor | None:
        """What this rank must hold; None where it gets nothing."""
        first, device = self.rank * self.part, self.device
        if self.operation == "all_reduce":
            return pattern_sum(self.ranks, self.elements, device=device)
        if self.operation == "reduce":
            return pattern_sum(self.ranks, self.elements, device=device) if self.rank == 0 else None
        if self.operation == "reduce_scatter":
            return pattern_sum(self.ranks, self.part, first, device)
        if self.operation == "all_gather":
            return torch.cat([pattern(rank, self.part, 0, device) for rank in range(self.ranks)])
        if self.operation == "all_to_all":
            return torch.cat([pattern(rank, self.part, first, device) for rank in range(self.ranks)])
        if self.operation == "broadcast":
            return pattern(0, self.elements, device=device)
        assert self.operation == "send_recv"
        return pattern((self.rank - 1) % self.ranks, self.elements, device=device)
