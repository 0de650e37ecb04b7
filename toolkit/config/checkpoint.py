"""The table [checkpoint]: how often the state is saved and how many saves are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value


class CheckpointTable(Table):
    """Saves at stop and at the end are made whatever stands here."""

    every_steps: int = key(200, "Steps between checkpoints; 0 saves only at the end.", ge=0)
    keep_last: int = key(3, "Committed checkpoints that are kept.", ge=1)
    source: str = key("", "Checkpoint folder to begin from; empty takes the run's newest that verifies.")
    take: Literal["all", "weights"] = key(
        "all",
        "What is taken from `source`: everything, or the model's tensors alone, with which a new run begins at step 0. "
        "What the run itself has saved since comes first, with everything.",
    )
    without: list[str] = key(
        None,
        'With `take = "weights"`: tensors or modules of the model, such as `head`, that stay as the job makes them; '
        "`source` may lack them, or hold others. Everything else must be there, by name and shape.",
        form='a list of names such as ["head"]',
        default_factory=list,
    )

    @field_validator("take")
    @classmethod
    def _weights_of_something(cls, take: str, info: ValidationInfo) -> str:
        if take == "weights" and not info.data.get("source"):
            raise refuse_value((), '"weights" needs a checkpoint to take them from', "set checkpoint.source")
        return take

    @field_validator("without")
    @classmethod
    def _without_of_weights(cls, without: list[str], info: ValidationInfo) -> list[str]:
        if without and info.data.get("take") == "all":
            raise refuse_value((), "is for weights alone", 'set checkpoint.take to "weights"')
        return without
