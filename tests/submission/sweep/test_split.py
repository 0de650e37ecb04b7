"""Arrays that one Slurm array cannot hold: small programs stand for Slurm's commands."""

import json
import re

import pytest

from toolkit.rundir.claims import Part, all_parts, slurm_id, task_of
from toolkit.slurm.array import parse_array
from toolkit.submission.sweep.split import Slice, slices_of

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


SBATCH = """\
refuse() { echo "sbatch: error: Batch job submission failed: $1" >&2; exit 1; }
cd "$(dirname "$0")"
number=$(($(cat accepted 2>/dev/null || echo 0)))
grep -qs '|9' limit && refuse 'Job violates accounting/QOS policy (job submit limit)'
case "$*" in *--array*) ;; *) refuse 'Invalid job array specification';; esac
[ -e refuse_from ] && [ $number -ge $(cat refuse_from) ] && refuse no
echo $((number + 1)) > accepted
echo $((21 + number))
"""


@pytest.fixture
def cluster(toolkit, fake_slurm):
    """A cluster whose MaxArraySize of 4 is smaller than the arrays of the tests.

    sbatch counts its jobs from 21 and refuses jobs after the number in the file `refuse_from`. sacctmgr prints `limit`.
    """
    fake_slurm.comments()
    fake_slurm.script("sbatch", SBATCH)
    fake_slurm.respond("srun", code=1)
    fake_slurm.respond("scontrol", "ClusterName = devcluster\nMaxArraySize            = 4\n")
    limit = fake_slurm.folder / "limit"
    fake_slurm.script("sacctmgr", f"test -e {limit} && cat {limit}")
    fake_slurm.respond("scancel")
    return fake_slurm


def submissions(cluster):
    """The arguments of each sbatch that named the tasks of an array; without them, sbatch refuses."""
    return [call.split()[1:] for call in cluster.calls("sbatch") if " --array=" in call]


@pytest.mark.parametrize(
    ("text", "size", "slices"),
    [
        ("0-3", 4, []),
        ("0-900", None, []),
        ("0-4", 4, [(0, "0-3"), (4, "0")]),
        ("4-9%2", 4, [(4, "0-3%2"), (8, "0-1%2")]),
        ("0-12:4", 5, [(0, "0,4"), (5, "3"), (10, "2")]),
    ],
)
def test_the_numbers_of_each_array_stay_below_its_size(text, size, slices):
    tasks = parse_array(text)
    found = slices_of(tasks, size)
    assert [(one.first, one.array) for one in found] == slices
    again = [one.first + number for one in found for number in parse_array(one.array)]
    assert not found or sorted(again) == sorted(tasks)
    assert all(isinstance(one, Slice) for one in found)


def test_many_tasks_are_several_arrays_of_one_run(toolkit, cluster, squeue):
    run = toolkit.submit(toolkit.job("true"), "--site", "devcluster", "-a", "0-9")
    told = [(words[1], words[-2:]) for words in submissions(cluster)]
    assert told == [
        ("--array=0-3", [str(run.script(0)), "0"]), ("--array=0-3", [str(run.script(0)), "4"]),
        ("--array=0-1", [str(run.script(0)), "8"]),
    ]  # fmt: skip
    comments = [next(word for word in words if word.startswith("--comment")) for words in submissions(cluster)]
    assert comments == [f"--comment=toolkit:{run.run_id}:0{part}" for part in ("", ".1", ".2")]
    squeue(*((f"{job}_{number}", "PENDING", "None") for job in (21, 22, 23) for number in range(4)))
    tasks = json.loads(toolkit.ok("status", run.run_id, "--json"))["tasks"]
    assert [task["job_id"] for task in tasks] == [
        *(f"21_{n}" for n in range(4)), *(f"22_{n}" for n in range(4)), "23_0", "23_1"
    ]  # fmt: skip
    assert json.loads(toolkit.ok("status", "22_3", "--json"))["run_id"] == f"{run.run_id}_7"
    toolkit.ok("cancel", run.run_id)
    assert cluster.calls("scancel") == ["scancel --full 21 22 23"]
    toolkit.ok("cancel", f"{run.run_id}_9")
    assert cluster.calls("scancel")[1:] == ["scancel --full 23_1"]


def test_a_limit_on_tasks_at_a_time_holds_over_all_arrays(toolkit, cluster):
    toolkit.submit(toolkit.job("true"), "--site", "devcluster", "-a", "0-9%2", "-d", "afterok:5")
    waits = [[word for word in words if word.startswith("--dependency")] for words in submissions(cluster)]
    assert waits == [[], ["--dependency=afterok:5,afterany:21"], ["--dependency=afterok:5,afterany:22"]]
    assert {words[1].partition("%")[2] for words in submissions(cluster)} == {"2"}


def test_a_refused_part_takes_the_others_back(toolkit, cluster):
    (cluster.folder / "refuse_from").write_text("2")
    refused = toolkit("submit", toolkit.job("true"), "--site", "devcluster", "-a", "0-9")
    assert refused.code == 3
    assert cluster.calls("scancel") == ["scancel --full 21 22"]
    assert not list(toolkit.runs.glob("*/*"))


@pytest.mark.parametrize(
    ("association", "limit", "fits"), [("a|main", 9, False), ("a|", "", True), ("b|other", 2, True), ("a|", 10, True)]
)
def test_more_tasks_than_a_user_may_have_are_refused_with_those_that_fit(
    toolkit, cluster, squeue, association, limit, fits
):
    (cluster.folder / "limit").write_text(f"devcluster|{association}||||{limit}{7 * '|'}\n")
    said = toolkit("submit", toolkit.job("true"), "--site", "devcluster", "-a", "0-9", "-p", "main")
    assert said.code == (0 if fits else 3), said
    if not fits:
        now, later = re.search(
            r"submit with -a (\S+); when these have ended, `toolkit resume RUN (.*?)`", said.err
        ).groups()
        (cluster.folder / "limit").unlink()  # these sbatch accepts
        run = toolkit.submit(toolkit.job("true"), "--site", "devcluster", "-a", now, "-p", "main")
        squeue(*((f"{21 + task // 4}_{task % 4}", "COMPLETED", "None") for task in range(9)))
        toolkit.ok("resume", run.run_id, *later.split())
        assert "--array=1" in submissions(cluster)[-1] and run.submitted(1).exists()  # task 9, below 4


def test_a_submission_that_broke_off_finds_its_parts_again(toolkit, cluster, squeue):
    run = toolkit.submit(toolkit.job("true"), "--site", "devcluster", "-a", "0-9")
    record = json.loads(run.submitted(0).read_text())
    run.submitted(0).unlink()
    opened = {"start": 0, "token": f"toolkit:{run.run_id}:0", "host": "elsewhere", "pid": 1, "process_started": 1,
              "time": "2026-11-21T02:48:01.000Z", "parts": [{**part, "job_id": ""} for part in record["parts"]]}  # fmt: skip
    run.submitting(0).write_text(json.dumps(opened))
    cluster.comments(*((str(21 + part), f"toolkit:{run.run_id}:0{suffix}") for part, suffix in enumerate(("", ".1"))))
    squeue(*((f"{job}_{number}", "PENDING", "None") for job in (21, 22) for number in range(4)))
    states = [task["state"] for task in json.loads(toolkit.ok("status", run.run_id, "--json"))["tasks"]]
    assert states == ["pending"] * 8 + ["lost"] * 2
    assert [part.job_id for part in all_parts(run)] == ["21", "22"]


def test_numbers_are_translated_both_ways():
    parts = [Part("21", 0, 3), Part("22", 4, 7)]
    assert [slurm_id(parts, "21", task) for task in (0, 3, 4, 7, 9)] == ["21_0", "21_3", "22_0", "22_3", "21_9"]
    assert [task_of(parts, job, 3) for job in ("21", "22", "30")] == [3, 7, 3]
