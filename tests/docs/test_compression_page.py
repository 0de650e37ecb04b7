"""The page on gradient compression: its job file is valid, its command prints this line, and its table has every algorithm."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from toolkit.comm.compression.algorithms import BUILD
from toolkit.comm.compression.reducer import GradientCompression
from toolkit.config.gradient_compression import ALGORITHMS, GradientCompressionTable
from toolkit.config.local_sgd import LocalSgdTable
from toolkit.jobs.train_lm import GPT, Arguments

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()
ROWS = {
    cells[0].split("`")[1]: cells
    for line in PAGE.split("## Algorithms")[1].split("## Error feedback")[0].splitlines()
    if line.startswith("| `") and not line.startswith("| `algorithm`")
    for cells in [[cell.strip() for cell in line[1:-1].split("|")]]
}


def test_the_tables_of_the_job_files_are_valid():
    first, second = (tomllib.loads(toml) for toml in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    assert GradientCompressionTable(**first["gradient_compression"]).rank == 4
    assert GradientCompressionTable(**second["gradient_compression"]).algorithm == "int8"
    assert LocalSgdTable(**second["local_sgd"]).fragments == 5


def test_the_line_is_that_of_the_shipped_model():
    trained = dict(GPT(Arguments()).named_parameters())
    line = GradientCompression(GradientCompressionTable(algorithm="int8"), trained).describe(2)
    assert f"gradient reduction: {line}" in PAGE


def test_every_algorithm_has_a_row_that_states_its_error_feedback():
    assert ROWS.keys() == ALGORITHMS.keys()
    assert {name for name, cells in ROWS.items() if cells[0].endswith(" EF")} == {
        name for name, facts in ALGORITHMS.items() if facts.feedback
    }


@pytest.mark.parametrize("algorithm", [name for name in BUILD if name not in ("qsgd", "threshold", "gaussian_k")])
def test_bytes_follow_from_the_formulas(algorithm):
    bytes_of = ROWS[algorithm][2].replace("2d", "2 * d").replace("1/B", "1 / B").replace("2/B", "2 / B")
    wanted = eval(bytes_of, {"B": 256, "d": 0.01})
    n = 256 * 1000
    assert BUILD[algorithm](GradientCompressionTable(algorithm=algorithm)).wire_bytes(n) == pytest.approx(
        4 * n * wanted, rel=1e-3
    )


def test_the_exchanges_are_those_of_the_page():
    gathered = {name for name in BUILD if BUILD[name](GradientCompressionTable(algorithm=name)).exchange == "gather"}
    assert gathered == {"top_k", "threshold", "gaussian_k", "ef21"}
    summed = {name for name in BUILD if BUILD[name](GradientCompressionTable(algorithm=name)).is_linear}
    assert summed == {"random_k", "bernoulli"}
    assert torch.is_tensor(BUILD["int8"](GradientCompressionTable()).encode(torch.zeros(1, 256), 0))
