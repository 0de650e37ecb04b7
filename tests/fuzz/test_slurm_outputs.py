"""Whatever becomes of Slurm's answers on their way, nothing breaks and no job is called complete that is not."""

import json
from functools import cache
from pathlib import Path

import pytest
from fuzz_cases import fuzz
from hypothesis import given
from hypothesis import strategies as st

from toolkit.batch.living import slurm_word
from toolkit.cli.parse import KINDS, reader_of
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.slurm.job_facts import of_jobs, outlived, read_sacct, read_squeue
from toolkit.slurm.records import UnreadableError
from toolkit.slurm.states import run_state

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
OWN = {
    "squeue": "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
    "          77_[2-9]       gpu   my job     alma PD       0:00      4 (Resources)\n"
    "                78       gpu    train     alma  R       0:05      1 n1\n",
    "sacct": "JobID|JobName|State|ExitCode\n7|a|FAILED|1:0\n7.batch|batch|FAILED|1:0\n8|two\nlines|TIMEOUT|0:0\n",
    "sinfo": "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\nmain*        up   infinite      3   idle n[1-3]\n",
    "scontrol-show-job": "JobId=7 JobName=a b\n   JobState=FAILED Reason=None\n   NodeList=n1 Command=/x y=z\n\n",
    "scontrol-show-node": "NodeName=n1 Arch=x86_64\n   OS=Linux 6 #1\n   State=DOWN\n   Reason=bad [root@2024-01-01]\n",
    "scontrol-show-partition": "PartitionName=main\n   Default=YES\n   Nodes=n[1-3]\n   State=UP TotalNodes=3\n",
    "hostlist": "node[008-010,3]x[1-2],login\n",
}
REASON_FREE = frozenset({"nodelist_reason"})  # made of two columns where squeue prints two


@cache
def samples(kind: str) -> tuple[str, ...]:
    real = sorted((CORPUS / kind).glob("*.txt"))
    return (OWN[kind], *(path.read_text(errors="replace")[:6000] for path in real))


@st.composite
def damaged(draw, text: str) -> str:
    """The text after some accidents: cut, bytes dropped or put in, lines lost, doubled or in another order."""
    for _ in range(draw(st.integers(1, 4))):
        accident = draw(st.sampled_from(("cut", "drop", "insert", "lose", "double", "swap", "join")))
        at = draw(st.integers(0, len(text)))
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        if accident == "cut":
            text = text[:at]
        elif accident == "drop":
            text = text[:at] + text[at + draw(st.integers(1, 200)) :]
        elif accident == "insert":
            text = text[:at] + draw(st.text(max_size=8)) + text[at:]
        elif accident == "lose":
            text = "\n".join(lines[:line] + lines[line + 1 :])
        elif accident == "double":
            text = "\n".join(lines[: line + 1] + lines[line:])
        elif accident == "swap":
            text = "\n".join(lines[:line] + lines[line + 1 :] + lines[line : line + 1])
        else:
            text = "\n".join([*lines[:line], "".join(lines[line : line + 2]), *lines[line + 2 :]])
    return text


def leaves(value):
    """Every (key, text) inside an answer."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner) if isinstance(inner, dict | list) else [(key, inner)]
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


@pytest.mark.parametrize("kind", KINDS)
@fuzz(0.05)
@given(data=st.data())
def test_a_damaged_output_is_read_or_refused_and_states_only_what_it_holds(kind, data):
    text = data.draw(damaged(data.draw(st.sampled_from(samples(kind)))))
    reader, keys = reader_of(kind)
    try:
        facts, warnings = reader(text)
    except ToolkitError as error:
        assert error.exit_code == 1 and error.where.startswith("line ")
        return
    assert facts.keys() == keys.keys()
    assert json.dumps(facts)
    assert all(warning.startswith("line ") for warning in warnings)
    if kind == "hostlist":
        return
    seen = "".join(text.split())
    for key, value in leaves(facts):
        if isinstance(value, str) and key not in REASON_FREE:
            assert "".join(value.split()) in seen


FATES = ("PENDING", "RUNNING", "FAILED", "TIMEOUT", "CANCELLED by 1000", "REQUEUE_HOLD", "NODE_FAIL", "")
MARK = "~5e1f0c9ab3d2~"
QUEUE_CELLS = ("None", "n[1-2]", "1:00", "2026-11-21T02:48:01", "N/A", "1")
ASKED_CELLS = ("main", "1", "5:00", "N/A", "(null)", "(null)")
WORDS = st.text(max_size=12) | st.sampled_from(["COMPLETED", "1002", MARK[:-1], "\n1001", "a|b\nJobState=COMPLETED"])


def record(*cells: str) -> str:
    return "".join(cell + MARK for cell in (*cells, cells[0])) + "\n"


@fuzz(0.15)
@given(
    data=st.data(), fate=st.sampled_from(FATES), comment=WORDS, name=WORDS, source=st.sampled_from(["squeue", "sacct"])
)
def test_no_accident_completes_a_job_or_hides_one(data, fate, comment, name, source):
    """Jobs 1001 and 1003 are not complete; 1002 is, and stands between them."""
    states = {"1001": fate, "1002": "COMPLETED", "1003": fate}
    if source == "squeue":
        text = "".join(record(job, state, *QUEUE_CELLS, comment, *ASKED_CELLS) for job, state in states.items())
        read = read_squeue
    else:
        text = "".join(record(job, state, "0:0", name, "2026-11-21T02:48:01") for job, state in states.items())
        read = read_sacct
    text = data.draw(damaged(text))
    try:
        rows = read(text, MARK)
    except UnreadableError:
        return
    facts = of_jobs(rows, ["1001", "1003", "1001_4"])
    assert all(job in facts for job in ("1001", "1003") if f"{job}{MARK}{fate}{MARK}" in text)
    for fact in facts.values():
        assert run_state(fact.state) is not RunState.COMPLETED
        assert run_state(outlived(fact).state) in (RunState.UNKNOWN, run_state(fact.state))


@fuzz(0.05)
@given(data=st.data(), state=st.text(max_size=20) | st.sampled_from(["COMPLETED", "COMPLETING", "COMPLETED+"]))
def test_a_run_without_a_result_is_never_complete(data, state):
    text = record("1001", state, *QUEUE_CELLS, "(null)", *ASKED_CELLS)
    try:
        facts = of_jobs(read_squeue(data.draw(damaged(text) | st.just(text)), MARK), ["1001"])
    except UnreadableError as error:
        facts = error
    word = slurm_word(RunDirectory(Path("/nowhere/job/run")), "1001", facts)
    assert word[0] is not RunState.COMPLETED


NAMES = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=14)
JOBS = st.lists(
    st.tuples(
        st.integers(1, 10**9).map(str) | st.just("12_[3-9%2]") | st.just("12_4") | st.just("12+1"),
        st.sampled_from(["gpu", "a-long-partition", "debug"]), NAMES, st.sampled_from(["alma", "a_very_long_user"]),
        st.sampled_from(["PD", "R", "CG", "F"]), st.sampled_from(["0:00", "3-00:22:04", "INVALID"]), st.integers(1, 99999).map(str),
        st.sampled_from(["n1", "n[1-3,7]", "(Resources)", "(ReqNodeNotAvail, UnavailableNodes:n1)", ""]),
    ),
    min_size=1, max_size=5,
)  # fmt: skip
WIDTHS = (18, 9, 8, 8, 2, 10, 6)  # of squeue's own format: %.18i %.9P %.8j %.8u %.2t %.10M %.6D %R
HEADER = ("JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)")


def printed(row: tuple[str, ...]) -> str:
    return " ".join([*(f"{cell[:width]:>{width}}" for cell, width in zip(row, WIDTHS, strict=False)), row[-1]])


@fuzz(0.05)
@given(jobs=JOBS, strip=st.booleans())
def test_what_squeue_prints_is_read_back_or_not_at_all(jobs, strip):
    text = "\n".join(printed(row) for row in (HEADER, *jobs)) + "\n"
    facts, _ = reader_of("squeue")[0](text.strip() + "\n" if strip else text)
    read = [tuple(job.values()) for job in facts["jobs"]]
    assert len(read) == len(jobs)
    for row, job in zip(read, jobs, strict=True):
        cut = tuple(cell[:width].strip() for cell, width in zip(job, WIDTHS, strict=False))
        assert row in ((*cut, job[-1]), (None,) * 8)


@fuzz(0.05)
@given(jobs=JOBS, mark=st.sampled_from(["|", "|#", "\x1f", ";"]), ends=st.booleans())
def test_what_is_printed_with_a_delimiter_is_read_back(jobs, mark, ends):
    jobs = [tuple(cell.replace(mark[0], "_") for cell in job) for job in jobs]
    text = "".join(mark.join(row) + (mark if ends else "") + "\n" for row in (HEADER, *jobs))
    facts, warnings = reader_of("squeue")[0](text)
    assert [tuple(job.values()) for job in facts["jobs"]] == [tuple(cell.strip() for cell in job) for job in jobs]
    assert not warnings
