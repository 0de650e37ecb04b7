"""A bar of ASCII letters, for terminals whose users want no colours (https://no-color.org)."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

WIDTH = 30  # letters, without the brackets


def plain_bar(done: float, total: float | None) -> Text:
    """`[######........................]`; empty while the total is unknown."""
    made = min(WIDTH, int(WIDTH * done / total)) if total else 0
    return Text(f"[{'#' * made}{'.' * (WIDTH - made)}]")


class PlainBarColumn(ProgressColumn):
    """`plain_bar` in place of rich's own column."""

    def render(self, task: Task) -> Text:
        """The bar of a task as it is now."""
        return plain_bar(task.completed, task.total)
