"""The table [checkpoint]: how often the state is saved and how many saves are kept."""

from __future__ import annotations

from toolkit.config.table import Table, key


class CheckpointTable(Table):
    """Saves at stop and at the end are made whatever stands here."""

    every_steps: int = key(200, "Steps between checkpoints; 0 saves only at the end.", ge=0)
    keep_last: int = key(3, "Committed checkpoints that are kept.", ge=1)
    source: str = key("", "Checkpoint folder to begin from; empty takes the run's newest that verifies.")
