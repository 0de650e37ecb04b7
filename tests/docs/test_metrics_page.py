"""The page on metrics: its configuration of Prometheus is valid."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_configuration_of_prometheus_is_valid(toolkit):
    (config,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    folder = toolkit.folder
    (folder / "prometheus.yml").write_text(config)
    (folder / "rules.yml").write_text(toolkit.ok("metrics", "rules"))
    (secret,) = re.findall(r"credentials_file: ([^}]+)\}", config)
    (folder / secret).parent.mkdir(parents=True)
    (folder / secret).write_text("token")
    done = subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "5 rules found" in done.stdout, done
