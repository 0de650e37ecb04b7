"""The script and the keys of docs/your-own-script.md, as they are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from toolkit.config.request import JobRequest, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-script.md").read_text(encoding="utf-8")


@pytest.fixture
def script(toolkit, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(toolkit.folder)
    (body,) = re.findall(r"^```python\n# train\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("train.py").write_text(body, encoding="utf-8")
    return toolkit.folder


@pytest.mark.timeout(240)
def test_the_script_runs_with_one_command_and_continues(toolkit, script: Path) -> None:
    said = toolkit("run", "train.py", "-n", "2", "--", "--lr", "0.1")
    assert said.code == 0, said
    assert "[0] epoch 3 step 64 loss 0.0" in said.out and (script / "out" / "epoch-3.pt").exists()
    again = toolkit("resume", "train", "--here", "--", "--lr", "0.1", "--epochs", "5", "--resume", "out/epoch-3.pt")
    assert again.code == 0, again
    assert "[0] epoch 4 step 80 loss 0.0" in again.out and "epoch 3 " not in again.out


def test_its_job_file_accepts_the_keys_of_the_page(toolkit, script: Path) -> None:
    toolkit.ok("submit", "train.py", "-n", "2", "--dry-run", "--save-as", "train.toml", "--", "--lr", "0.1")
    written = Path("train.toml").read_text()
    keys = [text for text in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "[job]" not in text]
    assert len(keys) == 2 and " --dry-run --save-as train.toml -- --lr 0.1 --epochs 8 " in PAGE
    assert not list(toolkit.runs.glob("train/2*"))
    Path("train.toml").write_text(written + "\n".join(keys))
    job = resolve(JobRequest("train.toml"), None, environ={})
    assert (job.restart.progress, job.restart.argv) == ("out/epoch-*.pt", ["--resume", "{newest}"])
    assert re.search(job.observe.step_line[0], "epoch 3 step 64 loss 0.0001")["loss"] == "0.0001"
    (shown,) = re.findall(r"writes:\n(  \[job\].*?)\nrun ", PAGE, re.DOTALL)
    table = {
        "name": "train",
        "entry": "train.py",
        "nodes": 2,
        "ranks_per_node": 2,
        "time": "1:00:00",
        "argv": ["--lr", "0.1"],
    }
    assert tomllib.loads(shown) == {"job": table}
