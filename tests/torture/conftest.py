"""Places to torture runs in, and the losses of a run that nobody disturbed.

TOOLKIT_TORTURE_REPEATS says how often each scenario strikes: once by default, 10 times under `make evidence`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import ACCOUNTING, running_cluster, shared_folder
from ledger import Ledger
from place import Place, losses

from toolkit.devcluster.layout import ClusterSpec, Layout

UNDISTURBED_STEPS = 600


@pytest.fixture(scope="session")
def repeats() -> int:
    return int(os.environ.get("TOOLKIT_TORTURE_REPEATS", "1"))


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Ledger:
    name = request.node.name.removeprefix("test_")
    return Ledger(f"{name} with accounting" if ACCOUNTING else name)


@pytest.fixture(scope="session")
def layout() -> Iterator[Layout]:
    """A dev cluster of 4 nodes."""
    options = ("SlurmdTimeout=5",)  # a lost node is known sooner
    spec = ClusterSpec(4, 0, "", ACCOUNTING, subnet="", options=options)
    with running_cluster("-torture", spec) as layout:
        yield layout


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder that this machine and every node see."""
    with shared_folder("torture-") as path:
        yield path


def _environment() -> dict[str, str]:
    named = ("SLURM_", "SBATCH_", "TOOLKIT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(named)}


@pytest.fixture(scope="session")
def make_place(folder: Path) -> Iterator[Callable[..., Place]]:
    """Make a place whose site extends `base` with a launcher; what its runs leave is swept away at the end."""
    places: list[Place] = []

    def make(base: str, tables: str, layout: Layout | None = None) -> Place:
        name = f"{base}{len(places)}"
        here = folder / name
        here.mkdir()
        file = here / f"{name}.toml"
        file.write_text(f'name = "{name}"\nextends = "{base}"\n{tables}\n', encoding="utf-8")
        environment = _environment() | ({"SLURM_CONF": str(layout.slurm_conf)} if layout else {})
        places.append(Place(here, file, environment, layout))
        return places[-1]

    yield make
    for place in places:
        place.sweep()


@pytest.fixture(scope="session")
def local(make_place: Callable[..., Place]) -> Place:
    """This machine without Slurm and without MPI."""
    return make_place("local", '[launcher]\nkind = "local"')


@pytest.fixture(scope="session")
def slurm(make_place: Callable[..., Place], layout: Layout) -> Place:
    """The dev cluster, ranks started by srun."""
    return make_place("devcluster", f'[scheduler]\nconf = "{layout.slurm_conf}"', layout)


@pytest.fixture(scope="session")
def undisturbed(local: Place) -> dict[int, str]:
    """The losses of a run of two ranks, by step, as hexadecimal floats."""
    run = local.submit("--set", f"checkpoint.every_steps={UNDISTURBED_STEPS}", steps=UNDISTURBED_STEPS, pace_s=0)
    assert local.wait(run, timeout_s=120) == "completed"
    return losses(run)


@pytest.fixture(scope="session")
def hydra(make_place: Callable[..., Place], layout: Layout) -> Place:
    """The dev cluster, ranks started by MPICH's mpirun, which is that of our interpreter's MPI wheel."""
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher = f'[launcher]\nkind = "mpirun"\nmpirun = "{mpirun}"\nlibmpi = ""'
    return make_place("devcluster", f'[scheduler]\nconf = "{layout.slurm_conf}"\n{launcher}', layout)


@pytest.fixture(scope="session")
def openmpi(make_place: Callable[..., Place], layout: Layout) -> Place:
    """The dev cluster, ranks started by Debian's Open MPI."""
    launcher = '[launcher]\nkind = "mpirun"\nmpirun = "/usr/bin/mpirun"'
    return make_place("devcluster", f'[scheduler]\nconf = "{layout.slurm_conf}"\n{launcher}', layout)
