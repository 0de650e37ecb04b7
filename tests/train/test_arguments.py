from dataclasses import dataclass

import pytest

from toolkit.errors import ToolkitError
from toolkit.train.arguments import read_arguments


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    dropout: float = 0.1
    tied: bool = True


def test_defaults_hold_and_an_integer_serves_as_a_float():
    shape = read_arguments(Shape, {"dropout": 0, "layers": 2})
    assert shape == Shape(layers=2, dropout=0.0, tied=True)
    assert type(shape.dropout) is float


def test_a_misspelt_key_names_the_nearest():
    with pytest.raises(ToolkitError, match=r"args\.layer: .*'layer'.*write 'layers'"):
        read_arguments(Shape, {"layer": 2})


@pytest.mark.parametrize(("key", "value"), [("layers", 2.0), ("layers", True), ("tied", 1), ("dropout", "0.1")])
def test_a_value_of_another_type_is_refused(key, value):
    with pytest.raises(ToolkitError, match=rf"args\.{key}: .*is not of type"):
        read_arguments(Shape, {key: value})
