"""Types of words that name something there is: a run, a job, a site. A shell completes them with what there is now."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class Named(click.ParamType[str]):
    """A word that is taken as it stands. `values` is the function of `completers` that finds what it may be."""

    def __init__(self, name: str, values: str) -> None:
        self.name = name
        self.values = values

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from toolkit.cli import completers

        found: list[CompletionItem] = getattr(completers, self.values)(ctx, incomplete)
        return found


RUN = Named("run", "runs")
RUN_OR_STEP = Named("run", "runs_or_steps")  # RUN, or RUN:STEP
CHECKPOINT = Named("checkpoint", "steps_of_run")
JOB = Named("job", "jobs")
SHIPPED_JOB = Named("job", "shipped")
SITE = Named("site", "sites")
PARTITION = Named("partition", "partitions")
SESSION = Named("session", "sessions")
