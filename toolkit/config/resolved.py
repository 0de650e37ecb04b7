"""The resolved job: every value that a run needs, from all layers. The compute half reads nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from toolkit.config.checkpoint import CheckpointTable
from toolkit.config.container import ContainerTable, JobContainerTable
from toolkit.config.data import DataTable
from toolkit.config.document import leaves
from toolkit.config.env import EnvTable
from toolkit.config.job import JobTable
from toolkit.config.origins import Origin
from toolkit.config.parallel import ParallelTable
from toolkit.config.restart import RestartTable
from toolkit.config.site import (
    GpuTable,
    LauncherTable,
    NetworkTable,
    PartitionTable,
    PathsTable,
    SchedulerTable,
    SiteEnvTable,
    SiteIdentity,
)
from toolkit.config.table import Table, key, refuse_value
from toolkit.config.train import TrainTable
from toolkit.config.values import DEEPEST, no_json, parts
from toolkit.errors import ToolkitError


class JobFile(Table):
    """A job file."""

    job: JobTable = key(..., "What runs, and which resources it asks for.")
    env: EnvTable = key(None, "The ranks' environment.", default_factory=EnvTable)
    container: JobContainerTable = key(None, "The container that ranks run in.", default_factory=JobContainerTable)
    restart: RestartTable = key(None, "How often a run may start again.", default_factory=RestartTable)
    checkpoint: CheckpointTable = key(None, "When state is saved.", default_factory=CheckpointTable)
    data: DataTable = key(None, "What the job reads.", default_factory=DataTable)
    train: TrainTable = key(None, "The training loop's numbers.", default_factory=TrainTable)
    parallel: ParallelTable = key(None, "How the model is laid on the ranks.", default_factory=ParallelTable)
    args: dict[str, Any] = key(None, "Free: the script's own.", form="any values", default_factory=dict)

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        for path, part, depth in parts(args):
            if depth > DEEPEST:
                raise refuse_value(path, f"lies more than {DEEPEST} tables and lists deep", "write it flatter")
            if said := no_json(part):
                raise refuse_value(path, said, "write it as a text that the script reads")
        return args


class ResolvedJob(BaseModel):
    """A job with every layer applied, the site that it runs on, and where each value came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    job_file: Path
    job_directory: Path
    argv: list[str] = []

    job: JobTable
    env: EnvTable
    container: JobContainerTable
    restart: RestartTable
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
        """Return where the value of the dotted `key` ("train.steps") came from."""
        return self.origins.get(key, Origin("built-in"))

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield every value with its dotted key, tables in the file's order."""
        content = self.model_dump(by_alias=True, mode="json", exclude={"origins", "schema_version"})
        for path, value in leaves(content):
            yield ".".join(path), value

    def to_json(self) -> str:
        """Write the whole job as one line of JSON; `from_json` reads it back."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str) -> ResolvedJob:
        """Read what `to_json` wrote.

        Raises:
            ToolkitError: the text is not a resolved job of this version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ToolkitError(
                f"not a resolved job of this version: {first['msg']}",
                where=".".join(str(part) for part in first["loc"]) or "resolved job",
                fix="submit the job file again with this version of toolkit",
            ) from error


def as_json(value: Any) -> str:
    """Write one value as a table shows it; dates of TOML as text, and what a terminal would obey as its number."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
