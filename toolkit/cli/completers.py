"""Complete values on TAB: runs, steps, jobs, sites, sessions, partitions."""

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import click
from click.shell_completion import CompletionItem

NEWEST = 50  # number of runs that are offered without a typed prefix, and whose states are read


MOST = 5000  # number of runs that are offered with a typed prefix


SINFO_S = 0.1


_UNQUOTED = re.compile(r"[\w.,/~+@%-]+")


def _plain(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def runs(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return `last` and the newest runs; with a prefix, more of them and names of jobs. The help: job name and state."""
    from toolkit.rundir.find import state_on_disk
    from toolkit.rundir.known import known_runs

    folders = _folders_of_runs(ctx)
    if "/" in incomplete:
        return [CompletionItem(incomplete, type="dir")]
    found = _plain(["last"], incomplete)
    if incomplete[:1].isalpha():
        names = {one.name for folder in folders if folder.is_dir() for one in os.scandir(folder) if one.is_dir()}
        found += _plain(sorted(names), incomplete)
    for folder in folders:
        with known_runs(folder) as known:
            for place, run in enumerate(islice(known.with_prefix(incomplete), MOST if incomplete else NEWEST)):
                state = f" {state_on_disk(run)}" if place < NEWEST else ""
                found.append(CompletionItem(run.run_id, help=f"{run.job_name}{state}"))
    return found


def _folders_of_runs(ctx: click.Context) -> list[Path]:
    """Return RUNS and, unless the user chose it, the known folders."""
    from toolkit.rundir.known_folders import known_folders
    from toolkit.runs.named_runs import is_only_folder

    present = _folder_of_runs(ctx)
    return [present] if is_only_folder(ctx.params.get("runs")) else [present, *known_folders(present)]


def _folder_of_runs(ctx: click.Context) -> Path:
    """Resolve RUNS as the command does. The site's value is slow to determine, and cached until a site file changes."""
    from toolkit.rundir.files import runs_folder
    from toolkit.runs.named_runs import runs_of_site

    named = ctx.params.get("runs")
    if named or os.environ.get("TOOLKIT_RUNS"):
        return runs_folder(named, os.environ)
    remembered = _remembered()
    if not remembered.exists():
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(runs_of_site(), encoding="utf-8")
    return runs_folder(None, os.environ, remembered.read_text(encoding="utf-8"))


def _remembered() -> Path:
    """Return the cache file for a machine, an environment and the current site files."""
    import hashlib
    import platform

    from toolkit.config.shipped import site_files

    files = [(str(path), path.stat().st_mtime_ns) for path in site_files().values()]
    settings = [os.environ.get(name) for name in ("TOOLKIT_SITE", "SLURM_CONF", "SLURM_CLUSTER_NAME", "PATH", "USER")]
    digest = hashlib.sha256(repr([platform.node(), files, settings]).encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "toolkit" / f"runs-{digest}"


def runs_or_steps(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return runs, or after a colon the steps of one."""
    name, colon, step = incomplete.partition(":")
    return _steps(ctx, name, step, before=f"{name}:") if colon else runs(ctx, incomplete)


def steps_of_run(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the saved steps of the RUN on the same line. While an option lacks its value, click has not parsed RUN."""
    return _steps(ctx, ctx.params.get("run") or next(iter(ctx.args), "last"), incomplete)


def _steps(ctx: click.Context, run: str, typed: str, *, before: str = "") -> list[CompletionItem]:
    """Return the steps, the newest first."""
    from toolkit.rundir.find import find_run
    from toolkit.rundir.layout import RunDirectory, step_of

    saved = RunDirectory(find_run(run, _folder_of_runs(ctx))).committed_checkpoints()
    steps = [str(step_of(path)) for path in reversed(saved)]
    return [CompletionItem(before + step) for step in steps if step.startswith(typed)]


def jobs(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return shipped jobs, job files and Python scripts. The shell itself completes folders and names that need quotes."""
    from toolkit.rundir.files import typed_path

    typed, slash, name = incomplete.rpartition("/")
    found = [] if slash else shipped(ctx, incomplete)
    beside = typed_path(typed + slash or ".")
    for entry in sorted(beside.iterdir()) if beside.is_dir() else ():
        is_meant = entry.name.startswith(name) and not (entry.name.startswith(".") and not name)
        if is_meant and (entry.suffix in (".toml", ".py") or entry.is_dir()):
            found.append(CompletionItem(typed + slash + entry.name + "/" * entry.is_dir()))
    if all(item.value.endswith("/") for item in found) or not all(_UNQUOTED.fullmatch(item.value) for item in found):
        return [CompletionItem(incomplete, type="file")]
    return found


def shipped(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return shipped jobs."""
    from toolkit.config.shipped import shipped_jobs

    return _plain(shipped_jobs(), incomplete)


def sites(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return sites, and paths of site files."""
    from toolkit.config.shipped import site_files

    return _plain(site_files(), incomplete) or [CompletionItem(incomplete, type="file")]


def sessions(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return sessions."""
    from toolkit.rundir.layout import session_names

    return _plain(session_names(), incomplete)


def partitions(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the partitions in the named site's file, or those of this cluster."""
    from toolkit.config.shipped import partitions_in
    from toolkit.errors import ToolkitError
    from toolkit.slurm.commands import Slurm

    named = ctx.params.get("site") or os.environ.get("TOOLKIT_SITE")
    known = partitions_in(named) if named else []
    if not known:
        try:
            known = Slurm(timeout_s=SINFO_S).call(["sinfo", "--noheader", "--format=%R"]).split()
        except ToolkitError:  # Slurm is missing or slow, so only `auto` is offered
            known = []
    return _plain([*dict.fromkeys(known), "auto"], incomplete)
