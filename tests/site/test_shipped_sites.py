"""The site files that come with toolkit: each key has its source, each is rendered, and none claims more."""

import re
from pathlib import Path

import pytest

from toolkit.site.load import load_site, site_files
from toolkit.site.proof import checked_in_words

GOLDEN = Path(__file__).parents[1] / "golden"
# The sites of this project's own; every other one is a real cluster that somebody else describes.
OWN = {"devcluster", "local"}
REAL = sorted(set(site_files({})) - OWN)
_KEY = re.compile(r"^(\w+) = ")
_SOURCE = re.compile(r"^# \[(\d)\] https://\S+", re.MULTILINE)
# What the file says of itself, and what we chose.
_OF_OURS = {"name", "contact", "docs", "checked", "default"}


def test_every_shipped_site_has_a_rendered_script_and_no_script_is_left_over():
    assert {path.stem.removeprefix("train_lm-") for path in GOLDEN.glob("train_lm-*.sbatch")} == {*REAL, *OWN}


@pytest.mark.parametrize("name", REAL)
def test_every_key_has_its_source(name):
    text = site_files({})[name].read_text()
    sources = set(_SOURCE.findall(text))
    assert sources
    cited = set()
    for number, line in enumerate(text.splitlines(), 1):
        key = _KEY.match(line)
        found = re.search(r"# \[(\d)\]", line)
        if key and key[1] not in _OF_OURS:
            assert found and found[1] in sources, f"{name}.toml:{number}: {line}"
        cited |= {found[1]} if found else set()
    assert cited == sources, "a source that no key is from"


@pytest.mark.parametrize("name", REAL)
def test_a_site_that_nobody_ran_says_so_and_is_rendered(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    site = load_site(name, {})
    assert re.fullmatch(r"rendered only, \d{4}-\d\d-\d\d", site.checked)
    assert checked_in_words(site) == site.checked
    script = (GOLDEN / f"train_lm-{name}.sbatch").read_text()
    selects = "--constraint=" if name == "perlmutter" else "--partition="  # its users name no partition
    assert f"#SBATCH {selects}" in script and f", site {name}." in script
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)", script, re.MULTILINE)
    assert int(nodes) >= 2


def test_the_gpu_dialects_differ():
    asked = {name: load_site(name, {}).gpu.request.format(count=4) for name in REAL}
    assert asked["lumi"] == "--gpus-per-node=4"
    assert asked["roihu"] == "--gres=gpu:gh200:4"
    assert asked["mahti"] == "--gres=gpu:a100:4"
    assert asked["kestrel"] == "--gres=gpu:4"
