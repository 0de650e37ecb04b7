"""The tables [container] of a site file and of a job file: the container that ranks run in."""

from typing import Annotated, Literal

from pydantic import StringConstraints, ValidationInfo, field_validator

from toolkit.config.table import Table, key, refuse_value

Text = Annotated[str, StringConstraints(min_length=1)]
_WITHOUT_ENVIRONMENT = frozenset({"-e", "--cleanenv", "-C", "--containall"})
_MOUNTS = 'a list such as ["/scratch", "/data/v2:/data", "/sw:/sw:ro"]'


class JobContainerTable(Table):
    """The image that this job's ranks run in; the site sets the runtime that starts it."""

    image: str = key(
        "", "Container image: a file, folder or URL that the runtime accepts. Empty uses the image of the site, if any."
    )
    mounts: list[Text] = key(
        None,
        "Host folders to mount in addition to the run directory, the job folder and toolkit, as SOURCE, SOURCE:TARGET or "
        "SOURCE:TARGET:ro.",
        form=_MOUNTS,
        default_factory=list,
    )
    python: Text = key("python3", "Python interpreter in the image that runs the ranks, 3.11 or newer.")

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: list[str]) -> list[str]:
        return check_mounts(mounts)


class ContainerTable(Table):
    """How this site runs containers. Without a runtime, jobs cannot use containers. `image` applies to all jobs."""

    runtime: Literal["", "apptainer", "pyxis"] = key(
        "", "Container runtime that starts each rank; empty if the site has none."
    )
    image: str = key("", "Image for jobs that do not set one; empty for no container.")
    mounts: list[Text] = key(None, "Host folders to mount for every job.", form=_MOUNTS, default_factory=list)
    options: list[Text] = key(
        None,
        "Additional options for the runtime; with pyxis, for srun.",
        form='a list of options such as ["--nv"]',
        default_factory=list,
    )

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: list[str]) -> list[str]:
        return check_mounts(mounts)

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: list[str], table: ValidationInfo) -> list[str]:
        for option in options:
            if table.data.get("runtime") == "apptainer" and option in _WITHOUT_ENVIRONMENT:
                raise refuse_value(
                    (),
                    f"{option!r} removes the variables that Slurm and MPI set for each rank",
                    "use --contain instead",
                )
        return options


def check_mounts(mounts: list[str]) -> list[str]:
    """Reject mounts with a comma, at which a runtime would split its list of mounts, and paths that are not absolute."""
    for mount in mounts:
        parts = mount.split(":")
        flags = parts[2:]
        if len(parts) > 3 or flags not in ([], ["ro"], ["rw"]) or "," in mount:
            raise refuse_value((), f"expected SOURCE:TARGET:ro, got {mount!r}")
        if not all(part.startswith("/") for part in parts[:2]):
            raise refuse_value((), f"expected absolute paths, got {mount!r}")
    return mounts
