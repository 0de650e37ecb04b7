"""What stands in the log of a node's ranks when the disk was full for a while."""

import os
import subprocess
import sys

from toolkit.rundir.claims import claim_attempt

# A limit on the size of files refuses a write as a full disk does, and can be lifted again.
PROGRAM = """
import os, resource, sys, time
from pathlib import Path
from toolkit.rank.log import RankLog
from toolkit.rundir.layout import RunDirectory

def say(*lines):
    os.write(1, "".join(line + "\\n" for line in lines).encode())
    time.sleep(0.3)

log = RankLog(RunDirectory(Path(sys.argv[1])).attempt(0), 17, "n1")
log.begin()
say("first")
resource.setrlimit(resource.RLIMIT_FSIZE, (14, resource.RLIM_INFINITY))
say("lost", "too")
say("and this")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
say("last")
log.end()
"""


def test_lines_that_a_full_disk_did_not_take_are_counted(run_directory):
    attempt = claim_attempt(run_directory)
    argv = [sys.executable, "-c", PROGRAM, str(run_directory.path)]
    subprocess.run(argv, check=True, env={**os.environ, "TOOLKIT_WORLD_SIZE": "100"})
    (log,) = attempt.logs.iterdir()
    lines = log.read_text().splitlines()
    assert lines == [
        "[17] first", "[17", "[17] last", "[17] toolkit: 3 lines could not be written here: File too large"
    ]  # fmt: skip
