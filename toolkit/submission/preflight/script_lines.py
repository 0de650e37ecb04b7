"""Warn about lines of a script that Slurm ignores, and about a torchrun whose nodes would not find each other."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from toolkit.config.resolved import ResolvedJob
from toolkit.errors import counted
from toolkit.slurm.ignored_lines import commands_of, ignored_lines
from toolkit.submission.launch_line import QUOTED, TORCHRUN, torchrun_options
from toolkit.submission.preflight.finding import About, Finding
from toolkit.submission.preflight.options import script_of

__all__ = ["check_script"]

_PLAIN = rf"[<>]&|&>|[^\s\"'`$\\;|&()]|{QUOTED}"
_TOKEN = re.compile(rf"(?:{_PLAIN})++|[;|&()\n]")
_ASSIGNMENT = re.compile(rf"(?m)(?<![^\s;&|(])([A-Za-z_]\w*)(\+?)=(\((?:{_PLAIN}|\s)*+\)|(?:{_PLAIN})*+)", re.ASCII)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_HIDES = re.compile(r"[\"\\]*(?:`|\$(?!\{?SLURM_))")  # a variable or command that may be any options
_PATH = re.compile(r"[\"\\]*\$(?:\w+|\{\w+\})(?:/|.*\.py\"?$)")
_HIDDEN = dict.fromkeys(("--nnodes", "--rdzv-endpoint", "--rdzv-backend"), "$")
# What may precede the program of a command, and the programs that start another one.
_BEFORE = re.compile(r"if|then|else|elif|do|while|until|!|\{|[A-Za-z_]\w*=.*", re.DOTALL)
_STARTER = re.compile(
    r"(?:\S*/)?(?:srun|mpirun|mpiexec|exec|eval|env|time|nohup|nice|timeout|numactl|stdbuf|singularity|apptainer|docker|podman|"
    r"podman-hpc|shifter|enroot|ch-run|nsys|ncu|(?:conda|mamba|micromamba|uv|poetry|pixi) run) |\"?\$"
)
_ON_NODES = re.compile(r"(?<![\w.-])(?:srun|mpirun|mpiexec|ssh|pdsh|clush|parallel)(?![\w.-])")
# A script that branches by the number of nodes or of a task may start another torchrun on other nodes.
_BRANCH = re.compile(
    r"(?i)(?:\b(?:if|elif|case|test)\b|\[|\(\()[^\n;]*(?:NODES|NODEID|LOCALID|PROCID|NODE_RANK|NTASKS)"
)
_COUNTS = re.compile(r"SLURM_(?:NTASKS|NPROCS|TASKS_PER|NNODES|JOB_NUM_NODES)")
_LOCAL = re.compile(r"(?i)(?<![\w.])(?<!\w-)(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?)(?![\w.-])")
_OWN_HOST = re.compile(r"\$\(hostname|`hostname|\$\{?(?:HOSTNAME|SLURMD_NODENAME)\b")
_FEWER = re.compile(
    r"\s(?:-w|--nodelist|-r|--relative)[\s=]|\s(?:-N|--nodes)[\s=]*(?!\"?\$\{?SLURM_(?:NNODES|JOB_NUM_NODES))(\d+\b|\"?\$)"
)
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
        command, place = shlex.join([*entry, *job.arguments]), job.origin("job.entry").place("job.entry")
        commands = [(place, f"srun {command}")]
    elif job.job.once and (path := job.job_directory / entry).is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        commands = [
            (f"{path}:{number}", command) for number, command in commands_of([*enumerate(lines, start=1)]).commands
        ]
    else:
        return
    text = "\n".join(command for _, command in commands)
    if "PET_" in text or _BRANCH.search(text):  # torchrun also reads its options from variables PET_*
        return
    values = _values_in(text)
    rest = _ASSIGNMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for where, command in commands:
        own, rest = rest[: len(command)], rest[len(command) + 1 :]
        for before, words in _starts(own, values):
            options, nodes = _options(words, values), job.job.min_nodes
            is_exact = not any(map(_HIDES.match, before)) and not any(map(_COUNTS.match, values))
            is_quoted = "'" in before
            for what, fix in (
                *(_of_tasks(job, before, is_entry=isinstance(entry, list)) if is_exact else ()),
                *(_of_nodes(nodes, before, options, text) if is_exact and nodes > 1 else ()),
                *(_of_rank(nodes, options, is_quoted=is_quoted) if is_exact and not _is_part(before, nodes) else ()),
                *_of_address(nodes, options, values, is_quoted=is_quoted),
            ):
                yield about.warn(where, what, fix)


def _values_in(text: str) -> dict[str, str]:
    """Return the variables of a script with one value; an array has its elements, with those of `+=`."""
    values: dict[str, str] = {}
    several = set()
    for name, plus, raw in _ASSIGNMENT.findall(text):
        value = " ".join(raw[1:-1].split()) if raw.startswith("(") else _plain(raw)
        if plus and raw.startswith("("):
            value = f"{values.get(name, '')} {value}"
        elif plus or values.get(name, value) != value:
            several.add(name)
        values[name] = value
    return {name: value for name, value in values.items() if name not in several}


def _plain(token: str) -> str:
    return re.sub(r"[\"']", "", token)


def _starts(text: str, values: Mapping[str, str], outer: Sequence[str] = ()) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the tokens before and after each torchrun that `text` starts; "'" is before the command of a quoted -c."""
    words: list[str] = []
    for token in [*_expanded(text, values), ";"]:
        if token not in (";", "|", "&", "(", ")", "\n"):
            words.append(token)
            continue
        first = next((number for number, one in enumerate(words) if not _BEFORE.fullmatch(one)), len(words))
        is_starter = _STARTER.match(" ".join(words[first:]))
        for number in range(first, len(words) if is_starter else min(first + 1, len(words))):
            if match := TORCHRUN.match(f"{' '.join(words[number:])} "):
                yield [*outer, *words[:number]], words[number + len(match[0].split()) :]
                break
            if number + 1 < len(words) and re.fullmatch(r"-[a-z]*c", words[number]) and words[number + 1][0] in "\"'":
                quoted = words[number + 1]
                yield from _starts(quoted[1:-1], values, [*outer, *words[:number], quoted[0]])
        words = []


def _expanded(text: str, values: Mapping[str, str], depth: int = 4) -> Iterator[str]:
    """Yield the tokens of a command, with those of the variables whose values the script contains."""
    for token in _TOKEN.findall(text):
        match = _VARIABLE.fullmatch(token.strip('"'))
        if match and values.get(match[1]) and depth:
            yield from _expanded(values[match[1]], values, depth - 1)
        else:
            yield token


def _options(words: list[str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the options of torchrun in `words`; "$" for those that a variable may contain."""
    found: dict[str, str] = {}
    hidden: dict[str, str] = {}
    words = [word if _HIDES.match(word) else _plain(word) for word in words]
    while words:
        found |= {option: _plain(raw) for _, option, raw in torchrun_options(words)}
        if not words or not _HIDES.match(words[0]) or _PATH.match(words.pop(0)):
            break
        hidden = _HIDDEN
    for name in ("--nnodes", "--node-rank"):
        variable = _VARIABLE.fullmatch(found.get(name, ""))
        if variable and variable[1] in values:
            found[name] = values[variable[1]]
    return hidden | found


def _is_part(before: Sequence[str], nodes: int) -> bool:
    """Return whether the tokens before torchrun start it on some nodes of the job only."""
    fewer = _FEWER.search(" ".join(before))
    return fewer is not None and (fewer[1] is None or not fewer[1].isdecimal() or int(fewer[1]) < nodes)


def _of_tasks(job: ResolvedJob, before: Sequence[str], *, is_entry: bool) -> Iterator[tuple[str, str]]:
    each = job.job.ranks_per_node
    if each > 1 and "srun" in before and (is_entry or not _TASKS.search(" ".join(before))):
        yield (
            f"{each} tasks per node each start torchrun, which starts ranks of its own",
            "start one task per node: --ntasks-per-node=1",
        )


def _of_nodes(nodes: int, before: Sequence[str], options: Mapping[str, str], text: str) -> Iterator[tuple[str, str]]:
    if _is_part(before, nodes):
        return
    fix = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, with the first node of the job as HOST"
    given, is_alone = options.get("--nnodes", ""), "--standalone" in options
    if not _ON_NODES.search(text):
        what = f"torchrun runs only on the first of {nodes} nodes, because no srun starts it"
        yield what, f"srun --ntasks-per-node=1 torchrun {fix}"
    elif not _ON_NODES.search(" ".join(before)):
        return  # another command may start what this one starts on the other nodes
    elif is_alone or not given:
        name = "with --standalone" if is_alone else "without --nnodes"
        yield f"torchrun {name} forms a world on each node, but the job has {counted(nodes, 'node')}", fix
    if given.isdecimal() and int(given) != nodes and not is_alone:
        yield f"torchrun has --nnodes={given}, but the job has {counted(nodes, 'node')}", f"--nnodes={nodes}"


def _of_rank(nodes: int, options: Mapping[str, str], *, is_quoted: bool) -> Iterator[tuple[str, str]]:
    """Compare the number of each node, which torchrun reads only without --rdzv-backend."""
    rank = options.get("--node-rank", "")
    is_of_batch = not is_quoted and re.match(r"\$\{?SLURM_(?:NODEID|PROCID)", rank)
    if nodes < 2 or "--standalone" in options or options.get("--rdzv-backend", "static") != "static":
        return
    if rank.isdecimal() or is_of_batch:
        why = f", because the batch shell evaluates {rank}" if is_of_batch else ""
        yield (
            f"--node-rank of torchrun is {0 if is_of_batch else rank} on each of {nodes} nodes{why}",
            "remove it, and add --rdzv-backend=c10d, which numbers the nodes",
        )


def _of_address(
    nodes: int, options: Mapping[str, str], values: Mapping[str, str], *, is_quoted: bool
) -> Iterator[tuple[str, str]]:
    if nodes < 2 or "--standalone" in options or options.get("--nnodes", "1") == "1":
        return
    name = next((one for one in ("--rdzv-endpoint", "--master-addr") if one in options), "")
    address = options.get(name, "127.0.0.1")
    texts = [address, *(values[one] for one in _VARIABLE.findall(address) if one in values)]
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
