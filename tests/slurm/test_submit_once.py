"""One job for one start, whatever sbatch says. Small programs stand for a Slurm that misbehaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from toolkit.errors import SchedulerRefusedError
from toolkit.slurm import submit
from toolkit.slurm.commands import Slurm
from toolkit.slurm.submit import UnsettledError, comment_of, find_by_token, submit_once, token_of

TOKEN = token_of("20261120-142233-9f3a", 3)
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class PretendedSlurm(FakeSlurm):
    """Commands as lines of bash; squeue prints the file `queue`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.queue_file = folder / "queue"
        self.queue_file.touch()
        self.command("squeue", f"cat {self.queue_file}")
        self.without_accounting()

    def command(self, name: str, body: str) -> None:
        self.script(name, body, "/bin/bash")


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedSlurm:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(submit, "_PAUSES_S", (0.05, 0.1))
    monkeypatch.setattr(submit, "SETTLE_S", 0.15)
    return PretendedSlurm(tmp_path)


def submitted(patience_s: float = 5.0) -> tuple[str, list[str]]:
    said: list[str] = []
    return submit_once(Slurm(), Path("job.sbatch"), TOKEN, patience_s=patience_s, say=said.append), said


def test_a_job_that_was_taken_without_an_answer_is_found_and_not_sent_again(pretended: PretendedSlurm) -> None:
    other = f"toolkit:20261120-142233-9f3a:33\x1f{TOKEN}"
    rows = f"70\x1f{other}\\n71\x1f{TOKEN} and my words\\n72\x1f(null)"
    pretended.command("sbatch", f"printf '{rows}\\n' > {pretended.queue_file}; echo '{TIMED_OUT}' >&2; exit 1")
    job_id, said = submitted()
    assert job_id == "71"
    assert "Socket timed out" in said[0] and "job 71" in said[-1]
    assert len(pretended.calls("sbatch")) == 1


def test_a_job_that_is_nowhere_is_sent_again_after_two_answers(pretended: PretendedSlurm) -> None:
    once = pretended.folder / "once"
    failing = f"[ -e {once} ] && {{ echo 8; exit; }}; touch {once}; echo '{TIMED_OUT}' >&2; exit 1"
    pretended.command("sbatch", failing)
    assert submitted()[0] == "8"
    assert len(pretended.calls("sbatch")) == 2
    assert len(pretended.calls("squeue")) >= 2  # a late request may come between


def test_a_late_job_is_found_by_the_second_question(pretended: PretendedSlurm) -> None:
    """slurmctld went on, answered squeue first, and took the waiting request after it."""
    pretended.command("sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    pretended.command("squeue", f"cat {pretended.queue_file}; echo $'9\\x1f{TOKEN}' > {pretended.queue_file}")
    assert submitted()[0] == "9"
    assert len(pretended.calls("sbatch")) == 1


# "no number": a site's wrapper; 137: it tells that its sbatch was killed; 255: its ssh lost the connection.
@pytest.mark.parametrize(
    "answer",
    ["echo 'no number here'", "exec sleep 20", "kill -9 $$", "kill $$", "exit 137", "echo closed >&2; exit 255"],
)
def test_an_sbatch_without_an_id_or_an_answer_is_looked_after(pretended: PretendedSlurm, answer: str) -> None:
    pretended.command("sbatch", f"echo $'12\\x1f{TOKEN}' > {pretended.queue_file}; {answer}")
    assert submit_once(Slurm(timeout_s=3.0), Path("job.sbatch"), TOKEN, say=[].append) == "12"
    assert len(pretended.calls("sbatch")) == 1


def test_an_sbatch_that_was_killed_is_named_with_its_signal(pretended: PretendedSlurm) -> None:
    pretended.command("sbatch", f"echo $'12\\x1f{TOKEN}' > {pretended.queue_file}; kill -9 $$")
    assert submitted()[1][0].startswith("sbatch was killed by SIGKILL; searching Slurm")


def test_a_slurm_that_stays_away_is_given_up_in_time(pretended: PretendedSlurm) -> None:
    pretended.command("sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    pretended.command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UnsettledError, match="cannot determine whether Slurm accepted the job") as error:
        submitted(patience_s=0.5)
    assert error.value.exit_code == 3
    assert len(pretended.calls("sbatch")) == 1


def test_how_long_slurm_is_asked_is_told_with_the_hint(pretended: PretendedSlurm) -> None:
    pretended.command("sbatch", f"echo $'12\\x1f{TOKEN}' > {pretended.queue_file}; echo '{TIMED_OUT}' >&2; exit 1")
    said: list[str] = []
    submit_once(Slurm(), Path("job.sbatch"), TOKEN, patience_s=30.4, say=said.append, hint="; Ctrl-C keeps it")
    assert said[0].endswith(f"searching Slurm for the job by its comment {TOKEN}, for up to 30 s; Ctrl-C keeps it")


@pytest.mark.parametrize("missing", ["squeue", "slurm.conf"])
def test_a_question_that_cannot_be_asked_is_no_answer(
    pretended: PretendedSlurm, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module was unloaded, or the file system of Slurm's configuration went away, behind sbatch's back."""
    monkeypatch.setenv("PATH", str(pretended.folder))
    (pretended.folder / "slurm.conf").touch()
    pretended.command("sbatch", f"/bin/rm {pretended.folder}/{missing}; echo '{TIMED_OUT}' >&2; exit 1")
    slurm = Slurm(configuration=str(pretended.folder / "slurm.conf"))
    with pytest.raises(UnsettledError, match="cannot determine") as error:
        submit_once(slurm, Path("job.sbatch"), TOKEN, patience_s=0.5, say=[].append)
    assert missing in error.value.message


def test_a_refusal_is_no_question(pretended: PretendedSlurm) -> None:
    refused = "sbatch: error: Batch job submission failed: Invalid account"
    pretended.command("sbatch", f"echo '{refused}' >&2; exit 1")
    with pytest.raises(SchedulerRefusedError, match="Invalid account") as error:
        submitted()
    assert not isinstance(error.value, UnsettledError)
    assert pretended.calls("squeue") == []


def test_ended_jobs_are_found_in_the_accounting(pretended: PretendedSlurm) -> None:
    pretended.command("sacct", f"printf '5_3\x1f{TOKEN}\\n6\x1f\\n'")
    assert find_by_token(Slurm(), TOKEN) == "5"
    assert find_by_token(Slurm(), token_of("another", 0)) is None


def test_the_users_comment_stands_behind_the_token(pretended: PretendedSlurm) -> None:
    assert comment_of(TOKEN, ["--hold", "--comment=a", "--comment=my own words"]) == f"{TOKEN} my own words"
    assert comment_of(TOKEN, ["--mail-type=END"]) == TOKEN
    assert comment_of(TOKEN, ['--comment "my own words"', "--comments=no"]) == f"{TOKEN} my own words"
    assert comment_of(TOKEN, ["--comment it's"]) == f"{TOKEN} it's"
    pretended.command("sbatch", "echo 'Welcome to ours, job 7 of the day'; echo '44;cluster'")
    submit_once(Slurm(), Path("job.sbatch"), f"{TOKEN} my own", options=["--dependency=afterany:3"])
    assert pretended.calls("sbatch") == [
        f"sbatch --parsable --dependency=afterany:3 --comment={TOKEN} my own job.sbatch"
    ]


def test_sbatch_inherits_nothing_of_the_job_around_it(
    pretended: PretendedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.command("sbatch", f"env > {pretended.folder}/seen; echo 1")
    around = {"SLURM_JOB_ID": "5", "SLURM_MEM_PER_NODE": "3072", "PMIX_RANK": "1", "CUDA_VISIBLE_DEVICES": "0", "TMPDIR": "/job/5"}  # fmt: skip
    for name, value in {**around, "SLURM_CONF": "/ours", "MINE": "1"}.items():
        monkeypatch.setenv(name, value)
    submitted()
    seen = dict(line.split("=", 1) for line in (pretended.folder / "seen").read_text().splitlines())
    assert not set(around) & set(seen)
    assert (seen["SLURM_CONF"], seen["MINE"]) == ("/ours", "1")
    monkeypatch.delenv("SLURM_JOB_ID")  # on a login node the choice of a GPU is the user's
    submitted()
    assert "CUDA_VISIBLE_DEVICES=0\n" in (pretended.folder / "seen").read_text()
