"""Slurm's error message in one line, and its fix."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"\b(?:sbatch|salloc|srun|scontrol|squeue|sinfo|sacct|scancel): (?:(?:error|fatal): )?")
_GENERAL = re.compile(r"^(?:Batch job submission failed|Job submit/allocate failed):")
# (words of Slurm's, the fix), as Slurm 22.05 to 24.11 say them.
_FIXES = (
    ("invalid partition", "`sinfo -s` lists the partitions; give one with -p"),
    ("invalid account", "`sacctmgr show associations user=$USER` lists yours; give -A and a partition of it"),
    ("invalid qos", "`sacctmgr show associations user=$USER format=account,qos` lists yours; give one with -q"),
    ("time limit", "`sinfo -s` shows the longest; give less with -t"),
    ("job array spec", "`scontrol show config | grep MaxArraySize`: task numbers stay below it; give others with -a"),
    ("invalid node name", "`sinfo -N` lists the nodes; fix -w or -x"),
    ("invalid feature", "`sinfo -o '%N %f'` shows each node's features; fix -C"),
    ("node count", "`sinfo -s` shows how many nodes there are; give fewer with -N"),
    (
        "requested node configuration is not available",
        "`sinfo -N -o '%N %c %m %G'` shows CPUs, MiB and GPUs of each node; request less per node",
    ),
    ("unrecognized option", "`sbatch --help` lists the options; fix job.sbatch"),
    ("invalid option", "`sbatch --help` lists the options; fix job.sbatch"),
    ("invalid --", "`man sbatch` documents the option; fix it in job.sbatch"),
    (" is down", "nothing can be submitted until slurmctld is up; the site's support knows when"),
    ("unable to contact slurm controller", "wait until slurmctld is up: `scontrol ping` asks it"),
    ("munge", "start munged on this host: by it Slurm's commands prove who you are"),
    ("configuration file", "fix it: the site's scheduler.conf names it, else SLURM_CONF"),
    ("unable to open file", "the script must lie where this command can read it; give another folder with --runs"),
)  # fmt: skip


def refusal_of(said: str) -> tuple[str, str]:
    """Slurm's words without their repeated prefixes, and the fix; "" where none is known."""
    lines = [_GENERAL.sub("", _PREFIX.sub("", line)).strip() for line in said.splitlines()]
    message = "; ".join(
        dict.fromkeys(line for line in lines if line and not line.startswith("**"))
    )  # a frame of scontrol's
    fix = next((fix for words, fix in _FIXES if words in message.lower()), "")
    return message, fix
