from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from toolkit.errors import ToolkitError
from toolkit.jobs import train_image, train_lm
from toolkit.train.arguments import read_arguments


@dataclass(frozen=True)
class Shape:
    layers: Annotated[int, Field(ge=1)] = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    tied: bool = True
    name: str = ""


def test_defaults_hold_and_an_integer_serves_as_a_float():
    shape = read_arguments(Shape, {"dropout": 0, "layers": 2})
    assert shape == Shape(layers=2, dropout=0.0, tied=True)
    assert type(shape.dropout) is float


def test_a_misspelt_key_names_the_nearest():
    with pytest.raises(ToolkitError, match=r"args\.layer: .*'layer'.*write 'layers'"):
        read_arguments(Shape, {"layer": 2})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layers", 2.0, "2.0 is rejected: input should be a valid integer. Fix: choose a whole number, at least 1"),
        ("layers", True, "True is rejected: input should be a valid integer"),
        ("layers", "many", "'many' is rejected: input should be a valid integer"),
        ("layers", -1, "-1 is rejected: input should be greater than or equal to 1. Fix: choose a whole number, at least 1"),
        ("tied", 1, "1 is rejected: input should be a valid boolean. Fix: choose true or false"),
        ("dropout", "0.1", "'0.1' is rejected: input should be a valid number. Fix: choose a number, at least 0, less than 1"),
        ("dropout", 1.5, "1.5 is rejected: input should be less than 1. Fix: choose a number, at least 0, less than 1"),
        ("name", 3, "3 is rejected: input should be a valid string. Fix: choose a string"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_beyond_its_limits_is_refused(key, value, said):
    with pytest.raises(ToolkitError) as refused:
        read_arguments(Shape, {key: value})
    assert str(refused.value).startswith(f"args.{key}: {said}")


@pytest.mark.parametrize(
    ("job", "key", "value"),
    [
        *((train_lm, key, 0) for key in ("layers", "width", "heads", "context", "max_bytes")),
        *((train_lm, key, 1.0) for key in ("dropout", "held_out")),
        *((train_image, key, 0) for key in ("blocks", "channels")),
        (train_image, "channels", 30),
        (train_image, "held_out", -0.1),
    ],
)
def test_what_would_break_inside_torch_is_refused_by_the_shipped_jobs(job, key, value):
    with pytest.raises(ToolkitError, match=rf"^args\.{key}: {value} is rejected: ") as refused:
        read_arguments(job.Arguments, {key: value})
    assert refused.value.fix.startswith("choose a ")
