"""JOB is a path or the name of a shipped job."""

import pytest

import toolkit.jobs
from toolkit.config.request import resolve_job
from toolkit.config.shipped import find_job
from toolkit.errors import NotFoundError, ToolkitError


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    folder = tmp_path / "jobs"
    folder.mkdir()
    (tmp_path / "typo.toml").touch()
    (folder / "train_lm.toml").touch()
    monkeypatch.setattr(toolkit.jobs, "__path__", [str(folder)])
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_path_a_name_and_a_name_that_is_also_a_file(jobs, tmp_path):
    (tmp_path / "mine.toml").touch()
    assert find_job("mine.toml") == tmp_path / "mine.toml"
    assert find_job("train_lm") == jobs / "train_lm.toml"
    (tmp_path / "train_lm").touch()
    assert find_job("train_lm") == tmp_path / "train_lm"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("trainlm", "'trainlm' is neither a file nor a shipped job. Fix: write 'train_lm'"),
        (
            "xyzzy",
            "'xyzzy' is neither a file nor a shipped job. Fix: specify the path of a job file, or one of train_lm",
        ),
        ("nofile.toml", "nofile.toml: job file not found. Fix: specify the path of a job file or a program"),
        ("jobs/train.toml", "jobs/train.toml: job file not found. Fix: use jobs/train_lm.toml"),
    ],
)
def test_what_is_not_there(jobs, tmp_path, job, message):
    with pytest.raises(NotFoundError) as caught:
        find_job(job)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == message


def test_a_file_name_that_is_no_job_name(tmp_path):
    path = tmp_path / "my job.toml"
    path.write_text('[job]\nentry = ["true"]\n')
    with pytest.raises(ToolkitError) as caught:
        resolve_job(path, site=None, environ={})
    assert str(caught.value) == (
        f"{path}: 'my job' is not a valid job name, and [job] does not set one. "
        'Fix: write name = "my_job" in [job], or use -J my_job'
    )
    assert resolve_job(path, site=None, environ={"SBATCH_JOB_NAME": "mine"}).job.name == "mine"


def test_a_name_without_its_ending_is_the_file_in_this_folder(jobs, tmp_path):
    (tmp_path / "trainlm.toml").touch()
    with pytest.raises(
        NotFoundError, match=r"^'trainlm' is neither a file nor a shipped job\. Fix: write \./trainlm\.toml$"
    ):
        find_job("trainlm")


@pytest.mark.parametrize(("path", "said"), [("/dev/null", "a device or a pipe"), ("jobs/", "a folder")])
def test_what_is_there_and_no_file(jobs, path, said):
    with pytest.raises(ToolkitError, match=rf"expected a job file, got {said}\. Fix: specify the path of a job file"):
        find_job(path)


def test_a_mark_before_the_first_letter_is_no_part_of_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[job]\nentry = ["true"]\n', encoding="utf-8-sig")
    assert resolve_job(path, site=None, environ={}).job.entry == ["true"]
