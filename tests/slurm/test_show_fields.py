"""Shapes of the blocks of `scontrol show`, written here after Slurm's formats."""

import pytest

from toolkit.errors import ToolkitError
from toolkit.slurm.records import show_fields

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
    (first, second), warnings = show_fields("\n" + text + "\n\n" + text.replace("=9", "=10"), "JobId")
    assert second.get("JobId") == "10" and not warnings
    assert (first.get("JobId"), first.get("JobName"), first.get("JobState"), first.get("NodeList")) == (
        "9",
        "my job a=b",
        "PENDING",
        "",
    )
    assert (first.get("Restarts"), first.get("TimeLimit"), first.get("NumNodes"), first.get("AllocTRES")) == (
        "3",
        "1-00:00:00",
        "2-2",
        None,
    )


def test_a_name_cannot_say_what_state_a_job_is_in():
    for name in ("x JobState=COMPLETED", "x\nJobState=COMPLETED", "x\n   JobState=COMPLETED ExitCode=0:0"):
        text = f"JobId=9 JobName={name}\n   JobState=FAILED Reason=None\n   ExitCode=1:0\n"
        (job,), warnings = show_fields(text, "JobId")
        assert job.get("JobState") is None
        assert any("two values" in warning for warning in warnings)


def test_lines_of_each_node_are_not_the_job_or_partition():
    detail = "JobId=1 JobName=x\n   JobState=RUNNING ExitCode=0:0 TimeLimit=00:10:00 Partition=p NumNodes=2 NumCPUs=2\n   JOB_GRES=gpu:2\n"
    detail += "     Nodes=n1 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)\n     Nodes=n2 CPU_IDs=1 Mem=1 GRES=gpu:1(IDX:1)\n"
    (job,), warnings = show_fields(detail, "JobId")
    assert (job.get("JobState"), warnings) == ("RUNNING", ())
    text = "PartitionName=main\n   Default=YES\n   MaxTime=UNLIMITED Nodes=n[1-2]\n   State=DOWN TotalCPUs=8 TotalNodes=2\n"
    assert show_fields(text, "PartitionName")[0][0].get("Nodes") == "n[1-2]"


def test_a_free_text_ends_before_the_keys_of_slurm_26_05():
    text = (
        "JobId=1 JobName=a b SLUID=sE5XM862RJM200 UserId=root(0) StdOut=/a b SpreadSegments=Yes ExpeditedRequeue=Yes\n"
    )
    ((job,), _) = show_fields(text, "JobId")
    assert (job.get("JobName"), job.get("SLUID"), job.get("StdOut")) == ("a b", "sE5XM862RJM200", "/a b")


def test_a_free_text_goes_up_to_the_next_key_of_scontrol():
    text = "NodeName=n1 Arch=x86_64\n   OS=Linux 6.1 #1 SMP x=1 \n   State=DOWN+DRAIN \n   Reason=see [t#1], NodeAddr is=bad [root@2024-01-01T00:00:00]\n"
    (node,), _ = show_fields(text, "NodeName")
    assert node.get("Reason") == "see [t#1], NodeAddr is=bad [root@2024-01-01T00:00:00]"
    assert (node.get("OS"), node.get("State")) == ("Linux 6.1 #1 SMP x=1", "DOWN+DRAIN")


@pytest.mark.parametrize("text", ["", "\n\n", "slurm_load_jobs error: Unable to contact slurm controller\n", "{}"])
def test_what_is_something_else_is_refused_with_its_line(text):
    with pytest.raises(ToolkitError) as error:
        show_fields(text, "JobId")
    assert error.value.exit_code == 1 and error.value.where.startswith("line ")
