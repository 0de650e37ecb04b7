"""The table [observe]: what toolkit records about the steps of a run."""

from toolkit.config.table import Table, key


class ObserveTable(Table):
    """What toolkit records while a run is active."""

    record: bool = key(
        True,
        "Record the time of each step on every rank, in shared memory on its node. It costs 2 to 25 microseconds of processor "
        "time per step.",
    )
