"""Slurm releases of newer Debian suites, each unpacked into its own root directory in the user's cache folder.

Only Slurm's programs load libraries from there: each has the path of its own C library. Jobs use this machine's.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolkit.devcluster.layout import require_shared
from toolkit.devcluster.processes import run_program
from toolkit.errors import OwnFailureError, ToolkitError
from toolkit.terminal.talk import say

__all__ = ["RELEASES", "Release", "install", "release_of"]

PACKAGES = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-mysql-plugin", "patchelf")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# With these settings apt neither reads nor changes the package lists and the cache of this machine.
APT_CONF = """\
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "{folder}/lists";
Dir::State::Status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::http::Timeout "60";
Acquire::Retries "2";
"""


@dataclass(frozen=True)
class Release:
    """A release of Slurm: the Debian suite to install it from, and the value of srun --mpi for its MPI plugin."""

    suite: str
    mpi: str = "pmix"


# Debian removed PMIx from Slurm 26.05.5 (its bug 1149781).
RELEASES = {"22.05": Release(""), "24.11": Release("trixie"), "26.05": Release("sid", mpi="pmi2")}


def release_of(version: str) -> Release:
    """Return the release `version`, by default the one of Debian 12. Raises ToolkitError if it is unknown."""
    try:
        return RELEASES[version or "22.05"]
    except KeyError:
        raise ToolkitError(
            f"expected a supported Slurm release, got {version!r}", fix=f"use one of {', '.join(RELEASES)}"
        ) from None


def install(version: str) -> str:
    """Return the root directory of a release, which is installed if it is missing; "" if this machine has the release.

    Raises OwnFailureError if the packages cannot be downloaded or contain another release, and ToolkitError if only
    another machine can run it.
    """
    suite = release_of(version).suite
    if not version or (present := run_program(["slurmctld", "-V"]).split()[-1]).startswith(f"{version}."):
        return ""
    if not suite:
        raise ToolkitError(
            f"Slurm {version} runs only on Debian 12, but this machine has Slurm {present}", fix="use another release"
        )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit"
    require_shared(folder, "set $XDG_CACHE_HOME to a folder in your home")
    root = folder / f"slurm-{version}"
    with _lock(folder):
        if not root.exists():
            say(f"installing Slurm {version} from Debian {suite} in {root} (about a minute)")
            partial = folder / f"slurm-{version}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _unpack(_download(version, suite, partial), partial / "root", root)
            (partial / "root").rename(root)
            shutil.rmtree(partial)
    return str(root)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Allow one installation at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _download(version: str, suite: str, folder: Path) -> list[Path]:
    """Download the packages and all that they depend on, signed by Debian, and return their files."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n")
    (folder / "apt.conf").write_text(APT_CONF.format(folder=folder))
    environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
    run_program(["apt-get", "-qq", "update"], env=environment)
    run_program(["apt-get", "-qq", "--yes", "--download-only", "install", *PACKAGES], env=environment)
    files = list((folder / "cache" / "archives").glob("*.deb"))
    (found,) = (file.name.split("_")[1] for file in files if file.name.startswith("slurmctld_"))
    if not found.startswith(f"{version}."):
        others = ", ".join(name for name in RELEASES if name != version)
        raise OwnFailureError(
            f"expected Slurm {version} in Debian {suite}, got {found}", fix=f"use another release: {others}"
        )
    return files


def _unpack(files: list[Path], tree: Path, root: Path) -> None:
    """Unpack packages into `tree`, which becomes `root`, and make Slurm's programs use the libraries there."""
    files.sort(key=lambda file: not file.name.startswith("slurm"))
    programs: list[Path] = []
    for file in files:
        if not file.name.startswith("slurm") and not programs:
            programs = [path for path in tree.glob("usr/*bin/*") if not path.is_symlink()]
        run_program(["dpkg-deb", "--extract", str(file), str(tree)])
    (loader,) = tree.glob("usr/lib/*/ld-linux-*.so.*")
    libraries = loader.parent
    (tree / "bin").mkdir()
    inside = root / libraries.relative_to(tree)
    options = ["--set-interpreter", f"{inside}/{loader.name}", "--force-rpath"]
    options += ["--set-rpath", f"{inside}/slurm-wlm:{inside}"]
    patchelf = [str(loader), "--library-path", str(libraries), f"{tree}/usr/bin/patchelf"]
    run_program([*patchelf, *options, *map(str, programs)])
    for program in programs:
        # Debian's alternatives would remove the suffix.
        (tree / "bin" / program.name.removesuffix("-wlm")).symlink_to(f"../{program.relative_to(tree)}")
    for plugin in libraries.glob("slurm-wlm/mpi_pmix*.so"):
        # The plugin would load this machine's PMIx, which is older. The loader replaces $ORIGIN by the plugin's folder.
        compiled = f"/usr/lib/{libraries.name}/pmix2/lib".encode()
        own = b"$ORIGIN/../pmix2/lib".ljust(len(compiled), b"/")
        plugin.write_bytes(plugin.read_bytes().replace(compiled, own))
