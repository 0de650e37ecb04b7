"""Shorten Slurm error messages about rejected requests to one line, and find their fixes."""

import re

__all__ = ["refusal_of"]

_PREFIX = re.compile(r"\b(?:sbatch|salloc|srun|scontrol|squeue|sinfo|sacct|scancel): (?:(?:error|fatal): )?")
_GENERAL = re.compile(r"^(?:Batch job submission failed|Job submit/allocate failed):")
# (part of a Slurm message, fix), for Slurm 22.05 to 26.05.
_FIXES = (
    ("invalid partition", "`sinfo -s` lists the partitions; choose one with -p"),
    ("invalid account", "`sacctmgr show associations user=$USER` lists your accounts and partitions; choose one with -A"),
    ("invalid qos", "`sacctmgr show associations user=$USER format=account,qos` lists yours; choose one with -q"),
    ("time limit", "`sinfo -s` shows the maximum; use less with -t"),
    ("job array spec", "`scontrol show config | grep MaxArraySize` shows the limit of task numbers; use smaller ones with -a"),
    ("invalid node name", "`sinfo -N` lists the nodes; fix -w or -x"),
    ("invalid feature", "`sinfo -o '%N %f'` shows each node's features; fix -C"),
    ("node count", "`sinfo -s` shows the number of nodes; use fewer with -N"),
    (
        "requested node configuration is not available",
        "`sinfo -N -o '%N %c %m %G'` shows CPUs, MiB and GPUs of each node; request less per node",
    ),
    ("unrecognized option", "`sbatch --help` lists the options; correct it in the script or in [job]"),
    ("invalid option", "`sbatch --help` lists the options; correct it in the script or in [job]"),
    ("invalid --", "`man sbatch` describes the values of the option; correct it in the script or in [job]"),
    (" is down", "wait until slurmctld is up; ask the site's support when"),
    ("unable to contact slurm controller", "wait until slurmctld is up: check with `scontrol ping`"),
    ("munge", "ask the administrators to start munged on this host, which Slurm commands use to authenticate"),
    ("configuration file", "fix the file that scheduler.conf in the site file names, or else SLURM_CONF"),
    ("unable to open file", "make the script readable for this command, or choose another folder with --runs"),
)  # fmt: skip


def refusal_of(output: str) -> tuple[str, str]:
    """Return (the message without repeated prefixes, the fix, or "" if none is known)."""
    lines = [_GENERAL.sub("", _PREFIX.sub("", line)).strip() for line in output.splitlines()]
    message = "; ".join(
        dict.fromkeys(line for line in lines if line and not line.startswith("**"))
    )  # scontrol prints lines that start with **
    fix = next((fix for part, fix in _FIXES if part in message.lower()), "")
    return message, fix
