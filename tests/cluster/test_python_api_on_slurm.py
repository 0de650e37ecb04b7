"""The public Python API with Slurm: a job file, an array of calls, and the example of submitit's README."""

from __future__ import annotations

import json

import pytest
from on_slurm import Site

pytestmark = pytest.mark.cluster

# submitit's README, with only the import changed, and the folder and the partition that exist here.
README = """
import toolkit as submitit

def add(a, b):
    return a + b

if __name__ == "__main__":
    # executor is the submission interface (logs are dumped in the folder)
    executor = submitit.AutoExecutor(folder="log_test")
    # set timeout in min, and partition for running the job
    executor.update_parameters(timeout_min=1)
    job = executor.submit(add, 5, 7)  # will compute add(5, 7)
    print(job.job_id)  # ID of your job

    output = job.result()  # waits for completion and returns output
    assert output == 12  # 5 + 7 = 12...  your addition was computed in the cluster

    jobs = executor.map_array(add, list(range(20)), list(range(20)))
    assert [job.result() for job in jobs] == [2 * number for number in range(20)]
    print(jobs[0].run_id.rpartition("_")[0])
"""


def python(here: Site, script: str, **variables: str) -> str:
    path = here.folder / "script.py"
    path.write_text(script)
    import sys

    done = here.command([sys.executable, str(path)], timeout_s=110, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_the_example_of_submitits_readme_and_an_array(here: Site) -> None:
    job_id, array = python(here, README, TOOLKIT_SITE=str(here.file)).split()
    assert job_id.isdigit()
    (run,) = (here.folder / "log_test").glob(f"*/{array}") or [None]
    assert run is not None and len(list((run / "tasks").iterdir())) == 20
    assert len(list(run.glob("submitted-*.json"))) == 1, "one array job"
    assert not list((here.folder / "log_test").rglob("*.pkl"))


@pytest.mark.timeout(240)
def test_a_job_file_is_submitted_and_its_result_read(here: Site) -> None:
    (here.folder / "fit.py").write_text("def main(world, config):\n    return {'size': world.size}\n")
    (here.folder / "fit.toml").write_text('[job]\nentry = "fit.py:main"\ntime = "5"\n')
    script = f"""
import json, toolkit
run = toolkit.submit("{here.folder}/fit.toml", n=2, runs="{here.folder}/api")
print(json.dumps([run.job_id, run.result(), run.state, [one.run_id for one in toolkit.list_runs(runs="{here.folder}/api")], run.run_id]))
"""
    job_id, result, state, listed, run_id = json.loads(python(here, script, TOOLKIT_SITE=str(here.file)))
    assert job_id.isdigit() and (result, state, listed) == ({"size": 2}, "completed", [run_id])
