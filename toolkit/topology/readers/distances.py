"""The matrix of distances between NUMA nodes: 10 from a node to itself, and as far back as forth."""

from collections.abc import Mapping, Sequence

SELF = 10  # by ACPI, the unit of all others
Row = tuple[int, tuple[int, ...] | None]  # the line that it stands on, and its distances


def read_distances(
    nodes: Sequence[int], rows: Mapping[int, Row], line: int, warnings: list[str]
) -> tuple[tuple[int | None, ...], ...]:
    """The distances from each of `nodes` to each, None where a row is damaged or two do not agree.

    `line` is that of the header, for rows that are not there.
    """
    matrix: list[list[int | None]] = []
    for place, node in enumerate(nodes):
        at, cells = rows.get(node, (line, None))
        if node not in rows:
            warnings.append(f"line {line}: there is no row of distances of node {node}")
        elif cells is not None and len(cells) != len(nodes):
            warnings.append(
                f"line {at}: {len(cells)} distances of node {node} for {len(nodes)} nodes; none is believed"
            )
            cells = None
        elif cells is not None and (cells[place] != SELF or min(cells) < SELF):
            warnings.append(f"line {at}: the distances of node {node} have not {SELF} to itself; none is believed")
            cells = None
        matrix.append(list(cells) if cells is not None else [None] * len(nodes))
    for i, one in enumerate(nodes):
        for j, other in enumerate(nodes[:i]):
            forth, back = matrix[i][j], matrix[j][i]
            if forth is not None and back is not None and forth != back:
                warnings.append(
                    f"line {rows[one][0]}: from node {one} to {other} it is {forth}, back {back}; neither is believed"
                )
                matrix[i][j] = matrix[j][i] = None
    return tuple(tuple(row) for row in matrix)
