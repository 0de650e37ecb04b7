"""What a script declares of its [args] is read from its text; what that does not tell is left to the ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.jobs import train_image, train_lm
from toolkit.train.arguments import read_arguments
from toolkit.train.declared_arguments import declared_arguments

SCRIPT = """
import nowhere
from pydantic import Field
print("nothing of it is run")
LEAST = 1
Count = Annotated[int, Field(ge=LEAST, le=8)]

@dataclass
class Arguments:
    layers: Count = 2
    names: list[str] = nowhere.names
    kind: Literal["a", "b"] = "a"
    shape: nowhere.Shape = None

def main(world, config):
    args = read_arguments(Arguments, config.args)
"""


@pytest.mark.parametrize("job", [train_lm, train_image])
def test_the_shipped_jobs_are_read_as_they_are(job):
    declared = declared_arguments(Path(job.__file__))
    assert dataclasses.asdict(read_arguments(declared, {})) == dataclasses.asdict(job.Arguments())


def test_names_limits_and_choices_are_followed_and_the_rest_takes_anything(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    declared = declared_arguments(script)
    assert read_arguments(declared, {"shape": [1], "names": ["x"]}).layers == 2
    for table in ({"layers": 9}, {"kind": "c"}, {"names": [1]}, {"layer": 1}):
        with pytest.raises(ToolkitError):
            read_arguments(declared, table)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text", ["x = (", "read_arguments(elsewhere.Arguments, {})", "read_arguments(A, {}); read_arguments(B, {})", ""]
)
def test_a_script_that_tells_nothing_is_left_to_its_ranks(tmp_path, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert declared_arguments(script) is None
