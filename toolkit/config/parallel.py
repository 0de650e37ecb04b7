"""The table [parallel]: how the model is distributed over the ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.table import Table, key

DDP_BUCKET_MB = 25.0  # torch's own default


class ParallelTable(Table):
    """ranks = pp x replicate x shard x cp x tp; ep divides shard x cp."""

    replicate: int = key(0, "Copies of the model; 0 uses the ranks that the other dimensions leave.", ge=0)
    shard: int = key(1, "Ranks over which parameters and optimizer state are sharded.", ge=1)
    zero: Literal[0, 1, 2, 3] = key(
        0,
        "What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.",
        derived="3 when `shard` > 1, else 0",
    )
    tp: int = key(1, "Tensor parallel ranks.", ge=1)
    sequence: bool = key(
        False,
        "With `tp` > 1: between the split matrices, each rank keeps only its part of the sequence, for norms and dropout.",
    )
    pp: int = key(1, "Ranks of a pipeline, each with `stages_per_rank` of its stages.", ge=1)
    cp: int = key(1, "Context parallel ranks.", ge=1)
    ep: int = key(1, "Expert parallel ranks, out of shard x cp.", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = key(
        "1f1b", "The order in which the ranks of a pipeline run micro-batches forward and backward."
    )
    stages_per_rank: int = key(
        1,
        "Pipeline stages of each rank; more than one requires `interleaved` or `zero_bubble`.",
        derived='2 with `schedule = "interleaved"`, else 1',
        ge=1,
    )
    balance: Literal["measured", "parameters", "even"] = key(
        "measured",
        "What is balanced when blocks are assigned to pipeline stages: their time on rank 0, their parameters, their number.",
    )
    wrap: Literal["blocks", "size"] = key(
        "blocks",
        "What a sharded model gathers at once: the model's blocks, or modules with at least `wrap_parameters` parameters.",
    )
    wrap_parameters: int = key(
        1_000_000, 'Minimum number of parameters of a module that is gathered separately, with `wrap = "size"`.', ge=1
    )
    gather_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Type in which sharded parameters are gathered and computed with; `as_is` is their stored type."
    )
    reduce_type: Literal["as_is", "fp32", "bf16"] = key(
        "as_is", "Type in which the gradients of sharded parameters are summed; `as_is` is their own type."
    )
    unused_parameters: bool = key(
        False, "Search for parameters without a gradient in every step, for models that skip some of their parts."
    )
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["measured"] = key(
        DDP_BUCKET_MB,
        "MiB of gradients that replicas sum at once; `measured` tries some sizes before the first step, and may choose "
        "another one in a later attempt, whose sums then differ in their last bits.",
        form='a number above 0, or "measured"',
    )
    reduction: Literal["auto", "flat", "hierarchical", "measured"] = key(
        "auto",
        "How gradients are summed; `auto` is hierarchical on several nodes with several ranks each, `measured` measures the "
        "links for a few seconds (only on the CPU; later attempts on the same nodes reuse the result).",
    )
    placement: Literal["auto", "launched"] = key(
        "auto",
        "Which rank has which position in the mesh; `auto` places it on NVLink cliques, nodes and leaf switches if that is "
        "predicted to be faster, `launched` keeps the ranks in their order.",
    )

    @property
    def model_ranks(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.pp * self.shard * self.cp * self.tp

    def sizes(self, ranks: int) -> dict[str, int]:
        """Ranks of each dimension in the mesh's order, then `ep`; `replicate` 0 uses the rest of `ranks`."""
        replicate = self.replicate or max(1, ranks // self.model_ranks)
        return {"pp": self.pp, "replicate": replicate, "shard": self.shard, "cp": self.cp, "tp": self.tp, "ep": self.ep}
