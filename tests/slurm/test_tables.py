"""Shapes of Slurm's tables and blocks beside those that the real outputs show, written here after Slurm's formats."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.slurm.parse_sacct import parse_sacct
from toolkit.slurm.parse_show import parse_show_job, parse_show_node, parse_show_partition
from toolkit.slurm.parse_sinfo import parse_sinfo
from toolkit.slurm.parse_squeue import parse_squeue

QUEUE = """\
             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
        77_[2-9%2]       gpu my job 1     alma PD       0:00      4 (Nodes required for job are DOWN, DRAINED)
           78+0 x        gpu      het     alma  R       0:05      1 n1
              79+0       gpu      het     alma  R 1-00:00:05      2 n[1-2]
                80 long-part  a_name_      bob CG       0:01      1
"""


def jobs(text):
    facts, warnings = parse_squeue(text)
    return [tuple(job.values()) for job in facts["jobs"]], warnings


def test_blanks_in_cells_empty_cells_and_full_columns():
    read, warnings = jobs(QUEUE)
    assert read == [
        ("77_[2-9%2]", "gpu", "my job 1", "alma", "PD", "0:00", "4", "(Nodes required for job are DOWN, DRAINED)"),
        (None,) * 8,
        ("79+0", "gpu", "het", "alma", "R", "1-00:00:05", "2", "n[1-2]"),
        ("80", "long-part", "a_name_", "bob", "CG", "0:01", "1", ""),
    ]  # fmt: skip
    assert len(warnings) == 1 and warnings[0].startswith("line 3:")


def test_a_paste_without_the_blanks_before_it():
    read, warnings = jobs(QUEUE.strip())
    assert (read, warnings[:-1]) == jobs(QUEUE)
    assert warnings[-1].startswith("line 5: has no line end, so that it may be cut: '80 long-part")


def test_the_long_form_with_its_time_a_prompt_a_second_header_and_windows_line_ends():
    text = (
        "$ squeue -l\nThu Mar 07 10:00:00 2024\n"
        "             JOBID PARTITION     NAME     USER    STATE       TIME TIME_LIMI  NODES NODELIST(REASON)\n"
        "              1234       gpu    train     alma  RUNNING    1:02:03   4:00:00      2 n[1-2]\n"
        "Thu Mar 07 10:01:00 2024\n"
        "             JOBID PARTITION     NAME     USER    STATE       TIME TIME_LIMI  NODES NODELIST(REASON)\n"
        "              1235       gpu    train     alma  PENDING       0:00   4:00:00      2 (Priority)\n"
    ).replace("\n", "\r\n")
    read, warnings = jobs(text)
    assert (
        read
        == [
            ("1234", "gpu", "train", "alma", "RUNNING", "1:02:03", "2", "n[1-2]"),
            ("1235", "gpu", "train", "alma", "PENDING", "0:00", "2", "(Priority)"),
        ]
        and not warnings
    )


def test_a_name_with_a_line_end_takes_two_lines():
    text = QUEUE.splitlines()[0] + (
        "\n                81       gpu     a\nbc     alma  R       0:05      1 n1\n"
        "                82       gpu      abc     alma  R       0:05      1 n1\n"
    )
    read, warnings = jobs(text)
    assert [job[2] for job in read] == ["a\nbc", "abc"] and not warnings


HEADER, *ROWS = (
    "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
    "                 7       gpu    train     alma  R       0:05      1 n1\n"
    "                 8       gpu    train     alma PD       0:00      1 (Priority)\n"
    "                 9       gpu    train     alma  R       0:05      2 n[2-3]\n"
).splitlines()


@pytest.mark.parametrize("left", range(20, 68))
@pytest.mark.parametrize("line", [0, 1])
def test_a_line_that_was_cut_takes_no_other_job_with_it(line, left):
    """After TIME, in NAME, wherever: the row behind it is a row by itself."""
    lines = [HEADER, *ROWS]
    lines[line + 1] = ROWS[line][:left]
    read, warnings = jobs("\n".join(lines) + "\n")
    assert [job[0] for job in read if job != read[line]] == [job for job in ("7", "8", "9") if job != str(line + 7)]
    assert [job[7] for job in read if job != read[line]] == [
        reason for at, reason in enumerate(("n1", "(Priority)", "n[2-3]")) if at != line
    ]
    if read[line] == (None,) * 8:
        assert [warning.startswith(f"line {line + 2}:") for warning in warnings] == [True]
    else:
        assert read[line][6] == "1" and not warnings  # all but the nodes is there


def test_a_line_end_is_taken_for_a_cell_only_where_somebody_may_have_written_it():
    """First PARTITION is cut, then NAME before what begins like the row of job 8."""
    for halves in ("7       g\nu    train", "7       gpu    t\n8 x"):
        read, warnings = jobs(f"{HEADER}\n                 {halves}     alma  R       0:05      1 n1\n")
        assert read == [(None,) * 8] * 2 and len(warnings) == 2
    read, warnings = jobs(HEADER + "\n                 7       gpu    a\nb\nc     alma  R       0:05      1 n1\n")
    assert [job[2] for job in read] == ["a\nb\nc"] and not warnings


@pytest.mark.parametrize("row", ["12345 PENDING (Nodes required for job are DOWN, DRAINED)", "123456 FAILED n1"])
def test_names_at_equal_distances_are_no_equal_columns(row):
    """squeue -o "%i %T %R" prints its names at 0, 6 and 12 and its cells as long as they are."""
    read, warnings = jobs(f"JOBID STATE NODELIST(REASON)\n{row}\n777 RUNNING n[1-2]\n")
    assert (read[1][0], read[1][4], read[1][7]) == ("777", "RUNNING", "n[1-2]")
    if "(" in row:
        assert read[0] == (None,) * 8 and warnings[0].startswith("line 2:")
    else:
        assert (read[0][0], read[0][4], read[0][7], warnings) == ("123456", "FAILED", "n1", ())


def test_a_cell_without_a_width_may_be_empty():
    read, warnings = jobs("JOBID NAME NODELIST(REASON)\n7 train n1\n8 my job \n")
    assert [job[2] for job in read] == ["train", None] and "line 3" in warnings[0]
    read, warnings = jobs("JOBID NODELIST(REASON) PARTITION\n7 n1 gpu\n8  a-long-one\n")
    assert [(job[1], job[7]) for job in read] == [("gpu", "n1"), ("a-long-one", "")] and not warnings
    assert jobs("JOBID STATE\n\x007 RUNNING\n")[0] == [(None,) * 8]  # what no job id holds is not dropped


def test_letters_of_several_bytes_move_no_column():
    """Slurm counts bytes, and leaves half of a letter at the edge."""
    rows = [("7", "gpu", "übung", "alma"), ("8", "gpu", "ab é 日本", "alma"), ("9", "gpu", "a éééé", "alma")]
    lines = [HEADER.encode()]
    for cells in rows:
        name = cells[2].encode()[:8].rjust(8)
        lines.append(b"%18s %9s %s %8s  R       0:05      1 n1" % (cells[0].encode(), b"gpu", name, b"alma"))
    read, warnings = jobs(b"\n".join(lines).decode(errors="replace") + "\n")
    assert [(job[2], job[3], job[7]) for job in read] == [
        ("übung", "alma", "n1"), ("ab é \ufffd", "alma", "n1"), ("a ééé", "alma", "n1")
    ] and not warnings  # fmt: skip


def test_several_clusters():
    text = f"CLUSTER: alpha\n{HEADER}\n{ROWS[0]}\n\nCLUSTER: beta\n{HEADER}\n{ROWS[1]}\n"
    read, warnings = jobs(text)
    assert ([job[0] for job in read], warnings) == (["7", "8"], ())
    narrow = "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\nmain*        up   infinite      3   idle n[1-3]\n"
    wide = "PARTITION      AVAIL  TIMELIMIT  NODES  STATE NODELIST\nvery-long-name    up   infinite     12   idle g[1-12]\n"
    facts, warnings = parse_sinfo(f"CLUSTER: alpha\n{narrow}\nCLUSTER: beta\n{wide}")
    assert [(row["partition"], row["nodelist"]) for row in facts["table"]] == [
        ("main*", "n[1-3]"),
        ("very-long-name", "g[1-12]"),
    ]
    assert (facts["rows"], warnings) == (2, ())


@pytest.mark.parametrize("mark", ["|", "|#", "\t", ";", "~", ","])
def test_other_delimiters_and_columns(mark):
    rows = [("USER", "STATE", "JOBID", "NODELIST", "REASON", ""), ("alma", "RUNNING", "7_1", "n1", "None", "")]
    rows += [("bob", "PENDING", "8", "", "Priority", "")]
    read, warnings = jobs("\n".join(mark.join(row) for row in rows) + "\n")
    assert [(job[0], job[4], job[7]) for job in read] == [("7_1", "RUNNING", "n1"), ("8", "PENDING", "(Priority)")]
    assert not warnings


def test_columns_without_a_width_are_read_where_the_words_tell_them():
    read, warnings = jobs("JOBID NAME STATE\n222 a job with blanks PENDING\n8 train PENDING\n")
    assert [(job[0], job[4]) for job in read] == [(None, None), ("8", "PENDING")]
    assert len(warnings) == 1 and warnings[0].startswith("line 2:")


def test_a_blank_in_a_name_and_an_empty_column_are_not_taken_for_each_other():
    """Nothing is aligned here, so eight words could be the eight cells; `root` is no state, though."""
    text = "JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\n123 main my job root CD 0:10 1\n"
    read, warnings = jobs(text)
    assert read == [(None,) * 8] and "line 2" in warnings[0]


@pytest.mark.parametrize("mark", ["@", "@@", "~~", "||"])
def test_any_delimiter_of_the_users_own(mark):
    rows = (("JOBID", "NAME", "STATE"), ("7", "a b", "RUNNING"), ("8+1", "c", "PENDING"))
    (first, second), warnings = jobs("".join(mark.join(row) + "\n" for row in rows))
    assert (first[0], first[2], first[4]) == ("7", "a b", "RUNNING")
    assert (second[0], second[4], warnings) == ("8+1", "PENDING", ())


def test_rows_without_a_header_are_counted_and_not_read():
    facts, warnings = parse_squeue("".join(QUEUE.splitlines(keepends=True)[1:]))
    assert (facts, "no header" in warnings[0]) == ({"rows": 4, "jobs": None}, True)


def test_equal_columns_that_touch():
    text = "JOBID               NAME                STATE               \n"
    text += "12                  a name of 20 letter!RUNNING             \n"
    assert jobs(text)[0] == [("12", None, "a name of 20 letter!", None, "RUNNING", None, None, None)]


def test_sinfo_by_node_in_sum_and_without_header():
    by_node = (
        "NODELIST   NODES PARTITION       STATE CPUS    S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE REASON\n"
        "node1          1     main*     drained 8       2:4:1  16000        0      1   (null) bad disk, see ticket\n"
    )
    assert parse_sinfo(by_node)[0]["table"] == [
        {"partition": "main*", "avail": None, "timelimit": None, "nodes": "1", "state": "drained", "nodelist": "node1"}
    ]
    in_sum = (
        "PARTITION AVAIL  TIMELIMIT   NODES(A/I/O/T) NODELIST\nmain*        up   infinite        20/3/0/23 n[1-23]\n"
    )
    assert [tuple(row.values()) for row in parse_sinfo(in_sum)[0]["table"]] == [
        ("main*", "up", "infinite", "23", None, "n[1-23]")
    ]
    facts, warnings = parse_sinfo("main|up|n1\nmain|up|n2\n")
    assert facts == {"rows": 2, "table": None} and "no header" in warnings[0]


def test_sinfos_reasons_stand_first_and_hold_blanks():
    text = (
        "REASON               USER      TIMESTAMP           NODELIST\n"
        "bad disk, see ticket root      2024-03-05T12:34:56 n[1-2]\n"
        "Not responding       slurm     2024-03-06T12:34:56 n3\n"
        "x                    slurm     2024-03-06T12:34:56 n4\n"
    )
    facts, warnings = parse_sinfo(text)
    assert ([row["nodelist"] for row in facts["table"]], warnings) == (["n[1-2]", "n3", "n4"], ())


def test_a_reason_without_the_nodes_is_one_only_while_a_job_waits():
    read, warnings = jobs("JOBID|ST|REASON\n7|R|None\n8|PD|Priority\n")
    assert ([job[7] for job in read], warnings) == ([None, "(Priority)"], ())
    assert jobs("JOBID|ST|REASON|NODELIST\n9|PD|None|\n")[0][0][7] == "(None)"


def test_sacct_with_dashes_and_with_line_ends_in_a_field():
    wide = (
        "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode \n"
        "------------ ---------- ---------- ---------- ---------- ---------- -------- \n"
        "12               my job       main        phy          4 CANCELLED+      0:0 \n"
        "12.batch          batch                   phy          4  COMPLETED      0:0 \n"
    )
    facts, warnings = parse_sacct(wide)
    assert (facts["physical_lines"], facts["columns"], facts["first_columns"][1]) == (4, 7, "JobName")
    assert (facts["rows_with_other_field_count"], warnings) == ([], ())

    broken = "JobID|Comment|State|\n1|three\n\nlines|FAILED|\n2|cut\n3|x|COMPLETED|\n"
    facts, warnings = parse_sacct(broken)
    assert (facts["columns"], facts["rows_with_other_field_count"]) == (3, [1, 2, 3, 4])
    assert len(warnings) == 1 and warnings[0].startswith("line 5:")


JOB = """\
JobId=9 HetJobId=9 HetJobOffset=0 JobName=my job a=b
   UserId=alma(1000) GroupId=users(100) MCS_label=N/A
   Priority=1 Nice=0 Account=(null) QOS=normal SubmitTime=2026-01-02T03:04:05 TRES=cpu=8,mem=8G,node=2
   JobState=PENDING Reason=Dependency Dependency=afterok:8(unfulfilled)
   Requeue=1 Restarts=3 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=1-00:00:00 TimeMin=N/A
   Partition=gpu AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=
   NumNodes=2-2 NumCPUs=8 NumTasks=2 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   NewKeyOfSlurm=7 Comment=first line
second=2 line Switches=1@00:10:00
   Command=/home/alma/run it.sh --lr=0.1 x=y
"""


@pytest.mark.parametrize("form", ["many lines", "one line", "indented"])
def test_a_job_with_odd_words(form):
    text = JOB
    if form == "one line":
        text = " ".join(line.strip() for line in JOB.splitlines()) + "\n"
    if form == "indented":
        text = "".join("      " + line for line in JOB.splitlines(keepends=True))
    facts, warnings = parse_show_job("\n" + text + "\n\n" + text.replace("=9", "=10"))
    assert facts["job_count"] == 2 and not warnings
    first = facts["jobs"][0]
    assert (first["JobId"], first["JobName"], first["JobState"], first["NodeList"]) == (
        "9",
        "my job a=b",
        "PENDING",
        "",
    )
    assert (first["Restarts"], first["TimeLimit"], first["NumNodes"], first["AllocTRES"]) == (
        "3",
        "1-00:00:00",
        "2-2",
        None,
    )


def test_a_name_cannot_say_what_state_a_job_is_in():
    for name in ("x JobState=COMPLETED", "x\nJobState=COMPLETED", "x\n   JobState=COMPLETED ExitCode=0:0"):
        facts, warnings = parse_show_job(f"JobId=9 JobName={name}\n   JobState=FAILED Reason=None\n   ExitCode=1:0\n")
        assert facts["jobs"][0]["JobState"] is None
        assert any("two values" in warning for warning in warnings)


def test_lines_of_each_node_are_not_the_job_or_partition():
    detail = "JobId=1 JobName=x\n   JobState=RUNNING ExitCode=0:0 TimeLimit=00:10:00 Partition=p NumNodes=2 NumCPUs=2\n   JOB_GRES=gpu:2\n"
    detail += "     Nodes=n1 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)\n     Nodes=n2 CPU_IDs=1 Mem=1 GRES=gpu:1(IDX:1)\n"
    facts, warnings = parse_show_job(detail)
    assert (facts["jobs"][0]["JobState"], warnings) == ("RUNNING", ())
    text = "PartitionName=main\n   Default=YES\n   MaxTime=UNLIMITED Nodes=n[1-2]\n   State=DOWN TotalCPUs=8 TotalNodes=2\n"
    assert parse_show_partition(text)[0]["partitions"][0]["Nodes"] == "n[1-2]"


def test_the_reason_of_a_node_without_who_and_when():
    text = "NodeName=n1 Arch=x86_64\n   OS=Linux 6.1 #1 SMP x=1 \n   State=DOWN+DRAIN \n   Reason=see [t#1], NodeAddr is=bad [root@2024-01-01T00:00:00]\n"
    node = parse_show_node(text)[0]["nodes"][0]
    assert node["Reason"] == "see [t#1], NodeAddr is=bad"
    assert (node["OS"], node["State"]) == ("Linux 6.1 #1 SMP x=1", "DOWN+DRAIN")


@pytest.mark.parametrize("read", [parse_squeue, parse_sinfo, parse_sacct, parse_show_job, parse_show_node])
@pytest.mark.parametrize("text", ["", "\n\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "{}"])
def test_what_is_something_else_is_refused_with_its_line(read, text):
    with pytest.raises(ToolkitError) as error:
        read(text)
    assert error.value.exit_code == 1 and error.value.where.startswith("line ")
