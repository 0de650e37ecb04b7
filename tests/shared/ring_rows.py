"""The records of a ring as mappings."""

from toolkit.metrics.ring import Steps


def rows_of(steps: Steps) -> list[dict[str, float]]:
    """Each step as {"ended_s": ..., "step": ..., metric: value}."""
    rows = []
    for at in range(len(steps)):
        one = steps.cut(at, at + 1)
        values = {name: found[0] for name in one.names if (found := one.values(name))}
        rows.append({"ended_s": one.ended_s()[0], "step": one.numbers()[0]} | values)
    return rows
