"""From what a user types to a run."""

import re

import pytest

from toolkit.errors import NotFoundError, ToolkitError
from toolkit.rundir.claims import claim_start, end_start
from toolkit.rundir.files import runs_folder, write_json
from toolkit.rundir.find import find_run, refuse_part
from toolkit.rundir.jobs import job_ids
from toolkit.rundir.layout import create_run

RECORD = {"job": {"job": {"array": ""}, "site": {"name": "sunway"}}, "host": "n1"}


@pytest.fixture
def runs(tmp_path):
    """Two runs of two jobs: the older one was submitted as 122 and 123, the newer one as 4567."""
    older, newer = create_run(tmp_path, "train_lm"), create_run(tmp_path, "hello")
    for run in (older, newer):
        write_json(run.record, RECORD)
    write_json(older.path / "submitted-000.json", {"job_id": "122"})
    write_json(older.path / "submitted-001.json", {"job_id": "123"})
    claim_start(newer, first=0, job_id="4567", host="n1", pid=1, process_started=1)
    return tmp_path, older, newer


@pytest.mark.parametrize(
    "text",
    [
        "123",
        "123.batch",
        "123.0",
        "123_[1-8]",
        "123_[5-9,...%2]",
        "123+0",
        "123+1.0",
        "123;sunway",
        "123.extern;sunway",
        "122",
    ],
)
def test_a_job_id_in_any_form_finds_its_run(runs, text):
    folder, older, _ = runs
    assert find_run(text, folder) == older.path


@pytest.mark.parametrize("text", ["123_4", "123_4.batch", "123_4.0;sunway", "last_4", "{id}_4", "train_lm/{id}_4"])
def test_what_is_no_array_has_no_task(runs, text):
    folder, older, _ = runs
    with pytest.raises(
        NotFoundError, match=r"is not an array run, so it does not have a task 4.*use .*, without a task number"
    ):
        find_run(text.format(id=older.run_id), folder)


def test_what_lies_behind_a_dot_is_no_run(runs):
    """Such as environments that were packed for env.stage."""
    folder, older, _ = runs
    (folder / ".environments").mkdir()
    (folder / ".environments" / "0123.tar").touch()
    assert find_run("123", folder) == older.path


def test_a_task_is_found_before_it_begins(runs):
    folder, older, newer = runs
    write_json(older.record, {**RECORD, "job": {"job": {"array": "0-9"}}})
    for name in ("123_4", "123_4.batch", f"{older.run_id}_4", f"train_lm/{older.run_id}_4"):
        assert find_run(name, folder) == older.task(4).path
    write_json(newer.record, {**RECORD, "job": {"job": {"array": "0-9"}}})
    assert find_run("last_4", folder) == newer.task(4).path


def test_id_job_and_id_last_and_path_find_a_run(runs):
    folder, older, newer = runs
    assert find_run(older.run_id, folder) == older.path
    assert find_run(f"train_lm/{older.run_id}", folder) == older.path
    assert find_run("last", folder) == newer.path
    assert find_run(str(older.path), folder / "elsewhere") == older.path
    assert find_run("4567.extern", folder) == newer.path  # known by its claim: given to sbatch by hand


def test_job_ids_are_told_once_and_the_newest_last(run_directory):
    def live(first, job_id):
        claim = claim_start(run_directory, first=first, job_id=job_id, host="n1", pid=1, process_started=1)
        end_start(run_directory, claim.start, state="failed", exit_code=1)

    live(0, "9")  # given to sbatch by hand: no submission recorded it
    write_json(run_directory.path / "submitted-001.json", {"job_id": "11"})
    assert job_ids(run_directory) == ["9", "11"]
    live(1, "11")
    assert job_ids(run_directory) == ["9", "11"]
    live(0, "9")  # an administrator requeued the first job
    assert job_ids(run_directory) == ["11", "9"]


@pytest.mark.parametrize("text", ["12", "1234", "45", "hello", "train_lm", "", "_4", ".batch"])
def test_what_is_no_run_is_not_found(runs, text):
    folder, *_ = runs
    with pytest.raises(NotFoundError, match=r"no run of job|not found"):
        find_run(text, folder)


@pytest.mark.parametrize("text", ["123foo", "123_", "123:0", "123.", "123+", "job 123", "lst", "123_4_5"])
def test_what_has_no_form_of_a_run_is_told_the_forms(runs, text):
    folder, *_ = runs
    refusal = re.escape(f"run {text!r} not found: not a run id, a path or a job id. Fix: ")
    with pytest.raises(NotFoundError, match=rf"{refusal}.*{re.escape('123;cluster')}"):
        find_run(text, folder)


def test_the_beginning_of_an_id_finds_the_one_run_that_begins_so(runs):
    folder, older, newer = runs
    assert find_run(older.run_id[:-1], folder) == older.path
    with pytest.raises(
        ToolkitError, match=f"ambiguous: 2 run ids have this prefix. Fix: .*{newer.run_id}, {older.run_id}"
    ):
        find_run(older.run_id[:9], folder)
    assert find_run(f"train_lm/{older.run_id[:9]}", folder) == older.path
    # Digits alone are a job id: who cancels a foreign job 20261120 must not meet the only run of that day.
    with pytest.raises(NotFoundError, match=f"run '{older.run_id[:8]}' not found"):
        find_run(older.run_id[:8], folder)


def test_the_cluster_behind_a_job_id_chooses_between_two(runs):
    folder, older, newer = runs
    write_json(newer.path / "submitted-000.json", {"job_id": "123"})
    write_json(newer.record, {"job": {"job": {"array": ""}, "site": {"name": "moonway"}}, "host": "n1"})
    with pytest.raises(ToolkitError) as error:
        find_run("123", folder)
    alone = f"{newer.run_id} (site moonway), {older.run_id} (site sunway)"
    assert str(error.value) == f"123: job 123 belongs to 2 runs. Fix: choose one of {alone}"
    assert find_run("123;sunway", folder) == older.path
    write_json(
        newer.record, {"job": {"job": {"array": "", "cluster": "far"}, "site": {"name": "sunway"}}, "host": "n1"}
    )
    assert find_run("123;far", folder) == newer.path
    assert find_run("123", folder) == older.path, "a number alone is never a job that is told with its cluster"


def test_a_number_alone_is_no_job_of_another_cluster(runs):
    """Also where it is the only run of that number, and where a resume has brought the run to this cluster since."""
    folder, older, _ = runs
    far = {"job": {"job": {"array": "", "cluster": "far"}, "site": {"name": "sunway"}}, "host": "n1"}
    write_json(older.record, far)
    with pytest.raises(
        NotFoundError, match=rf"no run on a site's own cluster has job 123\..*{older.run_id} .cluster far"
    ):
        find_run("123", folder)
    write_json(older.path / "resumed-002.json", RECORD)
    write_json(older.path / "submitted-002.json", {"job_id": "124"})
    assert find_run("124", folder) == find_run("123;far", folder) == older.path
    with pytest.raises(NotFoundError):
        find_run("124;far", folder)


def test_a_run_of_another_cluster_is_not_taken_for_the_one_that_is_named(runs):
    folder, older, _ = runs
    with pytest.raises(NotFoundError) as error:
        find_run("123;moonway", folder)
    assert error.value.message == "no run on cluster moonway has job 123"
    assert error.value.fix == f"choose the run with this job on another cluster: {older.run_id} (site sunway)"


def test_a_path_is_a_run_a_task_or_refused(runs, monkeypatch):
    folder, older, _ = runs
    write_json(older.record, {**RECORD, "job": {"job": {"array": "0-9"}}})
    monkeypatch.chdir(older.path.parent)
    for text in (f"{older.path}/", f"./{older.run_id}", older.run_id):
        assert find_run(text, folder) == older.path
    assert find_run(f"{older.path}/tasks/4", folder) == older.task(4).path
    with pytest.raises(
        NotFoundError, match=r"expected a run directory. Fix: pass the folder that contains record.json"
    ):
        find_run(str(older.path.parent), folder)


@pytest.mark.parametrize(
    ("text", "what"),
    [("123.0", "one step"), ("123+1", "one component"), ("123_[0-3]", "some tasks"), ("123_4.0", "one step")],
)
def test_what_is_done_to_a_run_is_not_done_for_a_part_of_it(text, what):
    with pytest.raises(ToolkitError, match=f"cancel expects a run or one task, got {what} of a job"):
        refuse_part(text, "cancel")


def test_a_run_and_a_task_are_no_parts():
    for text in ("123", "123_4", "123;sunway", "last", "last_4", "20261120-142233-9f3a_4", "./folder.of/runs"):
        refuse_part(text, "cancel")


def test_a_slip_of_the_pen_gets_the_nearest_names(runs):
    folder, older, _ = runs
    with pytest.raises(NotFoundError) as error:
        find_run(older.run_id[:-1] + "x", folder)
    assert older.run_id in error.value.fix
    assert error.value.exit_code == 4


def test_last_without_any_run_says_so(tmp_path):
    with pytest.raises(NotFoundError, match="no runs found"):
        find_run("last", tmp_path / "nowhere")


def test_the_runs_folder_comes_from_flag_variable_site_or_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variable = {"TOOLKIT_RUNS": "/from/variable"}
    assert str(runs_folder("/from/flag", variable, "/from/site")) == "/from/flag"
    assert str(runs_folder(None, variable, "/from/site")) == "/from/variable"
    assert str(runs_folder(None, {}, "/from/site")) == "/from/site"
    assert runs_folder("~nobody-of-that-name/runs", {}) == tmp_path / "~nobody-of-that-name/runs"
    assert runs_folder(None, {}) == tmp_path / "runs"


def test_last_is_the_newest_that_was_submitted_or_has_started(runs):
    folder, _, newer = runs
    rendered = create_run(folder, "rendered")
    write_json(rendered.record, RECORD)
    assert find_run("last", folder) == newer.path
    checked = create_run(folder, "site_probe")  # as `toolkit site check` leaves it
    write_json(checked.record, RECORD)
    write_json(checked.path / "submitted-000.json", {"job_id": "4569"})
    assert find_run("last", folder) == newer.path
    (newer.start(0) / "claim.json").unlink()
    newer.start(0).rmdir()
    write_json(newer.path / "submitted-000.json", {"job_id": "4568"})
    assert find_run("last", folder) == newer.path


def test_last_of_runs_that_are_only_rendered_says_so(tmp_path):
    rendered = create_run(tmp_path, "rendered")
    write_json(rendered.record, RECORD)
    with pytest.raises(NotFoundError, match=f"{rendered.run_id} is only rendered"):
        find_run("last", tmp_path)
