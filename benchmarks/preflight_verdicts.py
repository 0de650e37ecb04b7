"""Compare the verdicts of `toolkit preflight` and `sbatch --test-only` on 142 requests and 84 scripts with what Slurm does.

    python benchmarks/preflight_verdicts.py [--only WORD] [--json FILE]

Starts a dev cluster with accounting (six nodes, one of them drained and two reserved; eight more partitions, QOS,
accounts), and removes it at the end. `toolkit render` renders each request, and its directives are passed to `sbatch
--test-only` and to `sbatch`, with a job that exits immediately. Scripts are passed unchanged: their directives contain
characters outside ASCII, invalid values, options that exclude each other, or lines that sbatch ignores. A request is
`good` if that job completes. It is `bad`
if sbatch rejects it, Slurm fails it, or it still waits after some seconds on the otherwise empty cluster. A verdict is
wrong if it rejects a good request or accepts a bad one. A warning counts as a rejection only if the job waits for nodes
or a partition that are down, since they may come back. Prints a table and the counts, in about 15 minutes. The exit
code is 1 if preflight is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from toolkit.config.request import JobRequest
from toolkit.devcluster import cluster as devcluster
from toolkit.devcluster.layout import ClusterSpec, Layout, make_layout
from toolkit.errors import ToolkitError
from toolkit.submission.create import preflight

NAME = "verdicts"
TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
PATIENCE_S, LONG_PATIENCE_S = 5.0, 12.0  # the scheduler runs every 2 s
POLL_S = 0.2
VAGUE = ("None", "Priority", "Resources", "BeginTime")  # reasons of jobs that only wait for other jobs to end
MAY_COME_BACK = ("PartitionDown", "Unavailable", "DOWN")
PARTITIONS = (
    "PartitionName=tight Nodes=ALL MaxTime=20 MaxNodes=2 MaxCPUsPerNode=4 MaxMemPerNode=4000",
    "PartitionName=pair Nodes=ALL MinNodes=2 MaxTime=1-0",
    "PartitionName=others Nodes=ALL AllowAccounts=theirs",
    "PartitionName=picked Nodes=ALL AllowQos=daily DenyAccounts=spare",
    "PartitionName=asleep Nodes=ALL State=DOWN",
    "PartitionName=drained Nodes=ALL State=DRAIN",
    "PartitionName=booked Nodes=ALL ReqResv=YES",
    "PartitionName=one Nodes=node1 QOS=ofpart",
)
QOS = {
    "daily": "", "small": "MaxTRES=node=1 MaxWall=5", "thin": "MaxTRESPerNode=cpu=2", "mine": "MaxTRESPerUser=cpu=4",
    "large": "MinTRES=cpu=4", "minutes": "MaxTRESMins=cpu=20", "group": "GrpTRES=node=1,gres/gpu=1", "closed": "MaxJobs=0",
    "full": "MaxSubmitJobsPerUser=3", "longer": "MaxWall=2-0 Flags=PartitionTimeLimit", "wider": "Flags=PartitionMaxNodes",
    "strict": "MaxTRES=node=1 Flags=DenyOnLimit", "ofpart": "MaxWall=10 MaxTRES=cpu=3", "over": "MaxWall=30 Flags=OverPartQOS",
    "lent": "",
}  # fmt: skip
REQUESTS = """
-N 1; -N 3; -N 6; -N 7; -N 2-9; -N 9 -p tight; -N 2 -p tight; -N 3 -p tight; -N 3 -p tight -q wider;
-N 2-3 -p tight; -N 1 -p pair; -N 2 -p pair; -N 2 -p one; -N 1 -p nowhere; -N 1 -p nowhere,main;
-N 3 -p tight,main; -N 3 -p tight,one; -p asleep; -p drained; -p asleep,main; -t 1-0; -t 1-0:01; -t 2-0;
-t 30 -p debug; -t 31 -p debug; -t 3 -p short; -t 2 -p short; -t 20 -p tight; -t 21 -p tight;
-t 40 -p debug,tight; -t 40 -p debug,main; -t 0; -c 8; -c 9; -c 4 -p tight; -c 5 -p tight;
-c 8 --ntasks-per-node 2; -c 4 --ntasks-per-node 2 -N 3; -c 4 --ntasks-per-node 2 -p tight; -n 6 -N 3;
--set job.mem_gb_per_node=15; --set job.mem_gb_per_node=16; --set job.mem_gb_per_node=99;
--set job.mem_gb_per_node=4 -p tight; --set job.mem_gb_per_node=3 -p tight; -c 3 -p tight; -c 1 -p tight;
--set 'job.sbatch=["--mem=0"]'; --set 'job.sbatch=["--mem-per-cpu=3000"]' -c 5;
--set 'job.sbatch=["--mem-per-cpu=3000"]' -c 6; --set 'job.sbatch=["--mem-per-cpu=17000"]';
--set 'job.sbatch=["--exclusive"]' -N 2; --set 'job.sbatch=["--exclusive"]' -p tight;
--set 'job.sbatch=["--exclusive"]' --set job.mem_gb_per_node=3 -p tight; --set 'job.sbatch=["--gres=gpu:1,fpga:1"]';
-N 1-3 -p pair; -N 2-2 -p tight; -w node1,node2 -N 1-2; -w node1,node2,node3 -N 2-9; --gpus-per-node 2;
--gpus-per-node 3; --gpus-per-node 1 -N 3; --gpus-per-node 2 -N 6; --set 'job.sbatch=["--gres=gpu:2"]';
--set 'job.sbatch=["--gres=gpu:3"]'; --set 'job.sbatch=["--gres=gpu:a100:1"]';
--set 'job.sbatch=["--gres=fpga:1"]'; -C fast; -C gold; -C fast -N 2; -C fast|slow; -C fast&slow; -C fast -p one;
-C slow -p one; -w node1; -w node9; -w node4; -w node2 -p one; -w node1,node2 -N 1; -x node1; -x node1 -p one;
-x node1,node2 -N 2; -x node9; -a 0-3; -a 9999,10000; -a 0-9%2; -A toolkit; -A spare;
-A theirs; -A missing; -A capped -t 6; -A capped -t 5; -A capped -N 2 -t 5; -p booked; -p booked --set 'job.sbatch=["--reservation=held"]'; -p others; -p others -A spare; -p others -A child;
-p picked; -p picked -q daily; -p picked -q daily -A spare; -q daily; -q nothing; -q lent; -q small -t 5;
-q small -t 6; -q small -N 2; -q thin -c 2; -q thin -c 3; -q thin -c 2 -N 2; -q mine -c 4; -q mine -c 4 -N 2;
-q large -c 4; -q large -c 1; -q large -c 2 -N 2; -q minutes -c 4; -q minutes -c 5; -q group -N 1; -q group -N 2;
-q group --gpus-per-node 2; -q closed; -q full -a 0-2; -q full -a 0-3; -q longer -t 2-0; -q longer -t 3-0;
-q strict -N 2; -q strict -N 1; -p one -c 3; -p one -c 4; -p one -t 11; -p one -t 11 -q over;
-p one -t 31 -q over; -p one -c 4 -q over; --set 'job.sbatch=["--reservation=held"]';
--set 'job.sbatch=["--reservation=held"]' -N 2; --set 'job.sbatch=["--reservation=none"]';
--set 'job.sbatch=["--reservation=lent"]'; --set 'job.sbatch=["--reservation=theirs"]';
--set 'job.sbatch=["--reservation=theirs"]' -A child; -o /no/such/folder/%j.out; -d afterok:999999; -d singleton
"""
# Lines of scripts between `#!/bin/bash` with a walltime and `true`.
SCRIPTS = (
    "#SBATCH --partition\u00a0\u00a0main", "#SBATCH\u00a0--nodes=2", "#SBATCH --nodes=2\u00a0", "#SBATCH --nodes\u00a0=2",
    "#SBATCH --nodes=\u00a02", "#SBATCH -n\u00a02", "#SBATCH \u2013nodes=2", "#SBATCH \u2014nodes=2", "#SBATCH -\u2013nodes=2",
    "#SBATCH \u2013N 2", "#SBATCH --mem=\u201c2G\u201d", "#SBATCH --mem=\u20182G\u2019", "#SBATCH --time=00:05:00\u200b",
    "#SBATCH -t 00\uff1a05", "#SBATCH --ntasks=\uff12", "#SBATCH --cpus-per-task=2\ufeff", "#SBATCH --hold\u00a0",
    "#SBATCH --exclusive\u200b", "#SBATCH --exclusive=\u201cuser\u201d", "#SBATCH --array=0\u20133", "#SBATCH --gres=gpu:1\u00a0",
    "#SBATCH --gpus-per-node=\u201c1\u201d", "#SBATCH --signal=USR1@60\u200b", "#SBATCH --begin=now\u00a0",
    "#SBATCH --dependency=singleton\u00a0", "#SBATCH --mail-type=\u201cEND\u201d", "#SBATCH --account=toolkit\u00a0",
    "#SBATCH --qos=normal\u200b", "#SBATCH --constraint=f\u00e4st", "#SBATCH --nodelist=node1\u00a0", "#SBATCH --licenses=x\u00a0",
    "#SBATCH --hint=nomultithread\u00a0", "#SBATCH --distribution=block\u2013cyclic", "#SBATCH --job-name=\u201cmy job\u201d",
    "#SBATCH --job-name=\u201cmyjob\u201d", "#SBATCH --job-name=\u00fcbung", "#SBATCH --comment=\u00e4\u2013\u200b\u00a0",
    "#SBATCH --mail-user=\u00fc@example.org --mail-type=NONE",
    "#SBATCH --mem=2 G", "#SBATCH --mem=2GiB", "#SBATCH --mem=2.5G", "#SBATCH --mem=2GB", "#SBATCH --mem=", "#SBATCH --time=5 minutes",
    "#SBATCH --time=5m", "#SBATCH --time=1:2:3:4", "#SBATCH --nodes=two", "#SBATCH --nodes=2,", "#SBATCH --nodes =2", "#SBATCH -N=2",
    "#SBATCH --nodes= 2", "#SBATCH --nodes=2 # two", "#SBATCH --nodes=2 (two)", "#SBATCH -nodes=2", "#SBATCH nodes=2",
    "#SBATCH ---nodes=2", "#SBATCH --ntasks=2x", "#SBATCH --ntasks=0", "#SBATCH --cpus-per-task=1.5", "#SBATCH --job-name=my job",
    "#SBATCH --requeue=1", "#SBATCH --no-such-option=1", "#SBATCH --mail-type=DONE", "#SBATCH --dependency=foo:1",
    "#SBATCH --gres=gpu:", "#SBATCH --exclusive=foo", "#SBATCH --licenses=nothing",
    "#SBATCH --mem=1G --mem-per-cpu=500M", "#SBATCH --mem=1G\n#SBATCH --mem-per-gpu=500M", "#SBATCH --mem-per-cpu=1G --mem-per-gpu=1G",
    "#SBATCH --mem=0 --mem-per-cpu=1G", "#SBATCH --mem=1G\n#SBATCH --mem=2G",
    "#SBATCH -n1 -N1 --ntasks-per-node=2", "#SBATCH -n3 -N2 --ntasks-per-node=2", "#SBATCH -n5 -N2 --ntasks-per-node=2",
    "#SBATCH -n4 -N1-2 --ntasks-per-node=2", "#SBATCH -n1 -N2",
    "set -e\n#SBATCH --nodes=99", "\u00a0\n#SBATCH --nodes=99", "cat > /dev/null <<E\n#SBATCH --nodes=99\nE", "##SBATCH --nodes=99",
    " #SBATCH --nodes=99", "# SBATCH --nodes=99",
    "#SBATCH -N2\nif false; then srun torchrun --nproc-per-node=2 --rdzv-endpoint=localhost:1 train.py; fi",
)  # fmt: skip


def script_with(lines: str) -> str:
    """Return a script with some lines of `SCRIPTS`."""
    return f"#!/bin/bash\n#SBATCH --time=5 --output=/dev/null\n{lines}\ntrue\n"


@dataclass(frozen=True)
class Row:
    """A request, the verdicts of both programs, and what Slurm did. `truth` starts with `good` or `bad`."""

    request: str
    preflight: str
    test_only: str
    truth: str

    @property
    def ours_is_wrong(self) -> bool:
        if self.truth.startswith("good"):
            return self.preflight == "refuses"
        waits_for_nodes = self.truth.startswith("bad: waits") and any(word in self.truth for word in MAY_COME_BACK)
        return self.preflight not in (("refuses", "warns") if waits_for_nodes else ("refuses",))

    @property
    def theirs_is_wrong(self) -> bool:
        return (self.test_only == "starts") != self.truth.startswith("good")

    def line(self) -> str:
        marks = f"{'!' if self.ours_is_wrong else ' '}{'?' if self.theirs_is_wrong else ' '}"
        return f"{marks} {self.request if self.request.isascii() and self.request.isprintable() else ascii(self.request):<52} {self.preflight:<8} {self.test_only:<8} {self.truth}"


@dataclass(frozen=True)
class Site:
    """The cluster, and a site file without partitions, so that all limits come from the cluster."""

    layout: Layout

    @cached_property
    def environment(self) -> dict[str, str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TOOLKIT_"))}
        shared = self.layout.shared
        here = {
            "SLURM_CONF": self.layout.slurm_conf,
            "TOOLKIT_SITE": shared / "here.toml",
            "TOOLKIT_RUNS": shared / "runs",
        }
        return outside | {name: str(value) for name, value in here.items()}

    def call(self, *argv: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in argv]
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.layout.shared,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if check and done.returncode:
            sys.exit(f"{shlex.join(words)}: {done.stdout}{done.stderr}")
        return done

    def prepare(self) -> None:
        shared = self.layout.shared
        (shared / "here.toml").write_text(
            f'name = "here"\n[scheduler]\nkind = "slurm"\nconf = "{self.layout.slurm_conf}"\n'
            '[gpu]\nrequest = "--gpus-per-node={count}"\n'
        )
        (shared / "job.toml").write_text('[job]\nentry = ["true"]\ntime = "5"\n[restart]\nwarn_s = 10\n')
        account = ("sacctmgr", "--immediate", "--quiet")
        for name, limits in QOS.items():
            self.call(*account, "add", "qos", name)
            if limits:
                self.call(*account, "modify", "qos", name, "set", *limits.split())
        lent = "lent"  # a QOS that the user may not use
        allowed = ",".join(["normal", *(name for name in QOS if name != lent)])
        for name, parent in (("spare", "root"), ("theirs", "root"), ("capped", "root"), ("child", "theirs")):
            self.call(*account, "add", "account", name, f"parent={parent}")
            if name != "theirs":
                self.call(*account, "add", "user", "root", f"account={name}")
        self.call(*account, "add", "user", "nobody", "account=spare")
        self.call(*account, "modify", "user", "root", "set", f"qos={allowed}", "defaultqos=normal")
        self.call(*account, "modify", "user", "root", "where", "account=capped", "set", "MaxWall=5", "GrpTRES=node=1")
        with self.layout.slurm_conf.open("a") as stream:  # only now, because slurmctld must know the QOS first
            stream.write("\n".join(PARTITIONS) + "\n")
        self.call("scontrol", "reconfigure")
        self.call("scontrol", "update", "nodename=node1", "features=fast")
        self.call("scontrol", "update", "nodename=node2", "features=slow")
        self.call("scontrol", "update", "nodename=node4", "state=drain", "reason=broken")
        reserve = (
            "scontrol",
            "create",
            "reservation",
            "duration=1:00:00",
            "starttime=now",
            "flags=ignore_jobs,overlap",
        )
        for name, whose, node in (
            ("held", "users=root", 5),
            ("lent", "users=nobody", 6),
            ("theirs", "accounts=theirs", 6),
        ):
            self.call(*reserve, f"reservationname={name}", whose, f"nodes=node{node}")

    def verdicts(self, request: str) -> tuple[str, str, str]:
        """Return the verdicts of preflight and sbatch, and the script that both checked.

        Options that toolkit's command line rejects are passed to sbatch unchanged.
        """
        if request in SCRIPTS:
            path = self.layout.shared / f"script-{SCRIPTS.index(request)}.sh"
            path.write_text(script_with(request))
            return _verdict_here(path), self._test(path.read_text()), path.read_text()
        words = shlex.split(request)
        said = self.call(TOOLKIT, "preflight", "job.toml", "--json", *words, check=False)
        ours = _verdict_of(said)
        if said.returncode in (0, 1):
            rendered = self.call(TOOLKIT, "render", "job.toml", *words).stdout
            directives = [line for line in rendered.splitlines() if line.startswith("#SBATCH")]
        else:
            directives = [f"#SBATCH -t 5 --output=/dev/null {shlex.join(words)}"]
        script = "\n".join(["#!/bin/sh", *directives, ""])
        return ours, self._test(script), script

    def _test(self, script: str) -> str:
        said = subprocess.run(
            ["sbatch", "--test-only"],
            input=script,
            env=self.environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        return "starts" if "to start at" in said.stderr else "refuses"

    def truth(self, script: str) -> str:
        """Submit the script; return `good`, or `bad` with the reason."""
        sent = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            env=self.environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if sent.returncode:
            return "bad: sbatch " + sent.stderr.strip().splitlines()[-1].rpartition(": ")[2]
        job, began = sent.stdout.strip(), time.monotonic()
        try:
            while True:
                shown = self.call("scontrol", "--oneliner", "show", "job", job).stdout
                jobs = [dict(word.partition("=")[::2] for word in line.split()) for line in shown.splitlines()]
                states = {one["JobState"] for one in jobs}
                if states == {"COMPLETED"}:
                    return "good"
                if waiting := next((one for one in jobs if one["JobState"] == "PENDING"), None):
                    patience_s = LONG_PATIENCE_S if waiting["Reason"] in VAGUE else PATIENCE_S
                    if time.monotonic() - began > patience_s:
                        return f"bad: waits, {waiting['Reason']}"
                elif failed := next(
                    (one for one in jobs if one["JobState"] not in ("COMPLETED", "RUNNING", "COMPLETING")), None
                ):
                    return f"bad: {failed['JobState']}, {failed['Reason']}"
                time.sleep(POLL_S)
        finally:
            self.call("scancel", job)
            while self.call("squeue", "--noheader").stdout.strip():
                time.sleep(POLL_S)


def _verdict_of(said: subprocess.CompletedProcess[str]) -> str:
    if said.returncode not in (0, 1):
        return "refuses"
    found = {one["severity"] for one in json.loads(said.stdout)["findings"]}
    return "refuses" if "refusal" in found else "warns" if "warning" in found else "passes"


def _verdict_here(path: Path) -> str:
    """Return the verdict of preflight in this process, which has the environment of the site."""
    try:
        found = preflight(JobRequest(str(path)))
    except ToolkitError:
        return "refuses"
    return "refuses" if found.refusals else "warns" if found.warnings else "passes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="only requests that contain WORD")
    parser.add_argument("--json", type=Path, help="also write the rows to FILE")
    arguments = parser.parse_args()
    requests = [one.strip() for one in REQUESTS.replace("\n", " ").split(";")]
    requests = [one for one in (*requests, *SCRIPTS) if arguments.only in one]
    layout = make_layout(NAME, Path.home() / ".toolkit" / NAME)
    spec = ClusterSpec(nodes=6, gpus=2, link="", accounting=True, subnet="")
    devcluster.up(layout, spec)
    try:
        site = Site(layout)
        site.prepare()
        os.environ.clear()
        os.environ.update(site.environment)
        with ThreadPoolExecutor(max_workers=2) as pool:
            verdicts = list(pool.map(site.verdicts, requests))
        rows = []
        for request, (ours, theirs, script) in zip(requests, verdicts, strict=True):
            rows.append(Row(request, ours, theirs, site.truth(script)))
            print(rows[-1].line(), flush=True)
    finally:
        devcluster.down(layout)
    good = sum(row.truth.startswith("good") for row in rows)
    wrong, test_only = sum(row.ours_is_wrong for row in rows), sum(row.theirs_is_wrong for row in rows)
    print(
        f"{len(rows)} requests, {good} good: preflight is wrong on {wrong} (!), sbatch --test-only on {test_only} (?)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
