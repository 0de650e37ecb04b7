"""Names that docs/python.md and the shipped jobs of ad6182e import, and its train_lm as users have copied it."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.metrics.training import read_train_log
from toolkit.train.moved_modules import MOVED

HERE = Path(__file__).parent
NAMES: dict[str, list[str]] = json.loads((HERE / "names_of_ad6182e.json").read_text(encoding="utf-8"))
SMALL = (
    "job.ranks_per_node=2", "train.steps=4", "train.batch=4", "train.micro_batch=1", "checkpoint.every_steps=2",
    "args.layers=1", "args.width=16", "args.heads=2", "args.context=16", "args.max_bytes=20_000",
)  # fmt: skip


def test_moved_modules_are_the_same_modules_and_warn_once() -> None:
    code = f"""
import importlib, warnings
for old, new in {dict(MOVED)!r}.items():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            moved = importlib.import_module(old)
    assert moved is importlib.import_module(new), old
    warned = [str(one.message) for one in shown if issubclass(one.category, FutureWarning)]
    assert warned == [f"{{old}} is now {{new}}"], warned
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.filterwarnings("ignore:toolkit:FutureWarning")
@pytest.mark.parametrize("module", NAMES)
def test_a_module_of_ad6182e_has_its_names(module: str) -> None:
    imported = importlib.import_module(module)
    missing = [name for name in NAMES[module] if not has(imported, name)]
    assert missing == []


def has(owner: object, dotted: str) -> bool:
    """Whether `owner` has the attribute, or declares it: a dataclass without a default has none on the class."""
    for name in dotted.split("."):
        if name in getattr(owner, "__annotations__", {}):
            return True
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


@pytest.mark.timeout(300)
def test_train_lm_of_ad6182e_trains_unchanged(toolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    project = shutil.copytree(HERE / "jobs_of_ad6182e", toolkit.folder / "project")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    run = toolkit.submit(project / "train_lm.toml", *settings)
    assert toolkit("wait", run.run_id).code == 0, toolkit.ok("logs", run.run_id)
    assert [record.step for record in read_train_log(run.path / "metrics" / "train.jsonl")][-1] == 4
    assert (run.checkpoints / "step-00000004").is_dir()
