"""A recorded job with some values replaced: what a resume on another shape runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from toolkit.config.checks import check_request
from toolkit.config.derive import derive
from toolkit.config.layers import lay_over
from toolkit.config.origins import Flag, Origin
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

    What once followed from other values (the ranks from the GPUs, the QOS from the partition) follows anew.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the new request.
    """
    content = recorded.model_dump(by_alias=True)
    values = {name: content[name] for name in JobFile.model_fields}
    origins = {}
    for key, origin in recorded.origins.items():
        table, _, name = key.partition(".")
        if _followed(key, origin):
            del values[table][name]
        else:
            origins[key] = origin
    origins |= lay_over(values, settings, flags or {})
    try:
        tables = JobFile.model_validate(values)
    except ValidationError as error:
        unknown = Origin("built-in", str(recorded.job_file))
        raise refusal(error, JobFile, lambda path: origins.get(".".join(path), unknown).detail) from error
    changes = {name: getattr(tables, name) for name in JobFile.model_fields}
    amended = derive(recorded.model_copy(update={**changes, "origins": origins}), site)
    check_request(amended, site)
    return amended


def _followed(key: str, origin: Origin) -> bool:
    if key == "job.name":
        return False  # It names the run's folder, and that stays.
    return origin.layer == "derived" or (origin.layer == "site" and key.startswith("job."))
