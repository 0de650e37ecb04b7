"""Render the sbatch script of a start, and copy the code that its ranks run."""

import json
import os
import re
import shlex
import socket
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from toolkit.config.entry import check_entry, files_of_entry
from toolkit.config.env import VARIABLE_PATTERN
from toolkit.config.resolved import ResolvedJob
from toolkit.errors import OWN_FAILURE, CheckFailedError, ToolkitError
from toolkit.rundir.bad_nodes import BadNode, bad_nodes, runs_of
from toolkit.rundir.files import read_json
from toolkit.rundir.layout import RunDirectory
from toolkit.runs.record.code_snapshot import (
    Snapshot,
    check_out,
    code_state,
    differences,
    list_of,
    read_snapshot,
    remove_snapshot,
    repeat_snapshot,
    take_snapshot,
)
from toolkit.runs.record.job import sbatch_words
from toolkit.slurm.array import array_variables
from toolkit.slurm.batch_script import shell_signal
from toolkit.slurm.hostlist import expand_hostlist
from toolkit.slurm.sbatch_options import excluded_nodes, value_of
from toolkit.slurm.sbatch_table import LONG_OPTIONS
from toolkit.slurm.submit import comment_of, token_of
from toolkit.terminal.talk import say

__all__ = [
    "KEPT", "NewCode", "allocation_options", "describe", "is_rerun", "keep_code", "nodes_to_exclude", "render_script",
    "repeat_code",
]  # fmt: skip

# Shell patterns of the variables that a job inherits; the site and the job set all others.
KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "TERM", "HOSTNAME", "PWD",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SLURM_*", "SLURMD_*", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "PMI_*", "PMIX_*", "MODULEPATH", "MODULESHOME", "MODULES_*", "LMOD_*", "__LMOD_*",
    "TOOLKIT_LOCAL", "TOOLKIT_IN_ALLOCATION",
)  # fmt: skip
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+\[\]-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render_script(
    job: ResolvedJob, run: RunDirectory, start: int, *, excluded: Sequence[str] = (), extra_sbatch_options: Sequence[str] = (),
    task_overrides: Mapping[str, Mapping[str, Any]] | None = None, whole_array: str = "",
) -> str:  # fmt: skip
    """Return the script of one submission, whose first start is `start`; `excluded` are further nodes to exclude.

    `extra_sbatch_options` are for this submission only. `task_overrides` override the job in each task of a sweep.
    `whole_array` are the tasks that count, minimum, maximum and step describe, if this submission has only some of them.

    Raises:
        ToolkitError: a value contains a control character, or a name to pass is not a valid variable name.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    template = environment.from_string(files("toolkit.templates").joinpath("job.sbatch.j2").read_text(encoding="utf-8"))
    return template.render(
        directives=[quote_directive(option) for option in directives(job, run, start, excluded, extra_sbatch_options)],
        run_id=run.run_id,
        job_name=job.job.name,
        site=job.site.name,
        run_directory_comment=_check_path(run),
        start=start,
        array_variables=array_variables(whole_array or job.job.array) if job.job.array else {},
        kept=[
            *KEPT,
            *map(_pattern, job.env.passed),
            *map(_variable, [*job.env.secrets_of_shell, *job.notify.variables]),
        ],
        modules=_uses_modules(job) and not job.job.once,
        site_lines=[] if job.job.once else site_lines(job),
        is_once=job.job.once,
        python=shlex.quote(sys.executable),
        run_directory=shlex.quote(str(run.path)),
        log_mode="640" if job.paths.access == "group" else "600",
        job=job.to_json() if task_overrides is None else _with_sweep(job.to_json(), task_overrides),
    )


def _with_sweep(job: str, task_overrides: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the JSON of the job with the key `sweep` added."""
    return f'{job[:-1]},"sweep":{json.dumps(task_overrides)}}}'


def directives(
    job: ResolvedJob,
    run: RunDirectory,
    start: int,
    excluded: Sequence[str] = (),
    extra_sbatch_options: Sequence[str] = (),
) -> list[str]:
    """Return sbatch's long options, one per directive, unquoted. The first component includes those of the job."""
    first, *others = job.components
    options = [*_of_whole_job(first, run, start, excluded), *extra_sbatch_options]
    for one in others:
        options += ["hetjob", *_nodes_and_ranks(one), *_requeue(one)]
        options += [*_wanted(one, excluded), *_other_words(one)]
    return options


def _of_whole_job(job: ResolvedJob, run: RunDirectory, start: int, excluded: Sequence[str]) -> list[str]:
    table, words = job.job, sbatch_words(job)
    options = [
        f"--job-name={table.name}",
        f"--output={str(run.path).replace('%', '%%')}/slurm-{'%A_%a' if table.array or table.repeat > 1 else '%j'}.out",
        "--open-mode=append",
        f"--comment={comment_of(token_of(run.run_id, start), words)}",
        *_nodes_and_ranks(job),
        *_requeue(job),
        *([f"--signal=B:USR2@{job.restart.warn_s}"] if job.has_warning else []),
    ]
    if table.cluster:
        options.append(f"--clusters={table.cluster}")
    if table.array:
        options.append(f"--array={table.array}")
    if table.repeat > 1:
        options.append(f"--array=1-{table.repeat}%1")
    if job.notify.mail:
        options += [f"--mail-user={','.join(job.notify.mail)}", f"--mail-type={','.join(job.notify.mail_on)}"]
    options += _wanted(job, excluded)
    return [*options, *_other_words(job)]


def _requeue(job: ResolvedJob) -> list[str]:
    if job.job.once and "job.requeue" not in job.origins:  # the default of the cluster
        return []
    return ["--requeue" if job.job.requeue else "--no-requeue"]


def allocation_options(job: ResolvedJob) -> list[str]:
    """Return salloc's long options for the nodes that a job would get."""
    return [*_nodes_and_ranks(job), *_wanted(job, ()), *_other_words(job)]


def _other_words(job: ResolvedJob) -> list[str]:
    """Return the further options of the site and the job, except --comment and --exclude.

    Those two are merged with ours: on their own, they would override our submission token and list of bad nodes.
    """
    joined = [("comment", ""), ("exclude", "x")]
    # The supervisor receives the warning, and passes the signal to the batch shell or the steps.
    if job.job.once and (shell_signal(sbatch_words(job)) or "restart.warn_s" in job.origins):
        joined.append(("signal", ""))
    return [word for word in sbatch_words(job) if all(value_of(word, *names) is None for names in joined)]


def _wanted(job: ResolvedJob, excluded: Sequence[str]) -> list[str]:
    """Return the options for the resources of each node, and for the choice of nodes."""
    table = job.job
    exclude = excluded_nodes(table.exclude, sbatch_words(job), excluded)
    memory = f"{table.mem_gb_per_node}G" if table.mem_gb_per_node else ""
    wanted = {
        "job.time": table.time, "job.partition": table.partition, "job.account": table.account, "job.qos": table.qos,
        "job.constraint": table.constraint, "job.nodelist": table.nodelist, "job.exclude": exclude,
        "job.mem_gb_per_node": memory,
    }  # fmt: skip
    gpus = [job.gpu.request.replace("{count}", str(table.gpus_per_node))] if table.gpus_per_node else []
    return [*gpus, *(f"{LONG_OPTIONS[key]}={value}" for key, value in wanted.items() if value)]


def _nodes_and_ranks(job: ResolvedJob) -> list[str]:
    """Return options that reserve CPUs for the ranks of each node.

    For a range of nodes only CPUs are requested, and the step sets its own tasks. With --ntasks-per-node, Slurm counts
    the tasks of the fewest nodes and allocates no further nodes (seen with 22.05: two of four idle nodes for 2-4).
    """
    table = job.job
    if table.once:
        keys = [f"job.{name}" for name in ("nodes", "ranks_per_node", "cpus_per_rank")]
        stated = [key for key in keys if job.origin(key).layer != "built-in"]
        return [f"{LONG_OPTIONS[key]}={getattr(table, key.removeprefix('job.'))}" for key in stated]
    if "-" in str(table.nodes):
        return [f"--nodes={table.nodes}", f"--mincpus={table.ranks_per_node * table.cpus_per_rank}"]
    return [
        f"--nodes={table.nodes}",
        f"--ntasks-per-node={table.ranks_per_node}",
        f"--cpus-per-task={table.cpus_per_rank}",
    ]


def quote_directive(option: str) -> str:
    """Return one option as a `#SBATCH` line contains it; sbatch has its own quoting rules, not the shell's."""
    _refuse_control(option, "an sbatch option")
    if _PLAIN.fullmatch(option):
        return option
    name, equals, value = option.partition("=")
    if not equals or " " in name:
        return option  # in `-p main` or `-D "/my data/x=1"`, the user has already quoted the value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def _uses_modules(job: ResolvedJob) -> bool:
    """Return whether the script must define the command `module`, which batch shells may lack."""
    setup = [*job.site_env.setup, *job.env.setup]
    return bool(job.site_env.modules or job.env.modules) or any(
        line.split()[:1] in (["module"], ["ml"]) for line in setup
    )


def site_lines(job: ResolvedJob) -> list[str]:
    """Return the shell lines of the site and the job that run first: modules, set-up, variables.

    A line that fails ends the job: otherwise the ranks would silently use the wrong MPI or CUDA.
    """
    table = job.site_env
    lines = []
    for file, env in (("site", table), ("job", job.env)):
        lines += [_or_end(f"load_module {shlex.quote(name)}", f"module load {name}", file) for name in env.modules]
        lines += [_or_end(line, line, file) for line in env.setup]
    lines += [f"export {_variable(name)}={shlex.quote(value)}" for name, value in table.vars.items()]
    return lines


def _or_end(line: str, told: str, file: str) -> str:
    said = shlex.quote(f"toolkit: this line of the {file} file failed: {told}")
    return f"{{ {line}\n}} || {{ echo {said} >&2; exit {OWN_FAILURE}; }}"


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ToolkitError(f"{name!r} is not a valid variable name", where="[env]", fix="use letters, digits and _")
    return name


def _pattern(name: str) -> str:
    if not VARIABLE_PATTERN.fullmatch(name):
        raise ToolkitError(
            f"{name!r} is not a valid variable name", where="[env] pass", fix="use letters, digits, _ and *"
        )
    return name


def _check_path(run: RunDirectory) -> str:
    """Return the run directory if Slurm can log there: after a backslash it expands no %j, and it needs UTF-8."""
    path = _refuse_control(str(run.path), "the run directory")
    if "\\" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise ToolkitError(
            f"the run directory {path!a} contains a backslash or bytes that are not UTF-8",
            fix="choose another folder with --runs",
        )
    return path


def _refuse_control(text: str, what: str) -> str:
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise ToolkitError(f"{what} contains a control character: {text!a}", fix="remove it")
    return text


def nodes_to_exclude(job: ResolvedJob, runs: Path) -> list[str]:
    """Return the bad nodes of the job's site, each reported on stderr; those that the job requests are kept."""
    known = bad_nodes(runs, job.site.name)
    wanted = set(expand_hostlist(job.job.nodelist)) if known else set()  # without bad nodes, only Slurm checks the list
    excluded = []
    for bad in known:
        if bad.node in wanted:
            say(f"{describe(bad)}; kept because the job requests it")
        else:
            clear = f"toolkit site bad-nodes --clear {bad.node}"
            say(f"{describe(bad)}; excluded (`{clear}` removes the mark)")
            excluded.append(bad.node)
    return excluded


def describe(bad: BadNode) -> str:
    """Return the description of one bad node."""
    hours = max(0.0, bad.expires - time.time()) / 3600
    return f"{bad.node} is marked bad since run {bad.run_id} ({bad.reason}), for {hours:.0f} h more"


MOST_TOLD = 5  # maximum number of file names in a message


def keep_code(job: ResolvedJob, run: RunDirectory, runs: Path) -> tuple[ResolvedJob, dict[str, Any]]:
    """Copy the code of a new run, and return the job that starts from it and the record of the code.

    Raises:
        ToolkitError: the job requires a copy, but its folder is too large.
    """
    snapshot = take_snapshot(job, run.code(0), runs)
    if isinstance(snapshot, Snapshot):
        job = job.model_copy(update={"code_directory": run.code(0)})
    return job, recorded_code(job, snapshot)


def recorded_code(job: ResolvedJob, snapshot: Snapshot | str) -> dict[str, Any]:
    """Return the record of the job's git repository and of the copy of its folder, or why there is no copy."""
    state = code_state(job.job_directory, is_shared=job.paths.access == "group")
    if isinstance(snapshot, str):
        return state | {"snapshot_left_out": snapshot}
    assert job.code_directory is not None
    return state | {"snapshot": snapshot.summary(job.code_directory.name)}


def repeat_code(job: ResolvedJob, run: RunDirectory, before: RunDirectory) -> tuple[ResolvedJob, dict[str, Any]]:
    """Give a new run the code of another run: its copy, else its commit and changes.

    Raises:
        CheckFailedError: neither exists any more.
    """
    code: dict[str, Any] = read_json(before.record)["code"]
    if list_of(before.code(0)).exists():
        repeat_snapshot(before.code(0), run.code(0))
        folder = run.code(0)
    elif not files_of_entry(job):
        return job, code  # a program or a package whose code is not in the job folder
    elif "commit" in code:
        folder = check_out(job.job_directory, code, run.code(0))
    else:
        raise CheckFailedError(
            f"run {before.run_id} has no copy of its code ({code.get('snapshot_left_out', 'none was made')}), and its "
            "folder is not in a git repository",
            where=str(before.record),
            fix=f"`toolkit submit {job.job_file}` runs the code as it is now",
        )
    job = job.model_copy(update={"code_directory": folder})
    check_entry(job)
    return job, code


def is_rerun(run: RunDirectory) -> bool:
    """Return whether a run is a rerun, which keeps the code that it repeats when it is resumed."""
    return "rerun_of" in read_json(run.record)


class NewCode:
    """A copy of the job folder for the next start, under a temporary name until this resume has claimed the start.

    `job` is the job that uses the copy; a job that already has a code directory keeps that and gets no copy.
    """

    def __init__(self, job: ResolvedJob, run: RunDirectory, start: int) -> None:
        self.folder = run.code(start)
        self.draft = self.folder.with_name(f".{self.folder.name}.{socket.gethostname()}.{os.getpid()}")
        self.job = job
        self.record: dict[str, Any] = {}
        if job.code_directory is not None:
            return
        try:
            snapshot = take_snapshot(job, self.draft, runs_of(run))
        except BaseException:
            self.discard()
            raise
        if isinstance(snapshot, Snapshot):
            self.job = job.model_copy(update={"code_directory": self.folder})
            _tell_edits(run, start, snapshot)
        self.record = recorded_code(self.job, snapshot)

    def put_in_place(self) -> None:
        """Rename the copy, once this resume has claimed the start."""
        if self.draft.exists():
            self.draft.rename(self.folder)
            list_of(self.draft).rename(list_of(self.folder))

    def discard(self) -> None:
        """Remove the copy, because another resume has claimed the start."""
        remove_snapshot(self.draft)


def _tell_edits(run: RunDirectory, start: int, snapshot: Snapshot) -> None:
    """Report the files that changed since the previous start."""
    copies = [copy for number in reversed(range(start)) if (copy := read_snapshot(run.code(number)))]
    edits = differences(copies[0], snapshot) if copies else {}
    if edits:
        told = [f"{name} was {what}" for name, what in list(edits.items())[:MOST_TOLD]]
        told += [f"and {len(edits) - MOST_TOLD} more files"] if len(edits) > MOST_TOLD else []
        say(f"since the last start, {', '.join(told)}; start {start} uses the new code (--same-code: the old)")
