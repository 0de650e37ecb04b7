"""Install the Debian packages of the dev cluster and of the tests, without starting any of their services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from toolkit.devcluster.packages import PACKAGES  # noqa: E402

# strace interrupts the processes that save checkpoints, mkfs.ext4 makes the small disks that they fill, tmux keeps the
# shells of sessions, and zsh and fish test completion.
NEEDED = (*PACKAGES, "strace", "e2fsprogs", "tmux", "zsh", "fish")
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """The packages that dpkg does not list as installed."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *NEEDED]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    installed = {line.split()[0] for line in lines if line.endswith(" installed")}
    return [name for name in NEEDED if name not in installed]


def main() -> None:
    names = missing()
    if not names:
        print("[packages] Slurm, MPI, MariaDB and the tools of the tests are installed", flush=True)
        return
    print(f"[packages] apt-get install {' '.join(names)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Debian's method to install a daemon without starting it: a policy that denies it.
    own_policy = not POLICY.exists()
    if own_policy:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        subprocess.run(["apt-get", "update", "-qq"], env=environment, check=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names], env=environment, check=True
        )
    except subprocess.CalledProcessError as error:
        sys.exit(f"[packages] {' '.join(error.cmd[:2])} failed with code {error.returncode}")
    finally:
        if own_policy:
            POLICY.unlink()


if __name__ == "__main__":
    main()
