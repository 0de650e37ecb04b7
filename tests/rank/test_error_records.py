"""The error record of a rank: its reason is one sentence, and its fix that of toolkit."""

from toolkit.errors import ToolkitError
from toolkit.rank.entry import record_error
from toolkit.rundir.files import read_json

OF_DCP = """CheckpointException ranks:dict_keys([0])
Traceback (most recent call last): (RANK 0)
  File "storage_writer.py", line 127, in set_up_storage_writer
    refuse_existing(final)
{last}
"""


def record(error, tmp_path):
    record_error(error, 1, tmp_path / "rank-0.json", 0, {"TOOLKIT_RESOLVED_JOB": str(tmp_path / "job.json")})
    found = read_json(tmp_path / "rank-0.json")
    return found["reason"], found["fix"]


def test_a_traceback_within_a_message_is_its_last_line(tmp_path):
    last = "toolkit.errors.ToolkitError: ck/step-1: checkpoint already exists. Fix: use another name"
    assert record(RuntimeError(OF_DCP.format(last=last)), tmp_path) == (
        "RuntimeError: toolkit.errors.ToolkitError: ck/step-1: checkpoint already exists", "use another name",
    )  # fmt: skip
    assert record(RuntimeError(OF_DCP.format(last="OSError: [Errno 28] No space. Fix: none")), tmp_path) == (
        "RuntimeError: OSError: [Errno 28] No space. Fix: none", "",
    )  # fmt: skip


def test_other_messages_stay_whole(tmp_path):
    assert record(ValueError("bad\nbatch"), tmp_path) == ("ValueError: bad\nbatch", "")
    assert record(ToolkitError("no data", fix="set data.path"), tmp_path) == ("no data", "set data.path")
