"""Callbacks are called in their order with what they need, and an error says whose it is."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.train.callbacks import Callback, Callbacks
from toolkit.train.held_out import Validation

STATE: Any = SimpleNamespace(step=7)
RECORD: Any = SimpleNamespace(step=7, loss=1.0)
FOUND = Validation({"loss": 1.0}, 3, 3.0)


class Noting(Callback):
    def __init__(self, name: str, told: list[tuple[Any, ...]]) -> None:
        self.name, self.told = name, told

    def on_begin(self, state):
        self.told.append((self.name, "begin", state))

    def on_step(self, state, record):
        self.told.append((self.name, "step", state, record))

    def on_save(self, state, folder):
        self.told.append((self.name, "save", state, folder))

    def on_validation(self, state, found):
        self.told.append((self.name, "validation", state, found))

    def on_end(self, state, *, stopped):
        self.told.append((self.name, "end", state, stopped))


def call_all(callbacks: Callback) -> None:
    callbacks.on_begin(STATE)
    callbacks.on_step(STATE, RECORD)
    callbacks.on_save(STATE, Path("step-7"))
    callbacks.on_validation(STATE, FOUND)
    callbacks.on_end(STATE, stopped=True)


def test_each_hears_of_everything_in_order():
    told: list[tuple[Any, ...]] = []
    call_all(Callbacks([Noting("a", told), Callback(), Noting("b", told)]))
    expected = [("begin", STATE), ("step", STATE, RECORD), ("save", STATE, Path("step-7")),
                ("validation", STATE, FOUND), ("end", STATE, True)]  # fmt: skip
    assert told == [(name, *one) for one in expected for name in "ab"]
    call_all(Callbacks())


METHODS = ("on_begin", "on_step", "on_save", "on_validation", "on_end")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [ZeroDivisionError, ToolkitError])
def test_an_error_keeps_its_kind_and_names_the_callback(method, kind):
    def fail(*given: Any, **named: Any) -> None:
        raise kind("mistaken")

    class Failing(Callback):
        pass

    failing = Failing()
    setattr(failing, method, fail)
    with pytest.raises(kind, match="mistaken") as raised:
        call_all(Callbacks([Callback(), failing]))
    last = "".join(traceback.format_exception(raised.value)).splitlines()[-1]
    assert last.startswith("in the callback ")
    assert last.endswith(f"Failing.{method} at step 7")
