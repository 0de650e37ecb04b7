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
        "", "Image: a file, a folder or a URL in a form that the runtime accepts. Empty uses the site's, if any."
    )
    mounts: list[Text] = key(
        None,
        "Folders of the host that ranks need in addition to those of the run, the job and toolkit, as SOURCE, SOURCE:TARGET or "
        "SOURCE:TARGET:ro.",
        form=_MOUNTS,
        default_factory=list,
    )
    python: Text = key("python3", "The image's Python, 3.11 or newer; it runs the ranks.")

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: list[str]) -> list[str]:
        return check_mounts(mounts)


class ContainerTable(Table):
    """How this site runs containers; without a runtime it runs none. It may also set an image for all jobs."""

    runtime: Literal["", "apptainer", "pyxis"] = key("", "The program that starts the container of each rank.")
    image: str = key("", "Image of jobs that set none; empty for none.")
    mounts: list[Text] = key(
        None, "Folders of the host that every job's ranks need.", form=_MOUNTS, default_factory=list
    )
    options: list[Text] = key(
        None,
        "More options of the runtime; with pyxis, of srun.",
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
    """Reject mounts that a runtime's own list of mounts would split, and folders that are not absolute."""
    for mount in mounts:
        parts = mount.split(":")
        flags = parts[2:]
        if len(parts) > 3 or flags not in ([], ["ro"], ["rw"]) or "," in mount:
            raise refuse_value((), f"expected SOURCE:TARGET:ro, got {mount!r}")
        if not all(part.startswith("/") for part in parts[:2]):
            raise refuse_value((), f"expected absolute paths, got {mount!r}")
    return mounts
