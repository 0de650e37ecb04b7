"""A recorded job with some values replaced: what a resume on another shape runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from toolkit.config.checks import check_request
from toolkit.config.layers import lay_over
from toolkit.config.origins import Flag
from toolkit.config.refusal import refusal
from toolkit.config.resolved import JobFile, ResolvedJob
from toolkit.config.site import Site


def amend_job(
    recorded: ResolvedJob,
    *,
    site: Site,
    settings: Sequence[str] = (),
    flags: Mapping[str, Flag] | None = None,
) -> ResolvedJob:
    """Lay settings and flags over a resolved job, and check the result against its site.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the new request.
    """
    content = recorded.model_dump(mode="json", by_alias=True)
    values = {name: content[name] for name in JobFile.model_fields}
    origins = lay_over(values, settings, flags or {})
    try:
        tables = JobFile.model_validate(values)
    except ValidationError as error:
        raise refusal(error, JobFile, lambda path: origins[".".join(path)].detail) from error
    changes = {name: getattr(tables, name) for name in JobFile.model_fields}
    amended = recorded.model_copy(update={**changes, "origins": recorded.origins | origins})
    check_request(amended, site)
    return amended
