"""Check the nodes of an allocation before ranks start on them, with one Slurm step of a few seconds on all nodes."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.rundir.bad_nodes import bad_nodes, note_bad_node, runs_of
from toolkit.rundir.layout import RunDirectory
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.sbatch_options import last_value_of
from toolkit.supervise import node_check
from toolkit.supervise.allocation import Allocation
from toolkit.supervise.commands import run_command
from toolkit.supervise.launchers import srun_on_every_node
from toolkit.supervise.log import say
from toolkit.supervise.requests import StopRequest

STEP_S = 20.0  # timeout of srun with its step and the checks, which take at most node_check.CHECK_S
PER_NODE_S = 0.02  # additional time per node: srun starts them as a tree
MOST_SKEW_S = 5.0
UNFIT_FIX = 'report the node to site support; `toolkit site bad-nodes` lists excluded nodes; [restart] health = "warn" continues anyway'


@dataclass(frozen=True)
class Unfit:
    """A node, the check that it failed, and what the check observed."""

    node: str
    check: str
    observed: str

    def __str__(self) -> str:
        return f"{self.node} failed the {self.check} check: {self.observed}"


def unfit_nodes(
    run: RunDirectory, job: Mapping[str, Any], start: int, allocation: Allocation, environ: Mapping[str, str],
    request: StopRequest,
) -> list[Unfit]:  # fmt: skip
    """Check the nodes as `restart.health` requires and record the bad ones; return those that prevent this start."""
    policy = str(job["restart"].get("health") or "off")
    if policy == "off" or not allocation.in_slurm:
        return []
    unfit, unknown = check_nodes(run, job, start, allocation, environ, request)
    if unknown:
        say(f"cannot check the health of the nodes: {unknown}")
    for one in unfit:
        say(str(one))
    if allocation.nodes > 1 and len({one.node for one in unfit}) == allocation.nodes:
        say("every node failed, so the cause is not a single node. Fix: check the site file and the file systems")
        # Without a working driver anywhere, ranks would compute on CPUs.
        return unfit if policy == "requeue" and {one.check for one in unfit} == {"GPUs"} else []
    for one in unfit:
        _record(run, job, one.node, f"{one.check}: {one.observed}")
    return unfit if policy == "requeue" else []


def _record(run: RunDirectory, job: Mapping[str, Any], node: str, observed: str) -> None:
    """Record a bad node; a full disk must not keep the run from its next start."""
    try:
        note_bad_node(run, str(job["site"]["name"]), node, observed)
    except OSError as error:
        say(f"cannot record {node} as a bad node: {error}")


def nodes_to_exclude(run: RunDirectory, job: Mapping[str, Any]) -> str:
    """Return the host list that Slurm must exclude at the next start: nodes that the job excludes, and bad nodes.

    Returns "", which leaves --exclude unchanged, if that option names a file: a list cannot be appended to it.
    """
    bad = []
    try:
        bad = [one.node for one in bad_nodes(runs_of(run), str(job["site"]["name"]))]
    except (OSError, ToolkitError) as error:
        say(f"cannot read the list of bad nodes, so no bad node is excluded: {error}")
    options = [*job.get("scheduler", {}).get("options", []), *job["job"].get("sbatch", [])]
    given = last_value_of(options, "exclude", "x")
    if "/" in given:
        if bad:
            say(f"cannot exclude these bad nodes, because --exclude={given} names a file: {','.join(bad)}")
        return ""
    return ",".join(filter(None, [str(job["job"].get("exclude") or ""), given, *bad]))


def check_nodes(
    run: RunDirectory, job: Mapping[str, Any], start: int, allocation: Allocation, environ: Mapping[str, str],
    request: StopRequest,
) -> tuple[list[Unfit], str]:  # fmt: skip
    """Return the unfit nodes, and why the check itself could not run ("" if it ran)."""
    arguments = {
        "run": str(run.path),
        "claim": str(run.start(start) / "claim.json"),
        "gpus": int(job["job"].get("gpus_per_node") or 0),
        "local_scratch": str((job.get("paths") or {}).get("local_scratch") or ""),
    }
    program = [sys.executable, "-S", "-E", str(Path(node_check.__file__)), json.dumps(arguments)]
    argv = srun_on_every_node(allocation.nodes_of_components, program)
    began = time.time()
    done = run_command(argv, environ, timeout_s=STEP_S + PER_NODE_S * allocation.nodes, request=request)
    lines = [line for line in done.out.splitlines() if line.startswith("{") and line.endswith("}")]
    answers = [json.loads(line) for line in lines]
    if not answers or request.came:  # after the step was killed, a missing response means nothing
        return [], done.problem or "srun did not start any task"
    expected = expand_hostlist(allocation.node_list)
    return judge(answers, expected, began=began, ended=time.time()), ""


def judge(answers: list[dict[str, Any]], expected: list[str], *, began: float, ended: float) -> list[Unfit]:
    """Return the unfit nodes by their results; the check ran from `began` to `ended` on the batch host's clock (s)."""
    unfit = []
    for answer in answers:
        node = str(answer["node"])
        unfit += [Unfit(node, check, observed) for check, observed in answer["failed"].items()]
        skew_s = max(began - answer["clock"], answer["clock"] - ended)
        if skew_s > MOST_SKEW_S:
            unfit.append(Unfit(node, "clock", f"{skew_s:.0f} s off the batch host's clock"))
    silent = sorted(set(expected) - {str(answer["node"]) for answer in answers})
    return unfit + [Unfit(node, "response", "the node did not return results in time") for node in silent]
