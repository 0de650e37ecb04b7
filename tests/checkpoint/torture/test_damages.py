"""Damage of every kind at random places: full verification names the file, and no load accepts it."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from committed_states import alone, json_of, load_name, tensors_of
from damages import DAMAGES, Patient, index_damaged, linked_copy
from torture_scale import cases
from torture_tally import Tally
from traced_ranks import run_ranks, save_all

from toolkit.checkpoint import Checkpointer
from toolkit.checkpoint.folder.verify import verify_fully, verify_quickly

OF_ANOTHER_SIZE = ("truncated", "emptied", "extended", "deleted")


@dataclass
class Ward:
    """Steps 1 and 2 of a run, and step 2 of another, to take copies of."""

    folder: Path
    ranks: list[int]
    large: bool

    def __post_init__(self) -> None:
        for directory, attempt, steps in (("checkpoints", 0, [1, 2]), ("stranger", 5, [2])):
            arguments = (self.folder / directory, steps, self.large)
            ended = run_ranks(
                self.folder / f"ranks-{directory}", save_all, arguments, size=len(self.ranks), attempt=attempt
            )
            assert all(rank.code == 0 for rank in ended), ended
        self._cases = 0

    def patient(self, choose: random.Random) -> Patient:
        self._cases += 1
        directory = self.folder / f"case-{self._cases}"
        linked_copy(self.folder / "checkpoints", directory)
        steps = (directory / "step-00000002", directory / "step-00000001", self.folder / "stranger" / "step-00000002")
        return Patient(*steps, choose)


@pytest.fixture
def wards(in_memory) -> tuple[Ward, ...]:
    """Small files of two ranks, and one file of several blocks."""
    return Ward(in_memory / "small", [0, 1], False), Ward(in_memory / "large", [0], True)


def load_and_hear(ward: Ward, directory: Path) -> tuple[object, str]:
    """What a resume loads, and what it says."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return load_name(directory, ward.ranks, 3, large=ward.large), said.getvalue()


@pytest.mark.timeout(1800)
def test_damage(wards, tally: Tally, toolkit):
    choose = random.Random(0)
    for number in range(cases(2000, 56)):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        ward = wards[number % 10 == 9]
        patient = ward.patient(choose)
        damaged = DAMAGES[kind](patient)
        place = f"{kind}, case {number}, {damaged}"
        verified = toolkit("ckpt", "verify", "--full", patient.folder.parent)
        assert verified.code == 1, place
        assert any(name in verified.out for name in damaged), f"{place}: {verified.out}"
        if kind in OF_ANOTHER_SIZE:
            assert verify_quickly(patient.folder)[1], place
        problems = verify_fully(patient.folder)[1]
        assert {problem.file for problem in problems} & set(damaged), f"{place}: {problems}"
        loaded, said = load_and_hear(ward, patient.folder.parent)
        assert loaded == (1, 0), f"{place}: {loaded} was loaded"
        assert "step-00000002" in said and any(name in said for name in damaged), f"{place}: {said}"
        assert (patient.folder.parent / "step-00000002.bad-3").is_dir()
        tally.case(kind, "found", "fell back to the older one")
        shutil.rmtree(patient.folder.parent)


def test_a_damaged_index(wards, tally: Tally):
    """It stands in no digest, and nothing that loads reads it."""
    choose = random.Random(1)
    for _ in range(cases(100, 4)):
        patient = wards[0].patient(choose)
        index_damaged(patient)
        assert not verify_fully(patient.folder)[1]
        assert load_and_hear(wards[0], patient.folder.parent) == ((2, 0), "")
        tally.case("index flipped, cut or gone", "harmless")
        shutil.rmtree(patient.folder.parent)


def test_another_steps_checkpoint_under_a_name(in_memory):
    """Every file of it is whole; the name alone is wrong."""
    checkpoints = Checkpointer(in_memory, alone(0))
    for step in (1, 2):
        checkpoints.save(step, tensors_of((step, 0), [0]), json_of((step, 0)))
    shutil.rmtree(in_memory / "step-00000002")
    shutil.copytree(in_memory / "step-00000001", in_memory / "step-00000002")
    (problem,) = verify_fully(in_memory / "step-00000002")[1]
    assert str(problem) == "manifest.json: is of step 1, but the folder is named after step 2"
    assert load_name(in_memory, [0], 1) == (1, 0)
    assert (in_memory / "step-00000002.bad-1").is_dir()
