"""The resolved job: every value that a run needs, from all layers. The compute half reads only this."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.component import ComponentTable, ResolvedComponent
from toolkit.config.container import ContainerTable, JobContainerTable
from toolkit.config.data import DataTable
from toolkit.config.document import DEEPEST, Origin, OriginInComponent, leaves, no_json, parts
from toolkit.config.env import EnvTable, NotifyTable, RestartTable
from toolkit.config.job import JobTable
from toolkit.config.site import (
    GpuTable,
    LauncherTable,
    NetworkTable,
    PartitionTable,
    PathsTable,
    SchedulerTable,
    Site,
    SiteEnvTable,
    SiteIdentity,
)
from toolkit.config.table import Table, key, refuse_value
from toolkit.config.train import ParallelTable, TrainTable
from toolkit.errors import ToolkitError

__all__ = [
    "ResolvedJob", "as_json", "is_elsewhere", "likely_secrets", "looks_secret", "shown", "shown_arguments",
    "shown_job", "shown_origin", "shown_tables",
]  # fmt: skip


class JobFile(Table):
    """A job file."""

    job: JobTable = key(..., "What runs, and which resources it requests.")
    component: list[ComponentTable] = key(
        None,
        "One component of a heterogeneous job; the first one leads, with the batch host and rank 0.",
        form="tables [[component]]",
        default_factory=list,
    )
    env: EnvTable = key(None, "The ranks' environment.", default_factory=EnvTable)
    container: JobContainerTable = key(None, "The container that ranks run in.", default_factory=JobContainerTable)
    restart: RestartTable = key(None, "How often a run may start again.", default_factory=RestartTable)
    notify: NotifyTable = key(None, "Who is notified of a run's events.", default_factory=NotifyTable)
    checkpoint: CheckpointTable = key(None, "When the state is saved.", default_factory=CheckpointTable)
    data: DataTable = key(None, "The input of the job.", default_factory=DataTable)
    train: TrainTable = key(None, "The training loop's numbers.", default_factory=TrainTable)
    parallel: ParallelTable = key(None, "How the model is distributed over the ranks.", default_factory=ParallelTable)
    args: dict[str, Any] = key(None, "The script's own values, in any form.", form="any values", default_factory=dict)

    @field_validator("args")
    @classmethod
    def check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Reject values that would not reach the script unchanged."""
        for path, part, depth in parts(args):
            if depth > DEEPEST:
                raise refuse_value(path, f"nested more than {DEEPEST} levels deep", "reduce the nesting")
            if problem := no_json(part):
                raise refuse_value(path, problem, "write it as a string that the script reads")
        return args


class ResolvedJob(BaseModel):
    """A job with every layer applied, the site that it runs on, and the origin of each value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    job_file: Path
    job_directory: Path
    code_directory: Path | None = None  # a copy of the job's folder for a run
    argv: list[str] = []

    job: JobTable
    component: list[ComponentTable] = []
    resolved_components: list[ResolvedComponent] = []  # one for each component
    env: EnvTable
    container: JobContainerTable
    restart: RestartTable
    notify: NotifyTable = NotifyTable()
    checkpoint: CheckpointTable
    data: DataTable
    train: TrainTable
    parallel: ParallelTable
    args: dict[str, Any] = {}

    site: SiteIdentity
    scheduler: SchedulerTable
    launcher: LauncherTable
    gpu: GpuTable
    site_env: SiteEnvTable
    network: NetworkTable
    paths: PathsTable
    site_container: ContainerTable
    partition_limits: PartitionTable | None = None

    origins: dict[str, Origin] = {}

    def origin(self, key: str) -> Origin:
        """Return the origin of the value of the dotted `key` ("train.steps")."""
        return self.origins.get(key, Origin("built-in"))

    @property
    def components(self) -> tuple[ResolvedJob, ...]:
        """The job of each component of a heterogeneous job; any other job is its own only component."""
        if not self.resolved_components:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "job": one.job, "partition_limits": one.partition_limits, "resolved_components": [],
                    "origins": {**self.origins, **self._origins_in(number)},
                }
            )
            for number, one in enumerate(self.resolved_components)
        )  # fmt: skip

    def _origins_in(self, number: int) -> dict[str, Origin]:
        """The origins of a component's values, under the keys of [job] that they replace; those that [job] sets are not included."""
        own: dict[str, Origin] = {}
        for name in ComponentTable.model_fields:
            origin = self.origin(f"component[{number}].{name}")
            if origin.layer in ("built-in", "site", "derived") or origin != self.origin(f"job.{name}"):
                own[f"job.{name}"] = OriginInComponent(origin.layer, origin.detail, number)
        return own

    @property
    def nodes(self) -> int | str:
        """The number of nodes of all components; for one component also a range, as it is written."""
        first, *others = self.components
        return sum((one.job.min_nodes for one in others), first.job.min_nodes) if others else first.job.nodes

    @property
    def rank_counts(self) -> range:
        """Every number of ranks that the job may have."""
        first, *others = self.components
        more, each = sum(one.job.min_nodes * one.job.ranks_per_node for one in others), first.job.ranks_per_node
        return range(first.job.min_nodes * each + more, first.job.max_nodes * each + more + 1, each)

    def placed(self, error: ToolkitError) -> ToolkitError:
        """An error about keys of this job, such as "train.steps", with the origins of their values."""
        for one in (error, *error.others):
            one.where = self.origin(one.where).place(one.where)
        return error

    @property
    def code_folder(self) -> Path:
        """The folder of the entry: the run's copy of the job's folder, else that folder."""
        return self.code_directory or self.job_directory

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, tables in the file's order."""
        unseen = {"origins", "schema_version", "code_directory", "component", "resolved_components"}
        for path, value in leaves(self.model_dump(by_alias=True, mode="json", exclude=unseen)):
            yield ".".join(path), value
        for number, one in enumerate(self.resolved_components):
            for name in ComponentTable.model_fields:
                yield f"component[{number}].{name}", getattr(one.job, name)

    def to_json(self) -> str:
        """Write the whole job as one line of JSON; `from_json` reads it back."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str) -> ResolvedJob:
        """Read what `to_json` wrote.

        Raises:
            ToolkitError: the string is not a resolved job of this version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ToolkitError(
                f"expected a resolved job of this version: {first['msg']}",
                where=".".join(str(part) for part in first["loc"]) or "resolved job",
                fix="submit the job file again with this version of toolkit",
            ) from error


def as_json(value: Any) -> str:
    """One value as a table shows it; TOML's dates as strings, and control characters escaped."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def derive(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """Return the job with its partitions chosen and the unset keys derived, also those of each component.

    Nothing is derived from a partition that the site does not have; `check_request` rejects it.
    """
    return derive_parallel(_derive_components(resolved, _derive_job(resolved, site), site))


def _derive_components(stated: ResolvedJob, resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """The job with each component's values derived from its own, and from those that [job] sets."""
    origins = {key: origin for key, origin in resolved.origins.items() if not key.startswith("component[")}
    components = []
    for number, table in enumerate(stated.component):
        own = {f"job.{name}": stated.origin(f"component[{number}].{name}") for name in table.stated}
        one = _derive_job(
            stated.model_copy(
                update={"job": stated.job.model_copy(update=table.stated), "origins": {**stated.origins, **own}}
            ),
            site,
        )
        components.append(ResolvedComponent(job=one.job, partition_limits=one.partition_limits))
        for name in ComponentTable.model_fields:
            if f"job.{name}" in one.origins:
                origins[f"component[{number}].{name}"] = one.origins[f"job.{name}"]
    return resolved.model_copy(update={"resolved_components": components, "origins": origins})


def _derive_job(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    job: dict[str, Any] = {}
    origins = dict(resolved.origins)

    def fill(name: str, value: Any, origin: Origin) -> None:
        if f"job.{name}" not in origins:
            job[name] = value
            origins[f"job.{name}"] = origin

    if resolved.job.repeat > 1:
        fill("requeue", False, Origin("derived", "job.repeat"))
    if site.scheduler.kind == "local" and resolved.origin("job.cluster").layer == "SBATCH_*":
        # Sites that set SLURM_CLUSTERS in every shell mean it for Slurm's own commands.
        job["cluster"] = ""
        del origins["job.cluster"]
    if site.scheduler.cluster:
        fill("cluster", site.scheduler.cluster, site.origins.get("scheduler.cluster", Origin("site")))
    away = is_elsewhere(job.get("cluster", resolved.job.cluster), site)
    name = resolved.job.partition or ("" if away else site.default_partition)
    limits = None if away else site.partitions.get(name)
    if limits is not None:
        where = {key: site.origins.get(f"partitions.{name}.{key}") for key in PartitionTable.model_fields}
        source = Origin("site", f"partition {name}")
        fill("partition", name, where["default"] or source)
        for key in ("qos", "constraint"):
            if getattr(limits, key):
                fill(key, getattr(limits, key), where[key] or source)
        if limits.gpus_per_node:
            # A rank uses one GPU, so a job that sets fewer ranks needs fewer GPUs.
            stated = resolved.job.ranks_per_node if "job.ranks_per_node" in origins else limits.gpus_per_node
            fill("gpus_per_node", min(stated, limits.gpus_per_node), where["gpus_per_node"] or source)
    gpus = job.get("gpus_per_node", resolved.job.gpus_per_node)
    fill("ranks_per_node", gpus or 1, Origin("derived", "job.gpus_per_node"))
    ranks = job.get("ranks_per_node", resolved.job.ranks_per_node)
    if limits is not None and limits.gpus_per_node and gpus:
        share = limits.cpus_per_node * gpus // (limits.gpus_per_node * ranks)
        fill("cpus_per_rank", max(1, share), Origin("derived", f"the CPUs of partition {name}"))

    return resolved.model_copy(
        update={"job": resolved.job.model_copy(update=job), "partition_limits": limits, "origins": origins}
    )


def is_elsewhere(cluster: str, site: Site) -> bool:
    """True if the job's cluster differs from the one whose partitions the site file lists."""
    return cluster not in ("", site.scheduler.cluster or site.detect.cluster_name)


def derive_parallel(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the unset keys of [parallel] derived."""
    parallel, origins = resolved.parallel, dict(resolved.origins)
    if "parallel.zero" not in origins:
        parallel = parallel.model_copy(update={"zero": 3 if parallel.shard > 1 else 0})
        origins["parallel.zero"] = Origin("derived", "parallel.shard")
    if "parallel.stages_per_rank" not in origins and parallel.pp > 1 and parallel.schedule == "interleaved":
        parallel = parallel.model_copy(update={"stages_per_rank": 2})
        origins["parallel.stages_per_rank"] = Origin("derived", "parallel.schedule")
    return resolved.model_copy(update={"parallel": parallel, "origins": origins})


HIDDEN = "***"


# A variable is recognised by the last part of its name; a script's argument only by unambiguous names, unlike `pad_token`.
_SECRET_NAME = re.compile(r"(?i).*(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|\w*KEY)")


_ARGUMENT = re.compile(r"(?i).*(?:^|_)(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH_TOKEN)")


# GitHub, GitLab, Hugging Face, OpenAI and others, AWS, Slack, a private key, a JSON web token.
_VALUE = re.compile(
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
)


_NO_SECRET = re.compile(r"|\d+|(?i:true|false|yes|no|on|off|none)|[/~.].*")  # numbers, switches and paths


def looks_secret(key: str, value: Any) -> bool:
    """True if the value of a dotted key is likely a secret in plain text."""
    if not isinstance(value, str):
        return False
    if _VALUE.search(value):
        return True
    table, _, name = key.rpartition(".")
    of_variable = table in ("env.vars", "site_env.vars", "network.vars")
    telling = _SECRET_NAME if of_variable else _ARGUMENT
    in_question = of_variable or key.startswith("args.")
    return in_question and bool(telling.fullmatch(name)) and not _NO_SECRET.fullmatch(value)


def shown(key: str, value: Any) -> Any:
    """A value that is safe to print: `***` for what looks like a secret."""
    if isinstance(value, list):
        return [shown(key, one) for one in value]
    return HIDDEN if looks_secret(key, value) else value


def shown_origin(key: str, origin: Origin) -> Origin:
    """An origin that is safe to print: that of a `--set` contains the value."""
    name, equals, value = origin.detail.partition("=")
    return Origin(origin.layer, f"{name}={HIDDEN}") if equals and looks_secret(key, value) else origin


def shown_job(job: ResolvedJob) -> dict[str, Any]:
    """A resolved job that is safe to print."""
    content = shown_tables(job.model_dump(mode="json", by_alias=True, exclude={"origins"}))
    return content | {"origins": {key: asdict(shown_origin(key, origin)) for key, origin in job.origins.items()}}


def shown_tables(content: dict[str, Any], above: str = "") -> dict[str, Any]:
    """A tree of tables that is safe to print."""
    return {
        name: shown_tables(value, f"{above}{name}.") if isinstance(value, dict) else shown(f"{above}{name}", value)
        for name, value in content.items()
    }


def shown_arguments(arguments: list[str]) -> list[str]:
    """A command line that is safe to record: without the values that look like secrets."""
    kept = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        secret = equals and looks_secret(key.lstrip("-"), value)
        kept.append(f"{key}={HIDDEN}" if secret else _VALUE.sub(HIDDEN, argument))
    return kept


def likely_secrets(job: ResolvedJob) -> Iterator[str]:
    """The dotted keys of a job whose values look like secrets."""
    for name, value in job.values():
        values = value if isinstance(value, list) else [value]
        if any(looks_secret(name, one) for one in values):
            yield name
