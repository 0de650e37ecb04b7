"""The wrapper around Slurm's commands: what they inherit, and what becomes of one that is missing, fails or hangs.

Slurm itself is tested on the dev cluster; here small programs stand for commands that misbehave.
"""

import time
from functools import partial

import pytest

from toolkit.errors import NotFoundError, SchedulerRefusedError
from toolkit.slurm import commands
from toolkit.slurm.commands import NoAnswerError, Slurm


@pytest.fixture
def command(fake_slurm):
    """Make a command of Slurm run lines of bash."""
    return partial(fake_slurm.script, shell="/bin/bash")


def test_a_users_formats_do_not_reach_the_commands():
    spoilt = {
        "SQUEUE_FORMAT": "%j", "SQUEUE_STATES": "PD", "SACCT_FORMAT": "User", "SINFO_FORMAT": "%n",
        "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "other", "SCONTROL_ALL": "1",
    }  # fmt: skip
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf"}
    assert Slurm().environment({**spoilt, **kept}) == kept
    assert Slurm(configuration="/mine").environment({**spoilt, **kept})["SLURM_CONF"] == "/mine"


def test_the_scrubbed_environment_is_what_the_command_sees(command, monkeypatch, tmp_path):
    mine = tmp_path / "slurm.conf"
    mine.touch()
    command("squeue", 'echo "${SQUEUE_FORMAT-none} ${SLURM_CONF-none}"')
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    assert Slurm(configuration=str(mine)).call(["squeue"]) == f"none {mine}\n"


def test_a_slurm_conf_that_is_not_there_is_named_at_once(command):
    """Slurm's commands would look for it for a minute, and be cut off without a word."""
    command("squeue", "sleep 60")
    with pytest.raises(NotFoundError, match=r"slurm\.conf of the site not found") as error:
        Slurm(configuration="/nowhere/slurm.conf").call(["squeue"])
    assert error.value.where == "/nowhere/slurm.conf"


def test_a_missing_command_is_not_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFoundError, match="squeue not found on PATH") as error:
        Slurm().call(["squeue"])
    assert error.value.exit_code == 4
    assert "--site local" in error.value.fix


def test_a_refusal_keeps_slurms_own_words_in_one_line(command):
    command("sbatch", "echo 'sbatch: error: Batch job submission failed:\n Invalid account' >&2; exit 1")
    with pytest.raises(SchedulerRefusedError, match=r"^sbatch: Invalid account") as error:
        Slurm().call(["sbatch"])
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)


def test_a_silent_failure_tells_its_exit_code(command):
    command("scancel", "exit 7")
    with pytest.raises(SchedulerRefusedError, match="scancel: exit code 7"):
        Slurm().cancel(["1"])


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("kill -9 $$", "squeue was killed by SIGKILL"), ("echo oh no >&2; exit 143", "squeue was killed by SIGTERM: oh no"),
        ("exit 255", "squeue lost its connection, with exit code 255"),
        ("echo 'client_loop: send disconnect: Broken pipe' >&2; exit 255",
         "squeue lost its connection, with exit code 255: client_loop: send disconnect: Broken pipe"),
        ("echo 'Connection to login1 closed by remote host.' >&2; exit 255",
         "squeue lost its connection, with exit code 255: Connection to login1 closed by remote host."),
    ],
)  # fmt: skip
def test_a_command_that_was_killed_gave_no_answer(command, end, said):
    command("squeue", end)
    with pytest.raises(NoAnswerError) as error:
        Slurm().call(["squeue"])
    assert error.value.message == said


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("printf \"sbatch: unrecognized option '--foo'\\nTry \\\"sbatch --help\\\" for more information\\n\" >&2; exit 255",
         "sbatch: unrecognized option '--foo'; Try \"sbatch --help\" for more information"),
        ("echo 'sbatch: error: Invalid --mem specification' >&2; exit 255", "sbatch: Invalid --mem specification"),
        ("exit 192", "sbatch: exit code 192"),  # 64 is a signal that nobody sends
    ],
)  # fmt: skip
def test_an_exit_code_above_128_that_is_no_signals_is_a_refusal(command, end, said):
    command("sbatch", end)
    with pytest.raises(SchedulerRefusedError) as error:
        Slurm().call(["sbatch"])
    assert error.value.message == said
    assert not isinstance(error.value, NoAnswerError)
    assert ("correct it in the script or in [job]" in error.value.fix) == ("--" in said)


def test_a_command_that_hangs_is_given_up_on(command):
    command("squeue", "sleep 30")  # a site's wrapper: the sleep keeps the pipe after bash was killed
    began = time.monotonic()
    with pytest.raises(SchedulerRefusedError, match="squeue did not respond within 0 s"):
        Slurm(timeout_s=0.2).call(["squeue"])
    assert time.monotonic() - began < 20


def test_the_command_is_echoed_on_stderr_as_a_shell_reads_it(command, capsys):
    command("scontrol", "true")
    Slurm(echo=True).call(["scontrol", "update", "comment=two words"])
    assert capsys.readouterr().err == "+ scontrol update 'comment=two words'\n"


QUEUE_MARK = "mark=$(sed -n 's/.*--Format=JobArrayID:\\([^,]*\\),.*/\\1/p' <<< \"$*\"); "
ACCOUNTS_MARK = "mark=$(sed -n 's/.*--delimiter=\\(\\S*\\) .*/\\1/p' <<< \"$*\"); "


def answer(mark, *rows):
    """A command that prints rows as Slurm does: the mark behind each cell, the id at both ends, a line end behind each row."""
    cells = "".join("".join(f"{cell}@" for cell in (*row, row[0])) + "\n" for row in rows)
    return f"{mark} sed \"s/@/$mark/g\" <<'END'\n{cells}END"


def damaged(mark, how, *rows):
    """The same, behind an accident: what the sed commands `how` make of it."""
    return f'{mark} ( {answer(mark, *rows)}\n) | sed "{how}"'


def queued(job, state, reason="None", comment="(null)"):
    times = ("1:00", "2026-11-21T02:48:01", "2026-11-21T02:48:01")
    ask = ("main", "1", "5:00", "N/A", "(null)", "(null)")
    return (job, state, reason, "n1", *times, "1", comment, *ask)


def test_a_job_is_looked_for_in_the_queue_then_in_accounting(command):
    command(
        "squeue", answer(QUEUE_MARK, queued("1", "RUNNING"), queued("5_[2-4,9%2]", "PENDING"), queued("6+0", "RUNNING"))
    )
    command("sacct", answer(ACCOUNTS_MARK, ("2", "CANCELLED by 1000", "0:15", "n1", "2026-11-21T02:48:01"),
                            ("3", "RUNNING", "0:0", "n1", "2026-11-21T02:48:01"), ("5_1", "FAILED", "1:0", "n1", "x")))  # fmt: skip
    facts = Slurm().jobs(["1", "2", "3", "4", "5_1", "5_3", "5_5", "6"])
    assert {job: (fact.state, fact.source) for job, fact in facts.items()} == {
        "1": ("RUNNING", "squeue"),
        "2": ("CANCELLED by 1000", "sacct"),
        "3": ("", "sacct"),  # accounting lags behind: the queue has forgotten it, so it cannot be running
        "5_1": ("FAILED", "sacct"),
        "5_3": ("PENDING", "squeue"),
        "6": ("RUNNING", "squeue"),
    }  # nobody knows 4 and 5_5: they are left out, not guessed
    assert "accounting reports RUNNING" in facts["3"].reason
    assert (facts["2"].cancelled_by, facts["1"].restarts, facts["5_3"].job_id) == (1000, 1, "5_3")


@pytest.mark.parametrize("comment", ["a|b\nc", "x\x1fy", "\n9\x1fCOMPLETED", "~~", "JobState=COMPLETED"])
def test_a_comment_breaks_no_row(command, comment):
    command("squeue", answer(QUEUE_MARK, queued("1", "FAILED", comment=comment), queued("2", "RUNNING")))
    facts = Slurm().jobs(["1", "2", "9"])
    assert {job: fact.state for job, fact in facts.items()} == {"1": "FAILED", "2": "RUNNING"}
    assert facts["1"].comment == comment.strip()


def test_of_a_job_that_was_requeued_the_last_life_counts(command):
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    lives = [
        ("1", "COMPLETED", "0:0", "n1", "2026-11-21T03:00:00"),
        ("1", "PREEMPTED", "0:0", "n1", "2026-11-21T02:00:00"),
    ]
    command("sacct", answer(ACCOUNTS_MARK, *lives))
    assert Slurm().jobs(["1"])["1"].state == "COMPLETED"
    command("sacct", answer(ACCOUNTS_MARK, *lives[::-1]))
    assert Slurm().jobs(["1"])["1"].state == "COMPLETED"


def test_while_squeue_is_silent_only_an_end_is_a_fact(command):
    command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    command("sacct", answer(ACCOUNTS_MARK, ("1", "TIMEOUT", "0:0", "n1", "x"), ("2", "RUNNING", "0:0", "n1", "x")))
    facts = Slurm().jobs(["1", "2", "3"])
    assert {job: fact.state for job, fact in facts.items()} == {"1": "TIMEOUT", "2": "", "3": ""}
    assert "Unable to contact" in facts["2"].reason


def test_a_controller_that_is_down_is_no_proof_that_a_job_is_gone(command):
    command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SchedulerRefusedError, match="Unable to contact"):
        Slurm().jobs(["1"])


THREE = (queued("1", "RUNNING"), queued("2", "RUNNING"), queued("3", "RUNNING"))
ENDED = ("3", "FAILED", "1:0", "n1", "x")
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.mark.parametrize("line_end", ["", "\r"])
def test_a_sites_greeting_above_the_queue_hides_no_job(command, line_end):
    greeting = "Welcome to Big Iron, ~2026~!\\nMaintenance on 3 December."
    command("squeue", damaged(QUEUE_MARK, f"1i {greeting}\n; s/$/{line_end}/", *THREE))
    assert {job: fact.state for job, fact in Slurm().jobs(["1", "2", "3"]).items()} == dict.fromkeys("123", "RUNNING")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("2s/^2/x/", "x RUNNING"), ("2s/2//", "RUNNING"), ("2s/RUNNING$mark//", "2 None"), ("2s/None$mark/&&/", "2 RUNNING"),
        ("1i slurm_load_jobs error: no answer\nd", "slurm_load_jobs"), ("1s/^1$mark/1 /", "1 RUNNING"), ("2,\\$d; s/n1.*//", "1 RUNNING"),
        ("2a warning: slow", "warning: slow"), ("3s/$mark.*//", "'3'"), ("1s/1$mark$/&7/", "7"), ("s/$mark/ /g", "1 RUNNING"),
        ("2s/^2/2_[1,3,...]/; 2s/2$mark$/2_[1,3,...]$mark/", "2_[1,3,...] RUNNING"),
    ],
)  # fmt: skip
def test_a_queue_that_cannot_be_read_has_forgotten_nobody(command, how, said):
    """A job behind the damage would count as lost, and be started a second time beside the one that runs."""
    command("squeue", damaged(QUEUE_MARK, how, *THREE))
    command("sacct", NO_ACCOUNTING)
    with pytest.raises(SchedulerRefusedError, match="cannot parse the output of squeue") as error:
        Slurm().jobs(["1", "2", "3"])
    assert said in error.value.message
    command("sacct", answer(ACCOUNTS_MARK, ENDED))
    assert {job: fact.state for job, fact in Slurm().jobs(["1", "2", "3"]).items()} == {"1": "", "2": "", "3": "FAILED"}


def test_tasks_that_the_queue_does_not_list_wait(command):
    command("squeue", answer(QUEUE_MARK, queued("5_1", "RUNNING"), queued("5_*", "PENDING"), queued("6", "RUNNING")))
    facts = Slurm().jobs(["5_1", "5_2", "6"])
    assert {job: fact.state for job, fact in facts.items()} == {"5_1": "RUNNING", "5_2": "PENDING", "6": "RUNNING"}


def test_an_accounting_that_cannot_be_read_makes_no_job_lost(command):
    command("squeue", answer(QUEUE_MARK, THREE[0]))
    command("sacct", damaged(ACCOUNTS_MARK, "1s/0:0/&$mark/", ("2", "COMPLETED", "0:0", "n1", "x"), ENDED))
    facts = Slurm().jobs(["1", "2", "3"])
    assert {job: fact.state for job, fact in facts.items()} == {"1": "RUNNING", "2": "", "3": ""}
    assert "cannot parse the output of sacct" in facts["3"].reason
    assert Slurm().accounted(["2", "3"]) == {}


def test_a_slurm_that_does_not_answer_is_told_with_how_long_it_is_waited_for(command, monkeypatch, capfd):
    monkeypatch.setattr(commands, "SLOW_S", 0.05)
    command("squeue", "sleep 0.3")
    Slurm(timeout_s=20.0).call(["squeue"])
    assert capfd.readouterr().err == "toolkit: Slurm has not responded to squeue yet; waiting up to 20 s\n"
    command("squeue", "true")
    Slurm(timeout_s=20.0).call(["squeue"])
    assert capfd.readouterr().err == ""


def test_a_silent_controller_is_asked_once_by_a_command_and_again_later(command, monkeypatch, tmp_path):
    silent = f"echo x >> {tmp_path}/asked; echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    for name in ("squeue", "scancel", "sbatch"):
        command(name, silent)
    slurm = Slurm(silences=commands.Silences())
    for asked in (["squeue"], ["scancel", "1"], ["squeue"]):
        with pytest.raises(SchedulerRefusedError, match="Unable to contact"):
            slurm.call(asked)
    asked = tmp_path / "asked"
    assert asked.read_text() == "x\n"
    for caller, words in ((slurm, ["sbatch"]), (Slurm(), ["squeue"])):  # a job is always handed over
        with pytest.raises(SchedulerRefusedError):
            caller.call(words)
    assert asked.read_text() == "x\n" * 3
    monkeypatch.setattr(commands, "REMEMBERED_S", 0.0)
    with pytest.raises(SchedulerRefusedError):
        slurm.call(["squeue"])
    assert asked.read_text() == "x\n" * 4


def test_a_refusal_is_no_silence(command):
    command("squeue", "echo 'Invalid user' >&2; exit 1")
    slurm = Slurm(silences=commands.Silences())
    with pytest.raises(SchedulerRefusedError):
        slurm.call(["squeue"])
    command("squeue", "echo 7")
    assert slurm.call(["squeue"]) == "7\n"
