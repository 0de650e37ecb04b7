"""What a user reads when sbatch refuses. The texts are Slurm 22.05's, from a dev cluster."""

import pytest

from toolkit.slurm.refusals import refusal_of


@pytest.mark.parametrize(
    ("said", "message", "fix"),
    [
        (
            "sbatch: error: invalid partition specified: nowhere\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "invalid partition specified: nowhere; Invalid partition name specified",
            "-p",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "Invalid account or account/partition combination specified",
            "-A",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "Invalid qos specification", "-q"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "Requested time limit is invalid (missing or exceeds some limit)",
            "-t",
        ),
        (
            "sbatch: error: Batch job submission failed: Node count specification invalid",
            "Node count specification invalid",
            "-N",
        ),
        (
            "sbatch: error: CPU count per node can not be satisfied\n"
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "CPU count per node can not be satisfied; Requested node configuration is not available",
            "request less",
        ),
        ("sbatch: error: Unable to open file job.sbatch\n", "Unable to open file job.sbatch", "--runs"),
        ("sbatch: error: Something new\n", "Something new", ""),
        ("squeue: error: Invalid job id specified", "Invalid job id specified", ""),
        ("sinfo: error: Unable to contact slurm controller", "Unable to contact slurm controller", "`scontrol ping`"),
        (
            "Slurmctld(primary) at head is DOWN\n**********\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n**********\n",
            "Slurmctld(primary) at head is DOWN",
            "until slurmctld is up",
        ),
        (
            "squeue: error: Munge encode failed: Failed to access \"/run/munge.socket.2\": No such file or directory",
            'Munge encode failed: Failed to access "/run/munge.socket.2": No such file or directory',
            "ask the administrators to start munged",
        ),
        (
            "scontrol: error: _parse_next_key: Parsing error at unrecognized key: Nonsense\n"
            "scontrol: fatal: Unable to process configuration file",
            "_parse_next_key: Parsing error at unrecognized key: Nonsense; Unable to process configuration file",
            "SLURM_CONF",
        ),
    ],
)  # fmt: skip
def test_slurms_words_once_and_the_fix(said, message, fix):
    told = refusal_of(said)
    assert told[0] == message
    assert (fix in told[1]) if fix else told[1] == ""
