"""The sbatch options that toolkit knows, with the key that sets each one, its variables, and what to write instead."""

from dataclasses import dataclass

__all__ = [
    "CLI_OPTIONS", "FIXES_IN_JOB_FILE", "FIXES_ON_COMMAND_LINE", "KEYS_OF_VARIABLES", "LONG_OPTIONS",
    "SBATCH_OPTIONS", "SWITCH_VARIABLES", "SbatchOption",
]  # fmt: skip


@dataclass(frozen=True)
class SbatchOption:
    """One option of sbatch.

    `key` is the key of the job file that sets it, "" if there is none. `variables` also set the key; the last one takes
    precedence. `in_job_file` is the fix if job.sbatch contains the option, `on_command_line` if a command line does; ""
    means that the option is accepted there. `about` is the help text; "" means that no toolkit command has the option.
    """

    long: str
    letter: str = ""
    key: str = ""
    variables: tuple[str, ...] = ()
    in_job_file: str = ""
    on_command_line: str = ""
    about: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the option as typed, such as ("-N", "--nodes")."""
        return (f"-{self.letter}", f"--{self.long}") if self.letter else (f"--{self.long}",)


def _key(
    key: str, long: str, letter: str, about: str, *variables: str, refused: bool = True,
) -> SbatchOption:  # fmt: skip
    """Return an option that a key of [job] sets and that toolkit commands accept."""
    in_job_file = f"write {key} = ... in [job]" if refused else ""
    return SbatchOption(long, letter, f"job.{key}", variables, in_job_file, about=about)


# The options of toolkit commands come first, in the order of --help.
SBATCH_OPTIONS = (
    _key("array", "array", "a", "Tasks of an array: 0-9%2, 0-15:4, 1,3,5-7.", "SBATCH_ARRAY_INX"),
    _key("cluster", "clusters", "M", "Another cluster in the same accounting database.", "SBATCH_CLUSTERS", "SLURM_CLUSTERS"),
    SbatchOption("cluster", in_job_file="write cluster = ... in [job]"),
    _key("account", "account", "A", "Account to charge.", "SBATCH_ACCOUNT"),
    _key("partition", "partition", "p", "Partition.", "SBATCH_PARTITION"),
    _key("qos", "qos", "q", "Quality of service.", "SBATCH_QOS"),
    _key("time", "time", "t", "Walltime, as Slurm reads it: 90:00 is 90 minutes.", "SBATCH_TIMELIMIT"),
    _key("nodes", "nodes", "N", "Nodes, or a range such as 2-4."),
    SbatchOption("ntasks", "n", in_job_file="write nodes = ... and ranks_per_node = ..., or ranks = ..., in [job]"),
    _key("ranks_per_node", "ntasks-per-node", "", "Ranks on each node."),
    _key("cpus_per_rank", "cpus-per-task", "c", "CPUs of each rank."),
    _key("gpus_per_node", "gpus-per-node", "", "GPUs on each node.", "SBATCH_GPUS_PER_NODE", refused=False),
    _key("name", "job-name", "J", "Name of the job.", "SBATCH_JOB_NAME"),
    _key("constraint", "constraint", "C", "Node features.", "SBATCH_CONSTRAINT", refused=False),
    _key("nodelist", "nodelist", "w", "Nodes that must be in the allocation.", refused=False),
    _key("exclude", "exclude", "x", "Nodes that must not be in the allocation.", refused=False),
    SbatchOption("requeue", "", "job.requeue", in_job_file="write requeue = true in [job]",
                 on_command_line="`--set job.requeue=true`"),
    SbatchOption("no-requeue", "", "job.requeue", in_job_file="write requeue = false in [job]",
                 on_command_line="`--set job.requeue=false`"),
    SbatchOption("signal", "", "restart.warn_s", in_job_file="write warn_s = ... in [restart]",
                 on_command_line="`--set restart.warn_s=SECONDS`"),
    SbatchOption("open-mode", in_job_file="remove the option; toolkit always appends to the log"),
    SbatchOption("mem", "", "job.mem_gb_per_node", on_command_line="`--set job.mem_gb_per_node=GIB`"),
    SbatchOption("gres", on_command_line="`--gpus-per-node COUNT`, which toolkit passes in the form that the site needs"),
    SbatchOption("gpus", "G", on_command_line="`--gpus-per-node COUNT`, for each node"),
    SbatchOption("gpus-per-task", on_command_line="`--gpus-per-node COUNT`, for all ranks of a node"),
    SbatchOption("ntasks-per-gpu", on_command_line="`--ntasks-per-node COUNT`, and `--gpus-per-node COUNT`"),
    SbatchOption("mail-user", "", "notify.mail", on_command_line="`--set notify.mail=ADDRESS`"),
    SbatchOption("mail-type", "", "notify.mail_on", on_command_line='`--set \'notify.mail_on=["END", "FAIL"]\'`'),
    SbatchOption("wrap", in_job_file='write entry = ["bash", "-c", "COMMAND"] in [job]', on_command_line='write entry = ["bash", "-c", "COMMAND"] in [job] of a job file'),
    SbatchOption("test-only", in_job_file="remove the option; `toolkit preflight JOB` checks a job", on_command_line="`toolkit preflight JOB`"),
    SbatchOption("exclusive", on_command_line="`--set job.sbatch=--exclusive`"),
    SbatchOption("reservation", on_command_line="`--set job.sbatch=--reservation=NAME`"),
    SbatchOption("mem-per-cpu", on_command_line="`--set job.sbatch=--mem-per-cpu=2G`"),
    SbatchOption("begin", on_command_line="`--set job.sbatch=--begin=TIME`"),
    SbatchOption("licenses", on_command_line="`--set job.sbatch=--licenses=NAME`"),
)  # fmt: skip

# The options of toolkit commands, in the order of --help.
CLI_OPTIONS = tuple(option for option in SBATCH_OPTIONS if option.about)
# (long name, short name, fix) of each option that job.sbatch must not contain.
FIXES_IN_JOB_FILE = tuple(
    (option.long, option.letter, option.in_job_file) for option in SBATCH_OPTIONS if option.in_job_file
)
# What to type instead of an option that no toolkit command has, by each name of the option.
FIXES_ON_COMMAND_LINE = {
    name: option.on_command_line for option in SBATCH_OPTIONS if option.on_command_line for name in option.names
}
# The input variables in sbatch(1), and the path of the key that each one sets. As in sbatch, they override the script,
# and the later of two variables for one key takes precedence.
KEYS_OF_VARIABLES: dict[str, tuple[str, ...]] = {
    variable: tuple(option.key.split(".")) for option in SBATCH_OPTIONS for variable in option.variables
}
# These two take effect if they are set, whatever their value.
SWITCH_VARIABLES = {"SBATCH_REQUEUE": True, "SBATCH_NO_REQUEUE": False}

# The long option that sets a key such as "job.time".
LONG_OPTIONS = {option.key: f"--{option.long}" for option in SBATCH_OPTIONS if option.key}
