"""What a resume refuses to change, each with the command that does what was meant."""

import json

import pytest
from queued_runs import submitted

from toolkit.rundir.layout import RunDirectory

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")
SHAPES = '[job]\nname = "two"\nentry = ["true"]\n[[component]]\nranks_per_node = 1\n[[component]]\ncpus_per_rank = 2\n'


@pytest.fixture
def refuse(toolkit, squeue, sbatch, monkeypatch):
    """A function that resumes a run of an ended job, and returns what is said; the run must stay as it was."""
    squeue()
    monkeypatch.setenv("TOOLKIT_SITE", "devcluster")

    def resume(run, *words):
        before = sorted(run.whole.path.iterdir())
        said = toolkit("resume", run.run_id, *words)
        assert said.code == 2 and sorted(run.whole.path.iterdir()) == before, said
        return said.err

    return resume


@pytest.mark.parametrize("words", [("-N", 2), ("--set", "job.ranks_per_node=2"), ("-c", 4)])
def test_components_keep_their_shape(toolkit, refuse, words):
    job = toolkit.folder / "two.toml"
    job.write_text(SHAPES)
    toolkit.ok("render", job)
    (path,) = toolkit.runs.glob("two/*")
    (path / "submitted-000.json").write_text(json.dumps({"job_id": "7", "start": 0, "time": ""}))
    said = refuse(RunDirectory(path), *words)
    assert f"cannot be changed: run {path.name} has 2 components, each with its own value" in said
    assert f"as a new run with --set checkpoint.source=FOLDER; `toolkit ckpt ls {path.name}` lists the folders" in said
    assert f"a foreground run has one component, but the job has 2. Fix: `toolkit resume {path.name}`" in refuse(
        RunDirectory(path), "--here"
    )
    assert "has no scheduler for it. Fix: omit --site" in refuse(RunDirectory(path), "--site", "local")


def test_tasks_stay_tasks_and_one_piece_of_work_stays_one(toolkit, refuse):
    array, alone = submitted(toolkit, "7", "array", array="0-1"), submitted(toolkit, "8", "alone")
    task = array.task(1)
    assert f"run {array.run_id} is an array, but site local has no" in refuse(array, "--site", "local")
    for run in (array, task):
        said = refuse(run, "--set", "job.array=")
        assert (
            "is an array and cannot be resumed as a single job" in said
            and f"Fix: omit job.array; `toolkit resume {array.run_id}_T`" in said
        )
    assert f"Fix: `toolkit resume {task.run_id}`\n" in refuse(task, "--here")
    said = refuse(alone, "-a", "0-1")
    assert f"run {alone.run_id} is not an array" in said and f"or `toolkit rerun {alone.run_id} -a 0-1`" in said
    assert f"salloc -N 1 --ntasks-per-node 1 toolkit resume {alone.run_id} --here`" in refuse(alone, "--here")
