"""Whatever becomes of Slurm's answers on their way, nothing breaks and no job is called complete that is not."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from fuzz_cases import fuzz
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.parse import reader_of
from toolkit.errors import ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.rundir.states import RunState
from toolkit.runs.status.slurm_state import state_from_slurm
from toolkit.slurm.job_facts import of_jobs, outlived, read_sacct, read_squeue
from toolkit.slurm.records import UnreadableError
from toolkit.slurm.states import run_state

CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
QUEUE = """\
             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
          77_[2-9]       gpu   my job     alma PD       0:00      4 (Resources)
                78       gpu    train     alma  R       0:05      1 n1
                79       gpu      a
b     alma  R       0:05      1 n[1-2]
                80       gpu    train     alma PD       0:00      2 (Nodes required for job are DOWN, DRAINED)
"""
WITHOUT_WIDTHS = """\
JOBID STATE NODELIST(REASON)
12345 PENDING (Nodes required for job are DOWN, DRAINED)
12346_7 RUNNING n[1-2]
9 COMPLETING n1
"""
EQUAL = "".join(
    f"{a:<14}{b:<14}{c:<14}\n" for a, b, c in (("JOBID", "NAME", "STATE"), ("7_[1-2]", "a long name of", "PENDING"))
)
OWN = {
    "squeue": (QUEUE, QUEUE, WITHOUT_WIDTHS, EQUAL),
    "sacct": ("JobID|JobName|State|ExitCode\n7|a|FAILED|1:0\n7.batch|batch|FAILED|1:0\n8|two\nlines|TIMEOUT|0:0\n",),
    "sinfo": ("PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\nmain*        up   infinite      3   idle n[1-3]\n"
              "gpu          up 1-00:00:00     12 alloc* g[01-12]\ngpu        down 1-00:00:00      1  down* g13\n",),
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


JOB_ID = re.compile(r"[0-9]+(_([0-9]+|\[.*|\*))?(\+[0-9]+)?(\.\S+)?")


def records(text):
    """What may be one record: up to five lines, since a name may hold line ends."""
    lines = text.split("\n")
    return ["\n".join(lines[at : at + size]) for size in range(1, 6) for at in range(len(lines))]


def holds(record, value, *, touching):
    """Whether a cell stands in the record as a whole, between blanks, delimiters, or where no blank need be."""
    before, behind = ("", "") if touching else (r"(?<![^\s|])", r"(?![^\s|])")
    text = re.escape(value)
    found = re.search(before + text + behind, record)
    return bool(found) or (value.startswith("(") and holds(record, value[1:-1], touching=touching))  # of two columns


def rows_by_themselves(text):
    """Lines below the last header that begin with a job id: each is a row, whatever stands before it."""
    lines = text.split("\n")
    header = max((number for number, line in enumerate(lines) if "JOBID" in line), default=len(lines))
    return sum(bool(line.split()) and bool(JOB_ID.fullmatch(line.split()[0])) for line in lines[header + 1 :])


@pytest.mark.parametrize("kind", OWN)
@fuzz(0.05)
@given(data=st.data())
def test_a_damaged_output_is_read_or_refused_and_states_only_what_it_holds(kind, data):
    sample = data.draw(st.sampled_from(samples(kind)))
    text = data.draw(damaged(sample))
    reader, keys = reader_of(kind)
    try:
        facts, warnings = reader(text)
    except ToolkitError as error:
        assert error.exit_code == 1 and error.where.startswith("line ")
        return
    assert facts.keys() == keys.keys()
    assert json.dumps(facts)
    assert all(warning.startswith("line ") for warning in warnings)
    if kind == "squeue":
        assert facts["rows"] >= rows_by_themselves(text)
    if kind in ("squeue", "sinfo"):
        parts = records(text.replace("\r", " "))
        for row in facts["jobs" if kind == "squeue" else "table"] or ():
            cells = [cell for cell in row.values() if cell]
            assert any(all(holds(part, cell, touching=sample == EQUAL) for cell in cells) for part in parts), row
    if kind.startswith("scontrol"):
        seen = "".join(text.split())
        (blocks,) = (value for value in facts.values() if isinstance(value, list))
        assert all("".join(value.split()) in seen for block in blocks for value in block.values() if value)


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
    word = state_from_slurm(RunDirectory(Path("/nowhere/job/run")), "1001", facts)
    assert word[0] is not RunState.COMPLETED


NAMES = st.text(
    st.characters(codec="ascii", exclude_categories=["Cc"]) | st.sampled_from(" üé日"), min_size=1, max_size=14
)
JOBS = st.lists(
    st.tuples(
        st.integers(1, 10**9).map(str) | st.just("12_[3-9%2]") | st.just("12_4") | st.just("12+1"),
        st.sampled_from(["gpu", "a-long-partition", "debug"]), NAMES, st.sampled_from(["alma", "a_very_long_user"]),
        st.sampled_from(["PD", "R", "CG", "F"]), st.sampled_from(["0:00", "3-00:22:04", "INVALID"]), st.integers(1, 99999).map(str),
        st.sampled_from(["n1", "n[1-3,7]", "(Resources)", "(ReqNodeNotAvail, UnavailableNodes:n1)", ""]),
    ),
    min_size=1, max_size=5,
)  # fmt: skip
HEADER = ("JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)")
# How squeue lays a cell out: a width of its own, to the right (`%.18i`) or to the left (`%18i`), or none (`%i`).
RIGHT = [18, 9, 8, 8, 2, 10, 6, 0]  # squeue's own format
LEFT = [-10, -12, -9, -9, -2, -10, -6, 0]
MIXED = [-12, 9, 8, -8, 2, 10, 6, 0]
NONE = [0] * 8
EQUALLY = [-20] * 8  # --Format, without a blank between two
LAYOUTS = st.sampled_from([RIGHT, LEFT, MIXED, NONE, EQUALLY])
CHOICES = st.lists(st.integers(1, 7), unique=True, min_size=1, max_size=7)  # of the columns behind the first


def laid_out(cells, widths, between):
    """A line as squeue prints it: it counts bytes, and may leave half of a letter."""
    return between.join(laid_out_cell(*pair) for pair in zip(cells, widths, strict=True)).decode(errors="replace")


def laid_out_cell(cell, width):
    data = cell.encode()[: abs(width) or None]
    return data.rjust(width) if width > 0 else data.ljust(-width)


def cut_to(cell, width):
    return cell.encode()[: abs(width) or None].decode(errors="replace").strip(" ")


@fuzz(0.15)
@given(jobs=JOBS, widths=LAYOUTS, choice=CHOICES, strip=st.booleans(), data=st.data())
def test_what_squeue_prints_is_read_back_or_not_at_all(jobs, widths, choice, strip, data):
    """Also where a line was cut: it is not read, or for what is left of it; the others are read all the same."""
    columns = [0, *choice] if widths is not RIGHT else list(range(8))
    shape = [widths[column] for column in columns]
    table = [[row[column] for column in columns] for row in (HEADER, *jobs)]
    lines = [laid_out(row, shape, b"" if widths is EQUALLY else b" ") for row in table]
    # A line without widths that was cut behind a blank cannot be told from a whole one.
    harmed = data.draw(st.none() | st.integers(1, len(jobs))) if widths is not NONE else None
    if harmed is not None:
        line = lines[harmed]
        lines[harmed] = line[: data.draw(st.integers(len(line) - len(line.lstrip()) + 1, len(line)))]
    text = "\n".join(lines)
    facts, warnings = reader_of("squeue")[0](text.strip() + "\n" if strip else text + "\n")
    read = [list(job.values()) for job in facts["jobs"]]
    assert len(read) == len(jobs)
    for number, (row, job) in enumerate(zip(read, jobs, strict=True), 1):
        whole = [cut_to(job[at], widths[at]) if at in columns else None for at in range(8)]
        if all(cell is None for cell in row):
            assert any(warning.startswith(f"line {number + 1}:") for warning in warnings)
        elif number == harmed:
            assert all((cell or "") in (own or "") for cell, own in zip(row, whole, strict=True))
        else:
            assert row == whole


@fuzz(0.05)
@given(jobs=JOBS, mark=st.sampled_from(["|", "|#", "\x1f", ";"]), ends=st.booleans())
def test_what_is_printed_with_a_delimiter_is_read_back(jobs, mark, ends):
    jobs = list(dict.fromkeys(tuple(cell.replace(mark[0], "_").strip() for cell in job) for job in jobs))
    text = "".join(mark.join(row) + (mark if ends else "") + "\n" for row in (HEADER, *jobs))
    facts, warnings = reader_of("squeue")[0](text)
    assert [tuple(job.values()) for job in facts["jobs"]] == [tuple(cell.strip() for cell in job) for job in jobs]
    assert not [warning for warning in warnings if "nodes and names" not in warning]
