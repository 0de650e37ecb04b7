"""`--after`: what Slurm is told, which parents are refused, and how chains are drawn and explained."""

import json

import pytest
from queued_runs import claim, end_attempt, submitted

from toolkit.errors import ToolkitError
from toolkit.rundir.files import write_json
from toolkit.runs.record.parents import Parent, dependency_options
from toolkit.submission.chain import split_kind

pytestmark = pytest.mark.usefixtures("dev_cluster_conf")


def directives(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH --")]


def dependency(toolkit, *argv):
    script = toolkit.ok("render", toolkit.job("true", name="child"), "--site", "devcluster", *argv)
    return [line for line in directives(script) if line.startswith(("--dependency", "--kill-on"))]


def end(run, state):
    claim(run)
    end_attempt(run, state=state, cause={"failed": "crashed"}.get(state, state), exit_code=int(state == "failed"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("last", ("last", "ok")),
        ("12_3:any", ("12_3", "any")),
        ("a:b/runs/x", ("a:b/runs/x", "ok")),
        ("x:ok", ("x", "ok")),
    ],
)
def test_a_kind_stands_behind_a_colon(text, parts):
    assert split_kind(text) == parts


@pytest.mark.parametrize("text", ["last:okay", "last:", ":ok"])
def test_another_kind_is_refused(text):
    with pytest.raises(ToolkitError, match="expected RUN, RUN:ok or RUN:any, got"):
        split_kind(text)


def test_a_living_parent_is_waited_for_whatever_names_it(toolkit, squeue):
    parent = submitted(toolkit, "7", "parent")
    array = submitted(toolkit, "9", "array", array="0-3")
    squeue(("7", "RUNNING", "None"), *((f"9_{task}", "PENDING", "None") for task in range(4)))
    kill = "--kill-on-invalid-dep=yes"
    for name in (parent.run_id, "7", str(parent.path), f"{parent.run_id}:ok"):
        assert dependency(toolkit, "--after", name) == ["--dependency=afterok:7", kill]
    assert dependency(toolkit, "--after", "9_2:any") == ["--dependency=afterany:9_2", kill]
    own = dependency(toolkit, "--after", "7", "--set", "job.sbatch=['--dependency=singleton']")
    assert own[-2:] == ["--dependency=singleton,afterok:7", kill], own
    both = dependency(toolkit, "--after", "7", "--after", f"{array.run_id}:any", "-d", "singleton")
    assert both[-2:] == ["--dependency=singleton,afterok:7,afterany:9", kill]


def test_the_success_of_jobs_in_turn_is_not_slurms_to_tell(toolkit, squeue):
    toolkit.ok("render", toolkit.job("true", name="turns"), "--site", "devcluster", "--repeat", 3)
    (path,) = toolkit.runs.glob("turns/*")
    write_json(path / "submitted-000.json", {"job_id": "7", "start": 0, "time": "2026-11-21T02:48:01.000Z"})
    squeue(("7_1", "RUNNING", "None"))
    said = toolkit("render", toolkit.job("true", name="child"), "--site", "devcluster", "--after", path.name)
    assert (
        said.code,
        f"Fix: `toolkit wait {path.name} && toolkit submit ...`, or --after {path.name}:any" in said.err,
    ) == (1, True)
    assert dependency(toolkit, "--after", f"{path.name}:any")[0] == "--dependency=afterany:7"


def test_the_record_keeps_the_parent(toolkit, squeue):
    parent = submitted(toolkit, "7", "parent")
    squeue(("7", "RUNNING", "None"))
    dependency(toolkit, "--after", "7")
    (child,) = toolkit.runs.glob("child/*")
    kept = {"run_id": parent.run_id, "kind": "ok", "job_id": "7", "path": str(parent.path)}
    assert json.loads((child / "record.json").read_text())["after"] == [kept]


@pytest.mark.parametrize(
    ("state", "kind", "fine"),
    [("completed", "ok", True), ("failed", "ok", False), ("failed", "any", True), ("cancelled", "ok", False)],
)
def test_of_a_parent_that_has_ended_only_its_state_counts(toolkit, squeue, state, kind, fine):
    parent = submitted(toolkit, "7", "parent")
    end(parent, state)
    said = toolkit("render", toolkit.job("true", name="child"), "--site", "devcluster", "--after", f"7:{kind}")
    if fine:
        assert (said.code, "--dependency" in said.out) == (0, False)
        assert f"{state}, so the job need not wait for it" in said.err
    else:
        assert (said.code, f"toolkit resume {parent.run_id}" in said.err) == (1, True)
        assert not list(toolkit.runs.glob("child/*"))


def test_a_parent_that_nothing_can_wait_for_is_refused(toolkit, squeue):
    job = toolkit.job("true", name="child")
    assert toolkit("render", job, "--site", "devcluster", "--after", "nobody").code == 4
    toolkit.ok("render", toolkit.job("true", name="drawn"), "--site", "devcluster")
    (drawn,) = toolkit.runs.glob("drawn/*")
    assert "was rendered but not submitted" in toolkit("render", job, "--site", "devcluster", "--after", drawn.name).err
    submitted(toolkit, "7", "parent")
    squeue(("7", "RUNNING", "None"))
    assert "no scheduler" in toolkit("render", job, "--site", "local", "--after", "7").err
    squeue(("7", "NEW_STATE", "None"))
    assert "is unknown: " in toolkit("render", job, "--site", "devcluster", "--after", "7").err
    squeue(("7", "RUNNING", "None"))
    both = toolkit("render", job, "--site", "devcluster", "--after", "7", "--after", "7:any")
    assert (both.code, "passed with both :ok and :any" in both.err) == (2, True)


def test_all_parents_that_are_refused_are_named(toolkit, squeue):
    squeue()
    said = toolkit("submit", toolkit.job("true"), "--site", "devcluster", "--after", "nobody", "--after", "last:okay")
    assert said.code == 4, said
    assert [
        "run 'nobody' not found" in said.err,
        "expected RUN, RUN:ok or RUN:any, got 'last:okay'" in said.err,
        len(said.err.splitlines()),
    ] == [True, True, 2]


def test_one_of_several_dependencies_cannot_be_joined():
    with pytest.raises(ToolkitError, match=r"--after requires all of its runs, but .* is satisfied by any of its jobs"):
        dependency_options([Parent("x", "ok", "7", "/x")], ["--dependency=afterok:1?afterok:2"])


@pytest.fixture
def chain(toolkit, squeue):
    """A parent, the child that follows it, and the child's own."""
    parent = submitted(toolkit, "7", "parent")
    squeue(("7", "RUNNING", "None"), ("8", "PENDING", "Dependency"))
    runs = [parent]
    for job_id, after in (("8", "7"), ("9", "8")):
        toolkit.ok("render", toolkit.job("true", name=f"job{job_id}"), "--site", "devcluster", "--after", after)
        (path,) = toolkit.runs.glob(f"job{job_id}/*")
        write_json(path / "submitted-000.json", {"job_id": job_id, "start": 0, "time": "2026-11-21T02:48:01.000Z"})
        runs.append(toolkit.run(path.name))
    return runs


def test_a_tree_has_children_below_parents_and_resumes_between(toolkit, squeue, chain):
    parent, child, grandchild = chain
    write_json(
        child.resumed(1), {"time": "2026-11-21T03:00:00.000Z", "job": json.loads(child.record.read_text())["job"]}
    )
    after = json.loads(child.record.read_text())["after"]
    write_json(child.resumed(1), {**json.loads(child.resumed(1).read_text()), "after": after})
    write_json(child.submitted(1), {"job_id": "11", "start": 1, "time": "2026-11-21T03:00:01.000Z"})
    squeue(("7", "RUNNING", "None"))
    lines = toolkit.ok("history", "--tree").splitlines()
    assert lines[0].startswith(f"{parent.run_id} parent running (job 7)")
    assert lines[1].startswith(f"└─ {child.run_id} job8 ")
    assert lines[1].endswith(f"after ok {parent.run_id}")
    assert lines[2] == "   ├─ resumed at 2026-11-21T03:00:00.000Z as start 1, job 11"
    assert lines[3].startswith(f"   └─ {grandchild.run_id} job9 ")
    (root,) = json.loads(toolkit.ok("history", "--tree", "--json"))
    (below,) = root["children"]
    assert (root["run"]["run_id"], root["links"]) == (parent.run_id, [])
    assert below["links"] == [{"kind": "after ok", "run_id": parent.run_id}]
    assert below["resumes"] == [{"start": 1, "time": "2026-11-21T03:00:00.000Z", "job_id": "11"}]
    assert below["children"][0]["run"]["run_id"] == grandchild.run_id


def test_a_damaged_run_of_a_tree_is_named_and_keeps_what_else_is_known_of_it(toolkit, squeue, chain):
    parent, child, grandchild = chain
    parent.record.write_text("{")
    whole = json.loads(child.record.read_text())
    write_json(child.resumed(1), {"time": "2026-11-21T03:00:00.000Z", "job": whole["job"], "after": [{"run_id": 7}]})
    child.submitted(1).write_text("[]")
    lines = toolkit.ok("history", "--tree").splitlines()
    assert lines[0].startswith(f"{parent.run_id} parent unknown (job 7): record.json is damaged")
    assert lines[1].startswith(f"└─ {child.run_id} job8 ") and f", after ok {parent.run_id}" in lines[1]
    assert f"{child.resumed(1)}:after: the record is damaged" in lines[1] and str(child.submitted(1)) in lines[1]
    assert lines[2] == "   ├─ resumed at 2026-11-21T03:00:00.000Z as start 1"
    assert lines[3].startswith(f"   └─ {grandchild.run_id} job9 ")
    (root,) = json.loads(toolkit.ok("history", "--tree", "--json"))
    assert (len(root["damage"]), len(root["children"][0]["damage"])) == (1, 2)


def test_a_child_whose_parent_failed_says_so(toolkit, fake_slurm, squeue, chain):
    parent, child, _ = chain
    assert f"afterok:7 (run {parent.run_id}) is not satisfied yet" in explained_dependency(
        toolkit, fake_slurm, child, "afterok:7"
    )
    of_a_task = explained_dependency(toolkit, fake_slurm, child, "after:6+10(unfulfilled),afterok:7_12(failed)")
    assert f"after:6 is not satisfied yet, afterok:7_12 (run {parent.run_id}) cannot be satisfied" in of_a_task
    end(parent, "failed")
    squeue(("8", "CANCELLED", "DependencyNeverSatisfied"))
    told = json.loads(toolkit.ok("explain", child.run_id, "--json"))
    assert told["symptom"] == "parent_failed"
    assert f"run {parent.run_id}, whose success it requires, failed" in told["why"]
    assert f"toolkit resume {child.run_id} --after {parent.run_id}" in told["actions"][1]


def explained_dependency(toolkit, fake_slurm, run, dependency):
    rows = (("7", "RUNNING", "None"), ("8", "PENDING", "Dependency"))
    fake_slurm.queue(*rows, dependency=dependency)
    explanation = toolkit.ok("explain", run.run_id)
    fake_slurm.queue(*rows)
    return explanation


def test_a_resume_follows_a_parent_again(toolkit, squeue, sbatch, chain):
    _, child, _ = chain
    squeue(("7", "RUNNING", "None"), ("8", "CANCELLED", "DependencyNeverSatisfied"))
    toolkit.ok("resume", child.run_id, "--after", "7")
    assert "--dependency=afterok:7" in directives(child.script(1).read_text())
    assert json.loads(child.resumed(1).read_text())["after"][0]["job_id"] == "7"
    assert toolkit("resume", child.run_id, "--after", "7", "--here").code == 2
