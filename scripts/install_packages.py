"""Install the Debian packages for the dev cluster and the tests, without starting their services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from toolkit.devcluster.packages import PACKAGES  # noqa: E402

# The tests use gcc for programs of MPI, strace to interrupt processes that save checkpoints, mkfs.ext4 for small disks
# that become full, tmux for shells of sessions, zsh and fish for shell completion, and Prometheus with its programs for
# `toolkit metrics`.
NEEDED = (
    *PACKAGES, "gcc", "libc6-dev", "strace", "e2fsprogs", "tmux", "zsh", "fish", "prometheus", "prometheus-alertmanager",
    "prometheus-pushgateway",
)  # fmt: skip
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """Return the packages that dpkg does not list as installed."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *NEEDED]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    installed = {line.split()[0] for line in lines if line.endswith(" installed")}
    return [name for name in NEEDED if name not in installed]


def main() -> None:
    names = missing()
    if not names:
        print("[packages] Slurm, MPI, MariaDB and the test tools are already installed", flush=True)
        return
    print(f"[packages] apt-get install {' '.join(names)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # In Debian, a policy-rc.d that denies every action keeps packages from starting their daemons.
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
        sys.exit(f"[packages] {' '.join(error.cmd[:2])} exited with code {error.returncode}")
    finally:
        if own_policy:
            POLICY.unlink()


if __name__ == "__main__":
    main()
