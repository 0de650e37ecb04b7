"""Check the matrix of distances between NUMA nodes, which is symmetric and has 10 on its diagonal."""

from collections.abc import Mapping, Sequence

SELF = 10  # the distance of a node to itself in ACPI
Row = tuple[int, tuple[int, ...] | None]  # (line number, distances, or None if the row is damaged)


def read_distances(
    nodes: Sequence[int], rows: Mapping[int, Row], line: int, warnings: list[str]
) -> tuple[tuple[int | None, ...], ...]:
    """Return the distances between all `nodes`; None if a row is damaged, or if the two directions differ.

    `line` is the line number of the header, which warnings about missing rows name.
    """
    matrix: list[list[int | None]] = []
    for place, node in enumerate(nodes):
        at, cells = rows.get(node, (line, None))
        if node not in rows:
            warnings.append(f"line {line}: no row with the distances of node {node}")
        elif cells is not None and len(cells) != len(nodes):
            warnings.append(
                f"line {at}: expected {len(nodes)} distances of node {node}, got {len(cells)}; the row is ignored"
            )
            cells = None
        elif cells is not None and (cells[place] != SELF or min(cells) < SELF):
            warnings.append(
                f"line {at}: expected distance {SELF} from node {node} to itself, none smaller; row ignored"
            )
            cells = None
        matrix.append(list(cells) if cells is not None else [None] * len(nodes))
    for i, one in enumerate(nodes):
        for j, other in enumerate(nodes[:i]):
            forth, back = matrix[i][j], matrix[j][i]
            if forth is not None and back is not None and forth != back:
                warnings.append(
                    f"line {rows[one][0]}: distance {forth} from node {one} to {other}, but {back} back; both are ignored"
                )
                matrix[i][j] = matrix[j][i] = None
    return tuple(tuple(row) for row in matrix)
