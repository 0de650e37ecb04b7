"""Whatever becomes of Slurm's answers on their way, nothing breaks and no job is called complete that is not."""

import json
from functools import cache
from pathlib import Path

import pytest
from fuzz_cases import fuzz
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.parse import KEYS, parse_hostlist
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.run_files import FolderFiles, RecordedJob, RecordedScheduler, RunFiles
from toolkit.rundir.states import RunState
from toolkit.runs.status.state_table import Situation, report_state
from toolkit.slurm.job_facts import of_jobs, outlived, read_sacct, read_squeue, run_state
from toolkit.slurm.records import UnreadableError, show_fields

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
FIRST_KEYS = {
    "scontrol-show-job": "JobId",
    "scontrol-show-node": "NodeName",
    "scontrol-show-partition": "PartitionName",
}
OWN = {
    "scontrol-show-job": ("JobId=7 JobName=a b\n   JobState=FAILED Reason=None\n   NodeList=n1 Command=/x y=z\n\n",),
    "scontrol-show-node": ("NodeName=n1 Arch=x86_64\n   OS=Linux 6 #1\n   State=DOWN\n   Reason=bad [root@2024-01-01]\n",),
    "scontrol-show-partition": ("PartitionName=main\n   Default=YES\n   Nodes=n[1-3]\n   State=UP TotalNodes=3\n",),
    "hostlist": ("node[008-010,3]x[1-2],login\n",),
}  # fmt: skip


@cache
def samples(kind: str) -> tuple[str, ...]:
    real = sorted((CORPUS / kind).glob("*.txt"))
    return (*OWN[kind], *(path.read_text(errors="replace")[:6000] for path in real))


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


@pytest.mark.parametrize("kind", OWN)
@fuzz(0.05)
@given(data=st.data())
def test_a_damaged_output_is_read_or_refused_and_states_only_what_it_holds(kind, data):
    sample = data.draw(st.sampled_from(samples(kind)))
    text = data.draw(damaged(sample))
    try:
        if kind == "hostlist":
            facts, warnings = parse_hostlist(text)
            assert facts.keys() == KEYS.keys() and json.dumps(facts)
        else:
            blocks, warnings = show_fields(text, FIRST_KEYS[kind])
            seen = "".join(text.split())
            assert all("".join(value.split()) in seen for block in blocks for value in block.values.values())
    except ToolkitError as error:
        assert error.exit_code == 1 and error.where.startswith("line ")
        return
    assert all(warning.startswith("line ") for warning in warnings)


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
    folder = FolderFiles(RunDirectory(Path("/nowhere/job/run")))
    job = RecordedJob("devcluster", RecordedScheduler("slurm", "", ""), "", "", 1, 1)
    word = report_state(Situation(RunFiles(folder, folder, job), folder, "1001", facts))
    assert word[0] is not RunState.COMPLETED
