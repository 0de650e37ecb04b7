"""The resolved job: every value that a run needs, merged from all layers. Supervisor and ranks read only this."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from toolkit.config.adapters import AdaptersTable
from toolkit.config.alerts import AlertsTable
from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.component import ComponentTable, ResolvedComponent
from toolkit.config.container import ContainerTable, JobContainerTable
from toolkit.config.data import DataTable
from toolkit.config.document import DEEPEST, Origin, OriginInComponent, leaves, no_json, parts
from toolkit.config.env import EnvTable, NotifyTable, RestartTable
from toolkit.config.gradient_compression import GradientCompressionTable
from toolkit.config.job import JobTable, check_sbatch_options
from toolkit.config.local_sgd import LocalSgdTable
from toolkit.config.memory_presets import preset_values
from toolkit.config.observe import ObserveTable
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
from toolkit.slurm.times import meant_as_hours

__all__ = [
    "JobFile", "ResolvedJob", "as_json", "is_elsewhere", "likely_secrets", "looks_secret", "shown", "shown_arguments",
    "shown_job", "shown_origin", "shown_tables",
]  # fmt: skip


class JobFile(Table):
    """A job file."""

    job: JobTable = key(..., "What runs, and the resources that it requests.")
    component: list[ComponentTable] = key(
        None,
        "One component of a heterogeneous job. The first component contains the batch host and rank 0.",
        form="tables [[component]]",
        default_factory=list,
    )
    env: EnvTable = key(None, "The environment of the ranks.", default_factory=EnvTable)
    container: JobContainerTable = key(None, "The container that ranks run in.", default_factory=JobContainerTable)
    restart: RestartTable = key(None, "How often a run may start again.", default_factory=RestartTable)
    notify: NotifyTable = key(None, "Whom to notify of events of a run.", default_factory=NotifyTable)
    alerts: AlertsTable = key(None, "Alerts on a running job.", default_factory=AlertsTable)
    observe: ObserveTable = key(None, "What toolkit records of a run.", default_factory=ObserveTable)
    checkpoint: CheckpointTable = key(None, "When to save, and what to keep.", default_factory=CheckpointTable)
    data: DataTable = key(None, "The input data of the job.", default_factory=DataTable)
    train: TrainTable = key(None, "Hyperparameters and options of the training loop.", default_factory=TrainTable)
    parallel: ParallelTable = key(None, "How the model is distributed over the ranks.", default_factory=ParallelTable)
    gradient_compression: GradientCompressionTable = key(
        None, "Compression of exchanged gradients.", default_factory=GradientCompressionTable
    )
    local_sgd: LocalSgdTable = key(
        None, "Exchanges of parameters every few steps, instead of gradients.", default_factory=LocalSgdTable
    )
    adapters: AdaptersTable = key(None, "Low-rank adapters on a frozen base.", default_factory=AdaptersTable)
    args: dict[str, Any] = key(
        None, "Arguments for the job script; any keys are allowed.", form="any values", default_factory=dict
    )

    @field_validator("component")
    @classmethod
    def check_components(cls, components: list[ComponentTable], info: ValidationInfo) -> list[ComponentTable]:
        """Check the sbatch options of components, except those of a script, as `JobTable` does for the whole job."""
        is_script = "job" in info.data and info.data["job"].once
        for number, one in enumerate(() if is_script else components):
            check_sbatch_options(one.sbatch or [], (str(number), "sbatch"))
        return components

    @field_validator("args")
    @classmethod
    def check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Reject values that JSON cannot pass to the script unchanged."""
        for path, part, depth in parts(args):
            if depth > DEEPEST:
                raise refuse_value(path, f"nested more than {DEEPEST} levels deep", "reduce the nesting")
            if problem := no_json(part):
                raise refuse_value(path, problem, "write the value as a string, and parse the string in the script")
        return args


class ResolvedJob(BaseModel):
    """A job with every layer applied, the site on which it runs, and the origin of each value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    job_file: Path
    job_directory: Path
    code_directory: Path | None = None  # the copy of the job folder for this run, if there is one
    argv: list[str] = []  # arguments after `--`, which follow `job.argv`

    job: JobTable
    component: list[ComponentTable] = []
    resolved_components: list[ResolvedComponent] = []  # one for each component
    env: EnvTable
    container: JobContainerTable
    restart: RestartTable
    notify: NotifyTable = NotifyTable()
    alerts: AlertsTable = AlertsTable()
    observe: ObserveTable = ObserveTable()
    checkpoint: CheckpointTable
    data: DataTable
    train: TrainTable
    parallel: ParallelTable
    gradient_compression: GradientCompressionTable = GradientCompressionTable()
    local_sgd: LocalSgdTable = LocalSgdTable()
    adapters: AdaptersTable = AdaptersTable()
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
        """One job per component of a heterogeneous job; otherwise only the job itself."""
        if not self.resolved_components:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "job": one.job, "partition_limits": one.partition_limits, "resolved_components": [],
                    "gpu": one.gpu or self.gpu,
                    "origins": {**self.origins, **self._origins_in(number)},
                }
            )
            for number, one in enumerate(self.resolved_components)
        )  # fmt: skip

    def _origins_in(self, number: int) -> dict[str, Origin]:
        """Return the origins of the values that a component does not share with [job], by the keys of [job]."""
        own: dict[str, Origin] = {}
        for name in ComponentTable.model_fields:
            origin = self.origin(f"component[{number}].{name}")
            if origin.layer in ("built-in", "site", "derived") or origin != self.origin(f"job.{name}"):
                own[f"job.{name}"] = OriginInComponent(origin.layer, origin.detail, number)
        return own

    @property
    def has_warning(self) -> bool:
        """Whether Slurm signals the job before its walltime; a script that requests no signal gets none, as from sbatch."""
        return not self.job.once or self.restart.walltimes != 0 or "restart.warn_s" in self.origins

    @property
    def nodes(self) -> int | str:
        """The number of nodes of all components; for a job without components, `job.nodes`, which may be a range."""
        first, *others = self.components
        return sum((one.job.min_nodes for one in others), first.job.min_nodes) if others else first.job.nodes

    @property
    def rank_counts(self) -> range:
        """Every total number of ranks that the job may have."""
        if self.job.ranks:
            return range(self.job.ranks, self.job.ranks + 1)
        first, *others = self.components
        more, each = sum(one.job.min_nodes * one.job.ranks_per_node for one in others), first.job.ranks_per_node
        return range(first.job.min_nodes * each + more, first.job.max_nodes * each + more + 1, each)

    def placed(self, error: ToolkitError) -> ToolkitError:
        """Return `error` with each dotted key in `where`, such as "train.steps", replaced by the place of its value."""
        for one in (error, *error.others):
            one.where = self.origin(one.where).place(one.where)
        return error

    @property
    def arguments(self) -> list[str]:
        """All arguments of the entry: those of `job.argv`, then those after `--`."""
        return [*self.job.argv, *self.argv]

    @property
    def code_folder(self) -> Path:
        """The folder to which the entry is relative: the copy of the job folder if there is one, else the job folder."""
        return self.code_directory or self.job_directory

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, with the tables in the order of the file."""
        unseen = {"origins", "schema_version", "code_directory", "component", "resolved_components"}
        for path, value in leaves(self.model_dump(by_alias=True, mode="json", exclude=unseen)):
            yield ".".join(path), value
        for number, one in enumerate(self.resolved_components):
            for name in ComponentTable.model_fields:
                yield f"component[{number}].{name}", getattr(one.job, name)

    def to_json(self) -> str:
        """Return the whole job as one line of JSON, for `from_json`."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str) -> ResolvedJob:
        """Parse the result of `to_json`.

        Raises:
            ToolkitError: the string is not a resolved job of this version of toolkit.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ToolkitError(
                f"not a resolved job of this version of toolkit: {first['msg']}",
                where=".".join(str(part) for part in first["loc"]) or "resolved job",
                fix="submit the job file again with this version of toolkit",
            ) from error


def as_json(value: Any) -> str:
    """Return a value as JSON for display, with dates as strings and control characters escaped."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def derive(resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """Return the job with default partitions and with the unset keys derived, also in each component.

    Nothing is derived from a partition that the site does not list; `check_request` rejects such a partition.
    """
    job = _derive_components(resolved, _derive_job(_derive_restart(resolved), site), site)
    return derive_parallel(_derive_memory(_derive_warning(job)))


def _derive_restart(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job without restarts that sbatch would not make, if it is a script that sets none."""
    if not resolved.job.once:
        return resolved
    unset = [name for name in ("crashes", "walltimes") if f"restart.{name}" not in resolved.origins]
    origins = resolved.origins | {f"restart.{name}": Origin("derived", "job.once") for name in unset}
    restart = resolved.restart.model_copy(update=dict.fromkeys(unset, 0))
    return resolved.model_copy(update={"restart": restart, "origins": origins})


def _derive_warning(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with a later warning if the default of `restart.warn_s` is more than a quarter of its walltime."""
    time_s, warn_s = resolved.job.time_s, resolved.restart.warn_s
    # A plain number of minutes without room for the warning is left to the check, which asks whether hours were meant.
    is_short = time_s is not None and time_s < 4 * warn_s and (time_s > warn_s or not meant_as_hours(resolved.job.time))
    if not is_short or not resolved.has_warning or "restart.warn_s" in resolved.origins:
        return resolved
    restart = resolved.restart.model_copy(update={"warn_s": max(1, (time_s or 0) // 4)})
    origins = resolved.origins | {"restart.warn_s": Origin("derived", "job.time")}
    return resolved.model_copy(update={"restart": restart, "origins": origins})


def _derive_components(stated: ResolvedJob, resolved: ResolvedJob, site: Site) -> ResolvedJob:
    """Return the job with the values of each component derived from its own keys and those of [job]."""
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
        components.append(ResolvedComponent(job=one.job, partition_limits=one.partition_limits, gpu=one.gpu))
        if number == 0:  # all ranks have the environment and the launcher of the first node
            resolved = resolved.model_copy(
                update={name: getattr(one, name) for name in ("site_env", "network", "launcher")}
            )
            origins |= {key: one.origins[key] for key, _ in _OF_PARTITION.values() if key in one.origins}
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
        # Some sites export SLURM_CLUSTERS in every shell, which must not prevent a job on this machine.
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
        if limits.gpus_per_node and not resolved.job.once:
            # Each rank uses one GPU, so a job with fewer ranks than GPUs needs only as many GPUs as ranks.
            stated = resolved.job.ranks_per_node if "job.ranks_per_node" in origins else limits.gpus_per_node
            fill("gpus_per_node", min(stated, limits.gpus_per_node), where["gpus_per_node"] or source)
    if resolved.job.once:  # a script requests only what it states
        return _with_partition(resolved, job, limits, origins, site)
    gpus = job.get("gpus_per_node", resolved.job.gpus_per_node)
    fill("ranks_per_node", gpus or 1, Origin("derived", "job.gpus_per_node"))
    ranks = job.get("ranks_per_node", resolved.job.ranks_per_node)
    if limits is not None and limits.gpus_per_node and gpus:
        share = limits.cpus_per_node * gpus // (limits.gpus_per_node * ranks)
        fill("cpus_per_rank", max(1, share), Origin("derived", f"the CPUs of partition {name}"))

    return _with_partition(resolved, job, limits, origins, site)


# Keys of a partition, and the keys of the site that they replace, as a resolved job and as a site names them.
_OF_PARTITION = {
    "gpu_request": ("gpu.request", "gpu"), "modules": ("site_env.modules", "env"),
    "interface": ("network.interface", "network"), "launcher": ("launcher.kind", "launcher"),
}  # fmt: skip


def _with_partition(
    resolved: ResolvedJob, job: Mapping[str, Any], limits: PartitionTable | None, origins: Mapping[str, Origin], site: Site
) -> ResolvedJob:  # fmt: skip
    """Return the job with derived values, its partition, and the keys of the partition that replace keys of the site."""
    changed: dict[str, Any] = {
        "job": resolved.job.model_copy(update=job), "partition_limits": limits, "origins": {**origins},
    }  # fmt: skip
    for own, (replaced, table_of_site) in _OF_PARTITION.items():
        table, _, name = replaced.partition(".")
        value, place = getattr(limits, own, None), f"partitions.{changed['job'].partition}.{own}"
        had_one = getattr(resolved.partition_limits, own, None) not in (None, "")
        if had_one and value in (None, ""):  # the job had another partition before
            value, place = getattr(getattr(site, table_of_site), name), f"{table_of_site}.{name}"
        if value not in (None, ""):
            changed[table] = getattr(resolved, table).model_copy(update={name: value})
            changed["origins"][replaced] = site.origins.get(place, Origin("site", place))
    return resolved.model_copy(update=changed)


def is_elsewhere(cluster: str, site: Site) -> bool:
    """Return whether the job is for another cluster than the one whose partitions the site file lists."""
    return cluster not in ("", site.scheduler.cluster or site.detect.cluster_name)


def _derive_memory(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the values of its preset `train.memory`."""
    if resolved.train.memory == "none":
        return resolved
    origins = dict(resolved.origins)
    changed = {}
    found = preset_values(resolved.train, resolved.parallel, max(resolved.rank_counts), origins)
    for table, values in found.items():
        changed[table] = getattr(resolved, table).model_copy(update=values)
        origins |= {f"{table}.{key}": Origin("derived", f'train.memory = "{resolved.train.memory}"') for key in values}
    return resolved.model_copy(update={**changed, "origins": origins})


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


# The last part of a variable name identifies a secret. Script arguments need stricter names, because `pad_token` is not a secret.
_SECRET_NAME = re.compile(r"(?i).*(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|\w*KEY)")


_ARGUMENT = re.compile(r"(?i).*(?:^|_)(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|PRIVATE_KEY|AUTH_TOKEN)")


# Tokens of GitHub, GitLab, Hugging Face, OpenAI (and others with sk-), AWS and Slack; a private key; a JSON Web Token.
_VALUE = re.compile(
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
)


_NO_SECRET = re.compile(r"|\d+|(?i:true|false|yes|no|on|off|none)|[/~.].*")  # never secret: numbers, booleans and paths


def looks_secret(key: str, value: Any) -> bool:
    """Return whether the value of a dotted key is probably a secret in plain text."""
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
    """Return a value that is safe to print, with `***` in place of a probable secret."""
    if isinstance(value, list):
        return [shown(key, one) for one in value]
    return HIDDEN if looks_secret(key, value) else value


def shown_origin(key: str, origin: Origin) -> Origin:
    """Return an origin that is safe to print: the origin of a `--set` contains the value, which may be a secret."""
    name, equals, value = origin.detail.partition("=")
    return Origin(origin.layer, f"{name}={HIDDEN}") if equals and looks_secret(key, value) else origin


def shown_job(job: ResolvedJob) -> dict[str, Any]:
    """Return a resolved job as a dict that is safe to print."""
    content = shown_tables(job.model_dump(mode="json", by_alias=True, exclude={"origins"}))
    return content | {"origins": {key: asdict(shown_origin(key, origin)) for key, origin in job.origins.items()}}


def shown_tables(content: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested tables that are safe to print; `above` is the dotted prefix of their keys."""
    return {
        name: shown_tables(value, f"{above}{name}.") if isinstance(value, dict) else shown(f"{above}{name}", value)
        for name, value in content.items()
    }


def shown_arguments(arguments: list[str]) -> list[str]:
    """Return a command line that is safe to record, with `***` in place of probable secrets."""
    kept = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        secret = equals and looks_secret(key.lstrip("-"), value)
        kept.append(f"{key}={HIDDEN}" if secret else _VALUE.sub(HIDDEN, argument))
    return kept


def likely_secrets(job: ResolvedJob) -> Iterator[str]:
    """Yield the dotted keys of a job whose values are probably secrets."""
    for name, value in job.values():
        values = value if isinstance(value, list) else [value]
        if any(looks_secret(name, one) for one in values):
            yield name
