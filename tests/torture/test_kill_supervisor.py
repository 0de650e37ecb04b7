"""`kill -9` of the supervisor: no rank outlives it, `status` says so, and `resume` goes on."""

from __future__ import annotations

import subprocess

import pytest
from place import JOB, TOOLKIT, longest_silence_s, losses, settings_of, stepped, until
from process_table import processes_of

STEPS = 30
GONE_S = 10.0  # ranks must be gone by then
LOST = ("lost", "failed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("sbatch", marks=pytest.mark.cluster),
        *(pytest.param(name, marks=pytest.mark.evidence) for name in ("local", "salloc")),
    ],
)
def test_kill_of_the_supervisor(way, request, repeats, undisturbed, ledger):
    place = request.getfixturevalue("local" if way == "local" else "slurm")
    seen = []
    for repeat in range(repeats):
        run, shell = _begin(place, way)
        until(stepped(run, 0, 7))
        (supervisor,) = processes_of(run, "supervisor")
        nodes = sorted(place.node_of(process) for process in processes_of(run, "rank"))
        supervisor.kill()
        gone = until(lambda run=run: not processes_of(run), poll_s=0.05)
        if shell is not None:
            shell.wait(60)
        known = until(lambda run=run: place.status(run)["state"] in LOST, poll_s=0.5)
        said = place.status(run)
        place.resume(run)
        state = place.wait(run)
        equal = losses(run) == {step: undisturbed[step] for step in range(1, STEPS + 1)}
        seen.append((len(nodes), gone < GONE_S, state, equal, "supervisor" in said["reason"]))
        ledger.note(
            repeat, state=state, losses_equal=equal, seconds={"ranks gone": gone, "status knows": known},
            nodes=nodes, status=said["state"], reason=said["reason"], silent_s=longest_silence_s(run),
        )  # fmt: skip
    assert seen == [(2, True, "completed", True, True)] * repeats


def _begin(place, way):
    settings = settings_of(STEPS)
    if way != "salloc":
        shape = ("-N", "2", "--ntasks-per-node", "1") if way == "sbatch" else ()
        return place.submit(*shape, steps=STEPS), None
    before = set((place.folder / "runs").glob("*/*"))
    argv = ["salloc", "-N2", "--ntasks-per-node=1", TOOLKIT, "run", JOB, "--ntasks-per-node", "1", *settings]
    shell = subprocess.Popen(
        list(map(str, argv)), env=place.shell, cwd=place.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    until(lambda: set((place.folder / "runs").glob("*/*")) - before)
    (path,) = set((place.folder / "runs").glob("*/*")) - before
    return place.run(path.name), shell
