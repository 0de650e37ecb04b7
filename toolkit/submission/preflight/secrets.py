"""Check the sources of job secrets, and warn about values that look like secrets."""

from collections.abc import Mapping

from toolkit.config.resolved import ResolvedJob, likely_secrets, looks_secret, shown_origin
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.supervise.secrets import read_reference, read_secret_file, read_url
from toolkit.terminal.talk import say


def check_secrets(job: ResolvedJob, environ: Mapping[str, str]) -> None:
    """Check that the sources of [env] secrets and of [notify] exist; commands run only on the batch host.

    Raises:
        ToolkitError: a variable is not set, a file is missing or readable by others, or the webhook is not a URL.
    """
    for name, reference in job.env.secrets.items():
        where = job.origin(f"env.secrets.{name}").place(f"env.secrets.{name}")
        if reference == "env" and not environ.get(name):
            raise ToolkitError(
                f"{name} is not set in this shell",
                where=where,
                fix=f'export {name}, or write {name} = "file:~/.{name.lower()}"',
            )
        if reference.startswith("file:"):
            try:
                read_secret_file(reference.removeprefix("file:"), where=where)
            except OwnFailureError as error:
                raise ToolkitError(error.message, where=where, fix=error.fix) from error
    for key, reference in job.notify.references.items():
        try:
            (read_url if key == "webhook" else read_reference)(reference, environ, f"notify.{key}")
        except OwnFailureError as error:
            where = job.origin(f"notify.{key}").place(f"notify.{key}")
            raise ToolkitError(error.message, where=where, fix=error.fix) from error


def warn_of_likely_secrets(job: ResolvedJob) -> None:
    """Warn about values that look like secrets: the script and the record of the run would contain them."""
    for key in likely_secrets(job):
        name = key.rpartition(".")[2]
        fix = (
            f'write {name} = "env" or "file:PATH" into [env.secrets]' if key.startswith("env.") else "use [env.secrets]"
        )
        place = shown_origin(key, job.origin(key)).place(key)
        say(f"{place}: looks like a secret, and the run's files would contain it. Fix: {fix}")
    if any(looks_secret("", word) for word in job.arguments):
        say(
            "an argument of the entry looks like a secret, and the run's files would contain it. Fix: use [env.secrets]"
        )
