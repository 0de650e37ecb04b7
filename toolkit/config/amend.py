"""A recorded job with some values replaced: what a resume on another shape runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from toolkit.config.checks import check_request, check_words
from toolkit.config.derive import derive
from toolkit.config.document import leaves
from toolkit.config.entry import check_entry
from toolkit.config.layers import Setting, from_command_line, merge
from toolkit.config.metric import check_metric
from toolkit.config.origins import Flag, Origin
from toolkit.config.refusal import refusal
from toolkit.config.resolved import JobFile, ResolvedJob
from toolkit.config.site import Site
from toolkit.config.site_values import origins_of_site, values_of_site


def amend_job(
    recorded: ResolvedJob, *, site: Site, settings: Sequence[str] = (), flags: Mapping[str, Flag] | None = None
) -> ResolvedJob:
    """Lay settings and flags over a resolved job, and check the result against its site.

    What once followed from other values (the ranks from the GPUs, the QOS from the partition) follows anew.

    Raises:
        ToolkitError: a value is wrong, or the site cannot serve the new request.
    """
    content = recorded.model_dump(by_alias=True, include=set(JobFile.model_fields))
    kept = [
        Setting(path, value, recorded.origin(".".join(path)))
        for path, value in leaves(content)
        if _was_set(".".join(path), recorded)
    ]
    values, origins = merge([*kept, *from_command_line(settings, flags or {})])
    try:
        tables = JobFile.model_validate(values)
    except ValidationError as error:
        recorded_in = Origin("job", str(recorded.job_file))
        raise refusal(error, JobFile, lambda path: origins.get(".".join(path), recorded_in).detail) from error
    of_site = {
        key: origin for key, origin in recorded.origins.items() if key.partition(".")[0] not in JobFile.model_fields
    }
    changes = {name: getattr(tables, name) for name in JobFile.model_fields}
    amended = derive(recorded.model_copy(update={**changes, "origins": of_site | origins}), site)
    check_entry(amended)
    check_metric(amended)
    check_words(amended)
    check_request(amended, site)
    return amended


def move_job(recorded: ResolvedJob, site: Site, environ: Mapping[str, str]) -> ResolvedJob:
    """A recorded job with another site's values in place of its own; `amend_job` then checks it there.

    Raises:
        ToolkitError: a path of the site has a variable that `environ` lacks.
    """
    of_job = {key: origin for key, origin in recorded.origins.items() if key.partition(".")[0] in JobFile.model_fields}
    moved = {**values_of_site(site, environ), "origins": of_job | origins_of_site(site)}
    return recorded.model_copy(update=moved)


def nodes_after(recorded: ResolvedJob, settings: Sequence[str]) -> int | str:
    """The nodes of a recorded job once settings are laid over it; nothing is checked yet.

    Raises:
        ToolkitError: a setting cannot be read.
    """
    given = [one.value for one in from_command_line(settings, {}) if one.path == ("job", "nodes")]
    return given[-1] if given else recorded.job.nodes


def _was_set(key: str, recorded: ResolvedJob) -> bool:
    """A value that followed from others is found again; only the name stays, since the run's folder has it."""
    origin = recorded.origin(key)
    return key == "job.name" or origin.layer not in ("built-in", "derived", "site")
