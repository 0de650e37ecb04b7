"""docs/collectives.md: its examples run, its formulas hold, and its tables name everything."""

import inspect
import io
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from math import log2
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from rank_pool import LAYOUTS
from sampling import sampled

from toolkit.comm.algorithms import ALGORITHMS
from toolkit.comm.communicator import Communicator
from toolkit.comm.reductions import OPS

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `([a-z -]+)` \| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)}
ELEMENTS = 8 * 1024


class Layout(NamedTuple):
    """The letters of the page's formulas: p ranks on N nodes with L each, S bytes."""

    p: int
    N: int
    L: int
    S: int


# Every formula of the page for bytes, as a function.
FORMULAS: dict[str, Callable[[Layout], float]] = {
    "2 * (p - 1) / p * S": lambda x: 2 * (x.p - 1) / x.p * x.S,
    "log2(p) * S": lambda x: log2(x.p) * x.S,
    "log2(N) * S": lambda x: log2(x.N) * x.S,
    "2 * L * (N - 1) / N * S": lambda x: 2 * x.L * (x.N - 1) / x.N * x.S,
    "(2 * (N - 1) / N + log2(L)) * S": lambda x: (2 * (x.N - 1) / x.N + log2(x.L)) * x.S,
    "2 * (N - 1) / N * S": lambda x: 2 * (x.N - 1) / x.N * x.S,
}


@pytest.fixture
def examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, body in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(body, encoding="utf-8")


def run_command(script: str) -> str:
    """What the page's command for a script prints."""
    (command,) = (line for line in re.findall(r"^    (mpirun .*)$", PAGE, re.MULTILINE) if line.endswith(script))
    _, *words = command.split()
    assert words.count("python") == 1
    argv = [Path(sys.executable).with_name("mpirun"), *(sys.executable if word == "python" else word for word in words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.evidence
def test_the_command_of_the_page_compares_the_algorithms(examples):
    said = run_command("compare.py")
    lines = re.findall(r"^([a-z -]+): [0-9.]+ ms$", said, re.MULTILINE)
    assert lines == [name for name in ALGORITHMS if name != "hierarchical"], said
    assert re.search(r"Count\(calls=2, timed_calls=2, payload_bytes=8000000, seconds=\d+\.\d+", said)


@pytest.mark.evidence
def test_the_command_of_the_page_chooses_the_fastest(examples):
    said = run_command("fastest.py")
    (chosen,) = re.findall(r"^(.*) \(measured in \d+\.\d s\)$", said, re.MULTILINE)
    assert {name for name in ALGORITHMS if re.search(rf"\b{name} at \d+ [KM]iB", chosen)}, said


def run_main(state, source):
    """As a rank of a job with `reduction = "auto"`; what it says."""
    names = {}
    exec(source, names)
    with redirect_stderr(io.StringIO()) as said:
        names["main"](state.world, SimpleNamespace(parallel=SimpleNamespace(reduction="auto")))
    return said.getvalue()


def test_the_sharded_example_says_which_collectives_are_used(examples, ranks):
    answers = ranks(4).run(run_main, Path("sharded_step.py").read_text(encoding="utf-8"))
    assert answers == ["sharding collectives: hierarchical (2 nodes with 2 ranks each)\n", "", "", ""]


def sent_by(state, name):
    before = Counter(state.communicator.sent_bytes)
    state.communicator.all_reduce(torch.ones(ELEMENTS), "sum", name)
    after = Counter(state.communicator.sent_bytes)
    return {rank: after[rank] - before[rank] for rank in after}


@pytest.mark.parametrize("size", sampled([4, 8], lambda case: case[0] == 4))
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("flat", "hierarchical")])
def test_the_formulas_are_what_ranks_send(ranks, size, name):
    sent = ranks(size).run(sent_by, name)
    on_node = LAYOUTS[size][0]
    layout = Layout(p=size, N=len(LAYOUTS[size]), L=on_node, S=4 * ELEMENTS)
    busiest = max(sum(one.values()) for one in sent)
    leaving = Counter()
    for source, one in enumerate(sent):
        for target, count in one.items():
            if source // on_node != target // on_node:
                leaving[source // on_node] += count
    _, by_rank, by_node = (cell.strip("`") for cell in ROWS[name])
    assert (busiest, max(leaving.values())) == (FORMULAS[by_rank](layout), FORMULAS[by_node](layout))


def test_the_tables_name_every_algorithm_op_and_operation():
    assert list(ROWS) == list(ALGORITHMS)
    section = PAGE[PAGE.index("## Operations") : PAGE.index("## All-reduce algorithms")]
    cells = [re.findall(r"`([a-z_.]+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in cell}
    public = {name for name, _ in inspect.getmembers(Communicator, inspect.isfunction) if not name.startswith("_")}
    assert named == (public - {"close", "choose_by_measurement"}) | {"start.buckets"} | set(OPS)
