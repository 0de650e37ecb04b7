"""The one table of sbatch's options: each name once, each key a key of the job file, each row of use."""

from __future__ import annotations

from collections import Counter

import pytest

from toolkit.config.resolved import JobFile
from toolkit.slurm.sbatch_table import (
    CLI_OPTIONS,
    FIXES_IN_JOB_FILE,
    FIXES_ON_COMMAND_LINE,
    KEYS_OF_VARIABLES,
    LONG_OPTIONS,
    SBATCH_OPTIONS,
)


def test_each_name_and_each_variable_occurs_once() -> None:
    names = [name for option in SBATCH_OPTIONS for name in option.names]
    variables = [variable for option in SBATCH_OPTIONS for variable in option.variables]
    assert not [name for name, times in Counter([*names, *variables]).items() if times > 1]


def test_each_key_is_one_of_the_job_file() -> None:
    for option in SBATCH_OPTIONS:
        if option.key:
            table, _, name = option.key.partition(".")
            assert name in JobFile.model_fields[table].annotation.model_fields, option


def test_each_row_serves_something() -> None:
    assert all(option.about or option.in_job_file or option.on_command_line for option in SBATCH_OPTIONS)
    assert not [option for option in CLI_OPTIONS if not option.key or option.on_command_line]
    refused = {f"--{long}" for long, _, _ in FIXES_IN_JOB_FILE}
    assert {"--nodes", "--ntasks", "--cluster", "--open-mode"} <= refused and "--exclude" not in refused
    assert {"-G", "--gpus", "--wrap"} <= FIXES_ON_COMMAND_LINE.keys()


def test_of_two_variables_for_a_key_the_later_one_counts() -> None:
    clusters = [name for name, path in KEYS_OF_VARIABLES.items() if path == ("job", "cluster")]
    assert clusters == ["SBATCH_CLUSTERS", "SLURM_CLUSTERS"]


@pytest.mark.parametrize(("key", "option"), [("job.time", "--time"), ("job.mem_gb_per_node", "--mem")])
def test_the_option_of_a_key(key: str, option: str) -> None:
    assert LONG_OPTIONS[key] == option
