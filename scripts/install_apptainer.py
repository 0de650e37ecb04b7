"""Unpack Apptainer from Debian sid to ~/.toolkit/apptainer, separate from system packages, for the container tests.

Debian 12 has no Apptainer, and the one in sid needs a newer C library. So apt downloads and verifies the sid packages
with separate package lists, they are unpacked into one folder, and Apptainer's two programs load the C library from
there. Only `patchelf` and `squashfs-tools` are installed in the system. If this fails, tests that need Apptainer are
skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path.home() / ".toolkit" / "apptainer"
PROGRAM = HOME / "usr" / "bin" / "apptainer"
PACKAGES = ("apptainer", "libc6", "libseccomp2", "libsqlite3-0")
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main\n"


def run(*argv: str | Path, folder: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"{argv[0]} failed with code {done.returncode}: {lines[-1] if lines else 'no output'}")
    return done.stdout


def download(folder: Path) -> list[Path]:
    """Download the sid packages and return their files, without changing the package lists of the system."""
    (folder / "sid.list").write_text(SOURCE)
    (folder / "status").touch()
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    apt = [
        "apt-get", "-qq", "-o", f"Dir::Etc::SourceList={folder}/sid.list", "-o", "Dir::Etc::SourceParts=-",
        "-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::State::Status={folder}/status",
        "-o", f"Dir::Cache={folder}", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none",
    ]  # fmt: skip
    run(*apt, "update")
    run(*apt, "download", *PACKAGES, folder=folder)
    return list(folder.glob("*.deb"))


def unpack(packages: list[Path], tree: Path) -> None:
    for package in packages:
        run("dpkg-deb", "-x", package, tree)
    # When not in /usr, apptainer looks for its files relative to usr, and its starter relative to usr/lib.
    (tree / "var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)
    for link, target in (("usr/etc", "../etc"), ("usr/var", "../var"), ("usr/lib/etc", "../../etc"), ("usr/lib/var", "../../var")):  # fmt: skip
        (tree / link).symlink_to(target)
    configuration = tree / "etc/apptainer/apptainer.conf"
    text = configuration.read_text()
    # root in a container or virtual machine may lack some capabilities, but "full" requests all of them.
    full, none = "root default capabilities = full", "root default capabilities = no"
    if full not in text:
        raise OSError(f"expected {full!r} in {configuration}")
    configuration.write_text(text.replace(full, none))


def use_own_libraries(tree: Path, home: Path) -> None:
    """Make the programs in `tree`, which is later renamed to `home`, load the libraries unpacked with them."""
    (loader,) = tree.glob("usr/lib/*/ld-linux-*.so.*")
    libraries = home / loader.parent.relative_to(tree)
    for program in (tree / "usr/bin/apptainer", *tree.glob("usr/lib/*/apptainer/bin/starter")):
        run("patchelf", "--set-interpreter", str(libraries / loader.name), "--force-rpath", "--set-rpath", str(libraries), program)  # fmt: skip


def install() -> str:
    """Install Apptainer; return its version."""
    if not all(map(shutil.which, ("patchelf", "mksquashfs"))):
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "patchelf", "squashfs-tools")
    HOME.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="apptainer-", dir=HOME.parent) as folder:
        tree = Path(folder) / "tree"
        unpack(download(Path(folder)), tree)
        use_own_libraries(tree, HOME)
        shutil.rmtree(HOME, ignore_errors=True)
        tree.rename(HOME)
    return run(PROGRAM, "--version").strip()


def main() -> None:
    present = shutil.which("apptainer") or (str(PROGRAM) if PROGRAM.exists() else None)
    if present:
        print(f"[apptainer] already installed: {present}", flush=True)
        return
    try:
        print(f"[apptainer] installed {install()} from Debian sid in {HOME}", flush=True)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"[apptainer] not installed, so tests that need it are skipped: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
