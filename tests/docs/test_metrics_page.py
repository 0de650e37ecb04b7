"""The page on metrics: its configuration of Prometheus is valid, and its scripts fill W&B and MLflow offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from recorded_runs import record_steps

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
WANDB, MLFLOW = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("packages", "script", "check"),
    [
        (["wandb"], WANDB, "import pathlib, sys; print(len(list(pathlib.Path(sys.argv[1]).rglob('*.wandb'))))"),
        (
            ["mlflow-skinny", "sqlalchemy", "alembic"], MLFLOW,
            "import mlflow, sys; mlflow.set_tracking_uri(f'sqlite:///{sys.argv[1]}/mlflow.db'); "
            "print(int(mlflow.search_runs(output_format='list')[0].data.metrics['loss'] == 2.5))",
        ),
    ],
    ids=["wandb", "mlflow"],
)  # fmt: skip
def test_the_scripts_work_offline(toolkit, packages, script, check):
    run = toolkit.submit(toolkit.job("true"), "--wait")
    record_steps(run.attempt(0), 5)
    folder = toolkit.folder / "out"
    folder.mkdir()
    venv.create(toolkit.folder / "venv", with_pip=True)
    python = toolkit.folder / "venv" / "bin" / "python"
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"pip cannot install {packages[0]}")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([python, "-c", script, run.path, folder], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = subprocess.run([python, "-c", check, folder], capture_output=True, text=True)
    assert found.stdout.strip() == "1", found
