"""Count the toolkit files that `toolkit submit` (up to sbatch), `toolkit status` and saving a checkpoint run through.

    python benchmarks/call_path.py [CHECKOUT] [--files]

A file of CHECKOUT/toolkit counts if one of its functions is called in any thread, except during an import. Files below
a folder `preflight` count as one. Small scripts replace the Slurm commands. CHECKOUT may be any commit with a `.venv`;
the default is this one. Prints a table; --files also prints the file names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Runs under CHECKOUT's own Python. sys.argv is CHECKOUT, a working folder, and the path to follow.
PROBE = r"""
import json, os, sys, threading
from pathlib import Path

checkout, folder, path = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
package, seen, files, is_on = str(checkout / "toolkit") + os.sep, set(), [], False
FUNCTION = 1  # CO_OPTIMIZED: set for functions, not for module and class bodies

def imports(frame):
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False

def note(frame, event, _):
    code = frame.f_code
    if event != "call" or not is_on or code in seen or not code.co_filename.startswith(package):
        return
    if code.co_flags & FUNCTION and not imports(frame):
        seen.add(code)
        if code.co_filename not in files:
            files.append(code.co_filename)

def switch(on):
    global is_on
    is_on = on

def submits(event, args):
    if event == "subprocess.Popen" and Path(str(args[1][0])).name == "sbatch" and "--test-only" not in args[1]:
        switch(False)

sys.addaudithook(submits)
threading.setprofile(note)
sys.setprofile(note)
code = 0
if path == "save":
    import socket
    import torch, torch.distributed as dist
    from toolkit.checkpoint import Checkpointer
    from toolkit.world.facts import World
    world = World(rank=0, local_rank=0, size=1, local_size=1, node=0, nodes=1, host=socket.gethostname(), device="cpu",
                  launcher="local", discovered_by="benchmark", attempt=0, run_dir=folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    checkpoints = Checkpointer(folder / "checkpoints", world)
    switch(True)
    checkpoints.save(1, {"model": {"weight": torch.ones(64, 64)}}, {"loss": 1.0})
    switch(False)
    dist.destroy_process_group()
else:
    from toolkit.cli.main import main
    sys.argv = ["toolkit", *sys.argv[4:]]
    switch(True)
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    switch(False)
sys.setprofile(None)
threading.setprofile(None)
sys.stdout.flush()
(folder / f"{path}.json").write_text(json.dumps([os.path.relpath(file, checkout) for file in files]))
os._exit(code)
"""
CONFIG = """ClusterName             = ours
SelectType              = select/cons_tres
SLURM_VERSION           = 24.05.4
MpiDefault              = none
MaxArraySize            = 1001
MaxJobCount             = 10000
"""
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=8 CPUAlloc=0 CPUEfctv=8 CPUTot=8 Gres=(null) NodeAddr=n1 NodeHostName=n1 "
    "RealMemory=16000 AllocMem=0 Sockets=1 Boards=1 State=IDLE ThreadsPerCore=1 Partitions=main CfgTRES=cpu=8,mem=16000M\n"
)
PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=01:00:00 "
    "MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=1 Nodes=n1 State=UP TotalCPUs=8 TotalNodes=1 RootOnly=NO\n"
)
SQUEUE = f"""#!{sys.executable}
import re, sys
mark = re.search("--Format=JobArrayID:([^,]*),", " ".join(sys.argv))
cells = ("8", "RUNNING", "None", "n1", "1:00", "N/A", "N/A", "0", *6 * ["(null)"], "N/A", "8")
print("".join(cell + mark[1] for cell in cells) if mark else "")
"""


def install_slurm(folder: Path) -> None:
    """Write scripts that replace the Slurm commands of a cluster with one node, and accept one job."""
    folder.mkdir()
    for thing, text in (("config", CONFIG), ("node", NODE), ("partition", PARTITION)):
        (folder / f"{thing}.txt").write_text(text)
    programs = {
        "squeue": SQUEUE,
        "scontrol": f'#!/bin/sh\nfor thing in config node partition; do case "$*" in *"show $thing"*) exec cat {folder}/$thing.txt;; '
        "esac; done\necho 'Slurmctld(primary) at c1 is UP'\n",
        "sbatch": '#!/bin/sh\ncase "$*" in *--test-only*) echo "sbatch: Job 8 to start" >&2;; *) echo 8;; esac\n',
        "sinfo": "#!/bin/sh\necho 'main|up|2-00:00:00|1|0/8/0/8'\n",
        "srun": "#!/bin/sh\nexit 0\n",
        "sacct": "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n",
        "sacctmgr": "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n",
        "scancel": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def follow(checkout: Path, folder: Path, path: str, *argv: str) -> list[str]:
    """Return the files that one path runs through, in the order of the first call."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "TOOLKIT"))
    }
    environment |= {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(checkout), "HOME": str(folder / "home"),
        "TOOLKIT_RUNS": str(folder / "runs"), "TOOLKIT_SITE": str(folder / "ours.toml"), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-c", PROBE, str(checkout), str(folder), path, *argv],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{path} exited with {done.returncode}: {done.stdout}{done.stderr}")
    files: list[str] = json.loads((folder / f"{path}.json").read_text())
    return files


def as_counted(files: list[str]) -> list[str]:
    """Replace the files below each folder `preflight` by one entry."""
    counted = []
    for file in files:
        before, found, _ = file.partition("/preflight/")
        counted.append(before + found if found else file)
    return list(dict.fromkeys(counted))


def measure(checkout: Path) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install_slurm(folder / "bin")
        conf = folder / "slurm.conf"
        conf.touch()
        (folder / "ours.toml").write_text(f'name = "ours"\nextends = "devcluster"\n[scheduler]\nconf = "{conf}"\n')
        (folder / "work.toml").write_text("[job]\nentry = ['true']\ntime = '5'\n")
        found = {"toolkit submit JOB, to sbatch": follow(checkout, folder, "submit", "submit", "work.toml")}
        run_id = next(path.name for path in (folder / "runs" / "work").iterdir())
        found["toolkit status RUN"] = follow(checkout, folder, "status", "status", run_id)
        found["Checkpointer.save"] = follow(checkout, folder, "save")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--files", action="store_true", help="also print file names, in the order of the first call")
    asked = parser.parse_args()
    found = measure(asked.checkout.resolve())
    print("| path | files |\n|---|---|")
    for path, files in found.items():
        print(f"| {path} | {len(as_counted(files))} |")
    if asked.files:
        for path, files in found.items():
            print(f"\n{path}:", *as_counted(files), sep="\n  ")


if __name__ == "__main__":
    main()
