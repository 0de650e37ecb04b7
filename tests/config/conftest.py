"""A folder with a job file and its script, and sites as they are written."""

from pathlib import Path

import pytest

from toolkit.config.request import resolve_job
from toolkit.site.load import load_site

SITE = """
name = "cluster"
[partitions.gpu]
default = true
max_nodes = 8
max_time = "1-00:00:00"
cpus_per_node = 64
gpus_per_node = 4
mem_gb_per_node = 512
constraint = "a100"
qos = "regular"
account_required = true
[partitions.cpu]
cpus_per_node = 128
"""


@pytest.fixture
def site(tmp_path: Path):
    path = tmp_path / "sites" / "cluster.toml"
    path.parent.mkdir()
    path.write_text(SITE)
    return load_site(str(path))


@pytest.fixture
def resolve(tmp_path: Path):
    """Write a job file from the lines of [job] and the tables after it, and resolve it."""

    def write_and_resolve(job: str = "", more: str = "", *, site=None, environ=None, text=None, **layers):
        (tmp_path / "train.py").write_text("def main(world, config): ...\n")
        path = tmp_path / "job.toml"
        path.write_text(text if text is not None else f'[job]\nentry = "train.py:main"\n{job}\n{more}\n')
        return resolve_job(path, site=site, environ=environ or {}, **layers)

    return write_and_resolve
