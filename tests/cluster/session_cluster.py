"""The cluster of a test session, as its tests use it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import Layout


@dataclass
class RunningCluster:
    """The cluster of this test session."""

    layout: Layout
    slurm_conf: Path = field(init=False)
    folder: Path = field(init=False)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.slurm_conf = self.layout.slurm_conf
        self.folder = self.layout.folder
        outside_a_job = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env = {**outside_a_job, "SLURM_CONF": str(self.slurm_conf)}

    def run(self, *argv: str, timeout_s: float = 60) -> str:
        """Run a command on this machine, the cluster's login node; its stdout. It must end with code 0."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def exec(self, node: str, argv: Sequence[str], *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node."""
        command = devcluster.command_in_node(self.layout, node, argv)
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
