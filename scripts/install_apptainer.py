"""Unpack Debian sid's Apptainer to ~/.toolkit/apptainer, beside the system's own packages, for the tests of containers.

Debian 12 has no Apptainer, and sid's needs a newer C library than it has. So its packages are fetched and checked by apt
with lists of its own, unpacked into one folder, and its two programs are told to load the C library from there. Nothing of
the system changes but `patchelf` and `squashfs-tools`. Where this fails, the tests that need it are skipped, with the reason.
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
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"{argv[0]} failed with code {done.returncode}: {said[-1] if said else 'no word'}")
    return done.stdout


def download(folder: Path) -> list[Path]:
    """The packages of sid as files; the system's own lists of packages stay as they are."""
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
    # Away from /usr, the program takes usr for its prefix, and its starter takes usr/lib.
    (tree / "var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)
    for link, target in (("usr/etc", "../etc"), ("usr/var", "../var"), ("usr/lib/etc", "../../etc"), ("usr/lib/var", "../../var")):  # fmt: skip
        (tree / link).symlink_to(target)
    configuration = tree / "etc/apptainer/apptainer.conf"
    text = configuration.read_text()
    # Root of a virtual machine or a container may lack some of root's rights; "full" requests all of them.
    full, none = "root default capabilities = full", "root default capabilities = no"
    if full not in text:
        raise OSError(f"{configuration} does not hold {full!r}")
    configuration.write_text(text.replace(full, none))


def use_own_libraries(tree: Path, home: Path) -> None:
    """Programs of `tree`, which will be renamed to `home`, load the libraries that were unpacked with them."""
    (loader,) = tree.glob("usr/lib/*/ld-linux-*.so.*")
    libraries = home / loader.parent.relative_to(tree)
    for program in (tree / "usr/bin/apptainer", *tree.glob("usr/lib/*/apptainer/bin/starter")):
        run("patchelf", "--set-interpreter", str(libraries / loader.name), "--force-rpath", "--set-rpath", str(libraries), program)  # fmt: skip


def install() -> str:
    """Its version."""
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
        print(f"[apptainer] {present} is there", flush=True)
        return
    try:
        print(f"[apptainer] {install()} of Debian sid is in {HOME}", flush=True)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"[apptainer] not installed, tests that need it are skipped: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
