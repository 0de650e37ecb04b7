"""`python -P -m toolkit.supervise RUN_DIR < JOB_JSON`: the supervisor, which every rendered batch script runs last."""

import errno
import json
import os
import sys
import traceback
from pathlib import Path

from toolkit.errors import OWN_FAILURE, ToolkitError
from toolkit.rundir.layout import RunDirectory
from toolkit.supervise.start import supervise
from toolkit.terminal.talk import say


def main() -> int:
    """Read the resolved job from stdin and supervise one start of its run; return the exit code of the job."""
    if len(sys.argv) != 2:
        print("usage: python -m toolkit.supervise RUN_DIR < resolved-job.json", file=sys.stderr)  # noqa: T201
        return 2
    try:
        job = json.load(sys.stdin)
        return supervise(RunDirectory(Path(sys.argv[1])), job, first_start=int(os.environ.get("TOOLKIT_START", "0")))
    except ToolkitError as error:
        say(str(error))
        return OWN_FAILURE
    except Exception as error:  # noqa: BLE001  a bug in toolkit prints its traceback and has its own exit code
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(f"{error}. Fix: free space on that file system (`df`, the site's quota command)")
        else:
            traceback.print_exc()
        return OWN_FAILURE


if __name__ == "__main__":
    sys.exit(main())
