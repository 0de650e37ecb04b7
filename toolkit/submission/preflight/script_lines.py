"""Warn about lines of a script that Slurm ignores, and about a torchrun whose nodes would not find each other."""

import re
from collections.abc import Iterator, Mapping, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.slurm.ignored_lines import commands_of, ignored_lines
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.preflight.options import script_of

__all__ = ["check_script"]

_TORCHRUN = re.compile(r"(?<![\w.-])(?:torchrun|python[\d.]*\s+-m\s+torch\.distributed\.(?:run|launch))(?=\s)")
_SWITCHES = frozenset(["--standalone", "--use-env", "--no-python", "--module", "-m", "--run-path"])
_HIDDEN = {"--nnodes": "$", "--rdzv-endpoint": "$"}
_ASSIGNMENT = re.compile(
    r"(?m)(?:^|[;\s])([A-Za-z_]\w*)=(\([^()]*\)|\"(?:\\.|[^\"\\])*\"|'[^']*'|`[^`\n]*`|\$\([^\n]*\)|[^\s;&|]*)"
)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_LOCAL = re.compile(r"(?i)(?<![\w.])(?<!\w-)(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?)(?![\w.-])")
_OWN_HOST = re.compile(r"\$\(hostname|`hostname|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\b")
_FEWER = re.compile(r"\s(?:-w|--nodelist|-r|--relative)[\s=]|\s(?:-N|--nodes)[\s=]*(\d+)\b")
_TASKS = re.compile(r"\s(?:-n[\s\d]|--ntasks|-N[\s\d]|--nodes)")


def check_script(job: ResolvedJob) -> Iterator[Finding]:
    """Yield warnings about lines that look like directives, but that sbatch ignores, and about torchrun."""
    if (script := script_of(job)) is not None:
        for error in ignored_lines(job.job_file, script):
            yield About(job, "directives").warn(error.where, error.message, error.fix)
    yield from _torchrun(job)


def _torchrun(job: ResolvedJob) -> Iterator[Finding]:
    """Yield warnings for each torchrun that forms a world per node, or whose nodes meet at the wrong address."""
    entry, about = job.job.entry, About(job, "torchrun")
    if isinstance(entry, list):
        command, place = " ".join([*entry, *job.arguments]), job.origin("job.entry").place("job.entry")
        starts = [(place, f"srun {command}", entry[0] in ("bash", "sh"))]
        text = command
    elif job.job.once and (path := job.job_directory / entry).is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        commands = commands_of([*enumerate(lines, start=1)]).commands
        text = "\n".join(command for _, command in commands)
        starts = [(f"{path}:{number}", command, False) for number, command in commands]
    else:
        return
    if "PET_" in text:  # torchrun reads its options from these variables, too
        return
    values: dict[str, list[str]] = {}
    for match in _ASSIGNMENT.finditer(text):
        values.setdefault(match[1], []).append(match[2].strip("\"'() \n"))
    for where, command, is_quoted in starts:
        for match in () if command.startswith(("echo ", "printf ")) else _TORCHRUN.finditer(command):
            before = command[: match.start()]
            options, nodes = _options(command[match.end() :], values), job.job.min_nodes
            is_quoted |= before.count("'") % 2 == 1
            for what, fix in (
                *_of_tasks(job, before, is_entry=isinstance(entry, list)),
                *_of_nodes(nodes, before, options),
                *_of_address(nodes, options, values, is_quoted=is_quoted),
            ):
                yield about.warn(where, what, fix)


def _options(text: str, values: Mapping[str, Sequence[str]], depth: int = 4) -> dict[str, str]:
    """Return the options of torchrun in `text`; "$" for those that a variable may contain."""
    found: dict[str, str] = {}
    hidden: dict[str, str] = {}
    words = text.split()
    while words:
        word = words.pop(0).strip("\"'")
        match = _VARIABLE.fullmatch(word)
        if match and values.get(match[1]) and depth:
            words[:0] = values[match[1]][-1].split()
            depth -= 1
        elif match:
            hidden = _HIDDEN
        elif not word.startswith("-"):
            break
        else:
            name, equals, value = word.replace("\\", "").partition("=")
            name = name.replace("_", "-")
            found[name] = "" if name in _SWITCHES else value if equals else words.pop(0).strip("\"'") if words else ""
    else:
        hidden = _HIDDEN  # a launcher in a variable, to which a later line adds options
    nodes = _VARIABLE.fullmatch(found.get("--nnodes", ""))
    if nodes and len(given := {*values.get(nodes[1], ())}) == 1:
        found["--nnodes"] = given.pop()
    return hidden | found


def _of_tasks(job: ResolvedJob, before: str, *, is_entry: bool) -> Iterator[tuple[str, str]]:
    each = job.job.ranks_per_node
    if each > 1 and "srun" in before.split() and (is_entry or not _TASKS.search(before)):
        yield (
            f"{each} tasks per node each start torchrun, which starts ranks of its own",
            "start one task per node: --ntasks-per-node=1",
        )


def _of_nodes(nodes: int, before: str, options: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    fewer = _FEWER.search(before)
    if nodes < 2 or (fewer and (fewer[1] is None or int(fewer[1]) < nodes)):
        return
    fix = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, with the first node of the job as HOST"
    given = options.get("--nnodes", "")
    if "--standalone" in options or not given:
        name = "with --standalone" if "--standalone" in options else "without --nnodes"
        yield f"torchrun {name} forms a world on each node, but the job has {counted(nodes, 'node')}", fix
    elif given.isdecimal() and int(given) != nodes:
        yield f"torchrun has --nnodes={given}, but the job has {counted(nodes, 'node')}", f"--nnodes={nodes}"


def _of_address(
    nodes: int, options: Mapping[str, str], values: Mapping[str, Sequence[str]], *, is_quoted: bool
) -> Iterator[tuple[str, str]]:
    if nodes < 2 or "--standalone" in options or options.get("--nnodes", "1") == "1":
        return
    name = next((one for one in ("--rdzv-endpoint", "--master-addr") if one in options), "")
    address = options.get(name, "127.0.0.1")
    texts = [
        address,
        *(
            values[one][-1]
            for one in _VARIABLE.findall(address)
            if len({*values.get(one, ())}) == 1 or any(f"{{{one}:-" in last for last in values.get(one, ())[-1:])
        ),
    ]
    fix = 'use the first node: HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if local := next(filter(None, map(_LOCAL.search, texts)), None):
        verb = "may be" if re.search(r":?-" + re.escape(local[1]), " ".join(texts)) else "is"
        subject = f"{name} of torchrun" if name else "the default --master-addr of torchrun"
        yield f"{subject} {verb} {local[1]}, where each of {nodes} nodes would wait for the others", fix
    elif is_quoted and _OWN_HOST.search(address):
        yield (
            f"each node evaluates {name} {address} for itself, and would wait there for the others",
            f"{fix}, outside of the quotes",
        )
