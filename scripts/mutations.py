"""Draw random mutations of functions, apply them in another version of the tree, and run the tests that should fail.

    python scripts/mutations.py draw OLD_TREE -o mutations.json --seed 471 --count 40
    python scripts/mutations.py check mutations.json --tree TREE --renames renames.json
    python scripts/mutations.py run mutations.json --tree TREE --renames renames.json --only 3 17

`run` changes one file of TREE at a time, which must equal its committed version, and restores it. The verdict is
`caught` if a test in the mirrored folder (toolkit/rundir -> tests/rundir) fails, `survived` if all pass, `unfinished`
if none has failed at the time limit. `check` only prints where each mutation applies.

renames.json: {"modules": {"toolkit.batch.living": "toolkit.runs.slurm_state"}, "names": {"slurm_word": "state_from_slurm"},
"functions": {"toolkit.batch.resume:take_back": "toolkit.submission.undo:undo_resume"}}. A module may be a package;
the rest of the path stays. `names` apply to qualified names and lines. `--since ad6182e` adds renames that git finds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("batch", "supervise", "rundir", "checkpoint", "comm")
LIMIT_S = 300.0
OPPOSITES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One changed line of one function. `kind` and `index` locate it if the line differs in the other tree."""

    number: int
    file: str
    qualname: str
    before: str
    after: str
    kind: str
    index: int
    same_kind: int


@dataclass(frozen=True)
class Edit:
    """A replacement within one line of a file; columns count characters."""

    kind: str
    line: int
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Renames:
    modules: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)

    def module(self, old: str) -> str:
        """Return the new name of a module, if it or a package that contains it was renamed; the closest one counts."""
        parts = old.split(".")
        for length in range(len(parts), 0, -1):
            if new := self.modules.get(".".join(parts[:length])):
                return ".".join([new, *parts[length:]])
        return old

    def text(self, old: str) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda match: self.names.get(match[0], match[0]), old)

    def function(self, file: str, qualname: str) -> tuple[str, str]:
        """Return the new file and qualified name of a function."""
        module = module_of(file)
        moved = self.functions.get(f"{module}:{qualname}") or f"{self.module(module)}:{self.text(qualname)}"
        new_module, _, new_name = moved.partition(":")
        return new_module.replace(".", "/") + ".py", new_name


class NotApplicableError(Exception):
    """A mutation cannot be applied to a tree."""


def functions_of(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions and methods of a module with their qualified names, except nested functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{above}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield above + node.name, node


def edits_of(function: ast.AST, lines: list[str]) -> list[Edit]:
    """Return the possible edits of a function body, in source order."""
    found = [edit for statement in getattr(function, "body", []) for edit in _edits_below(statement, lines)]
    return sorted(found, key=lambda edit: (edit.line, edit.start))


def _edits_below(top: ast.AST, lines: list[str]) -> Iterator[Edit]:
    for node in ast.walk(top):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _operator(type(node.ops[0]), node.left, node.comparators[0], lines)
        elif isinstance(node, ast.BoolOp):
            yield from _operator(type(node.op), node.values[0], node.values[1], lines)
        elif isinstance(node, ast.BinOp) and not isinstance(node.left, ast.JoinedStr):
            yield from _operator(type(node.op), node.left, node.right, lines)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from _within_line("not", node.lineno, node.col_offset, node.operand, lines)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int) and node.end_lineno == node.lineno:
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            kind = "bool" if isinstance(node.value, bool) else "int"
            start, end = _columns(lines, node.lineno, node.col_offset, node.end_col_offset)
            if lines[node.lineno - 1][start:end] == str(node.value):  # wrong columns inside f-strings (Python 3.11)
                yield Edit(kind, node.lineno, start, end, new)


def _operator(kind: type[ast.AST], left: ast.expr, right: ast.expr, lines: list[str]) -> Iterator[Edit]:
    """Yield the edit of an operator if both operands are on the same line."""
    if kind not in OPPOSITES or left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    old, new = OPPOSITES[kind]
    start, end = _columns(lines, right.lineno, left.end_col_offset, right.col_offset)
    between = lines[right.lineno - 1][start:end]
    if between.strip("() ") == old:
        at = start + between.index(old)
        yield Edit(old, right.lineno, at, at + len(old), new)


def _within_line(kind: str, line: int, column: int, operand: ast.expr, lines: list[str]) -> Iterator[Edit]:
    if operand.lineno == line:
        start, _ = _columns(lines, line, column, column)
        if lines[line - 1].startswith("not ", start):
            yield Edit(kind, line, start, start + len("not "), "")


def _columns(lines: list[str], line: int, start: int, end: int | None) -> tuple[int, int]:
    """Convert columns of ast, which are UTF-8 bytes, to characters."""
    raw = lines[line - 1].encode()
    return len(raw[:start].decode()), len(raw[:end].decode())


def edited(line: str, edit: Edit) -> str:
    return line[: edit.start] + edit.new + line[edit.end :]


def draw(tree: Path, seed: int, count: int) -> list[Mutation]:
    """Draw the same number of mutations from each package, each in a different function."""
    chance = random.Random(seed)
    found: list[Mutation] = []
    for place, package in enumerate(PACKAGES):
        candidates = []
        for path in sorted((tree / "toolkit" / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            for qualname, function in functions_of(ast.parse(text)):
                if edits := edits_of(function, lines):
                    candidates.append((str(path.relative_to(tree)), qualname, edits, lines))
        share = count // len(PACKAGES) + (place < count % len(PACKAGES))
        for file, qualname, edits, lines in chance.sample(candidates, share):
            edit = chance.choice(edits)
            same = [other for other in edits if other.kind == edit.kind]
            line = lines[edit.line - 1]
            found.append(
                Mutation(
                    len(found), file, qualname, line.strip(), edited(line, edit).strip(), edit.kind,
                    same.index(edit), len(same),
                )
            )  # fmt: skip
    return found


def locate(mutation: Mutation, tree: Path, renames: Renames) -> tuple[Path, int, str]:
    """Return the file, the line number (from 0), and the new line.

    Raises:
        NotApplicableError: the function is missing, or has neither the line nor the same number of such operators.
    """
    file, qualname = renames.function(mutation.file, mutation.qualname)
    path = tree / file
    if not path.exists() and (tree / file.removesuffix(".py") / "__init__.py").exists():
        path = tree / file.removesuffix(".py") / "__init__.py"
    if not path.exists():
        raise NotApplicableError(f"expected the file {file}, which does not exist; add its module to the renames")
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    function = dict(functions_of(ast.parse(text))).get(qualname)
    if function is None:
        raise NotApplicableError(f"{file} does not contain the function {qualname}; add it to the renames")
    edits = edits_of(function, lines)
    same = [edit for edit in edits if edit.kind == mutation.kind]
    before, after = renames.text(mutation.before), renames.text(mutation.after)
    for edit in same:
        line = lines[edit.line - 1]
        if line.strip() == before and edited(line, edit).strip() == after:
            return path, edit.line - 1, edited(line, edit)
    if len(same) == mutation.same_kind:
        edit = same[mutation.index]
        return path, edit.line - 1, edited(lines[edit.line - 1], edit)
    raise NotApplicableError(
        f"expected {mutation.same_kind} {mutation.kind!r} or the line {before!r} in {file}:{qualname}, got {len(same)}"
    )


def mirrored_tests(path: Path, tree: Path) -> Path:
    """Return the folder below tests/ that mirrors a module's package, or the closest parent that exists."""
    inside = path.relative_to(tree / "toolkit").parent
    while not (tree / "tests" / inside).is_dir():
        inside = inside.parent
    return tree / "tests" / inside


def tests_named_after(path: Path, tree: Path) -> list[Path]:
    """The test files with the module's name: they run first, because they most likely notice the mutation."""
    return sorted((tree / "tests").rglob(f"test_{path.stem}*.py"))


def run_tests(tests: list[Path], tree: Path, limit_s: float) -> str:
    """Return `caught`, `survived` or `unfinished`. SIGINT lets fixtures clean up at the time limit."""
    argv = [tree / ".venv" / "bin" / "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    argv += ["-m", "not cluster and not evidence", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pytest = subprocess.Popen(argv, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = pytest.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if pytest.poll() is None:
            pytest.send_signal(signal.SIGINT)
            try:
                pytest.wait(30)
            except subprocess.TimeoutExpired:
                pytest.kill()
                pytest.wait()
    if code is None:
        return "unfinished"
    if code not in (0, 1, 2, 3):  # 2 and 3: the mutation breaks an import, which ends the collection
        raise SystemExit(f"expected pytest of {tests[-1]} to exit with 0 (all pass) or 1 (a test fails), got {code}")
    return "caught" if code else "survived"


def run_one(mutation: Mutation, tree: Path, renames: Renames, limit_s: float) -> dict[str, Any]:
    try:
        path, number, new = locate(mutation, tree, renames)
    except NotApplicableError as error:
        return {"number": mutation.number, "verdict": "not applicable", "detail": str(error)}
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path], cwd=tree, check=False).returncode:
        raise SystemExit(f"{path} has uncommitted changes. Fix: commit them, or choose another --tree")
    original = path.read_text(encoding="utf-8")
    lines = original.splitlines(keepends=True)
    before = lines[number].strip()
    lines[number] = new + "\n"
    folder = mirrored_tests(path, tree)
    started = time.monotonic()
    try:
        path.write_text("".join(lines), encoding="utf-8")
        verdict = run_tests([*tests_named_after(path, tree), folder], tree, limit_s)
    finally:
        path.write_text(original, encoding="utf-8")
    return {
        "number": mutation.number, "verdict": verdict, "file": str(path.relative_to(tree)), "qualname": mutation.qualname,
        "before": before, "after": new.strip(), "tests": str(folder.relative_to(tree)),
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def read_mutations(path: Path) -> list[Mutation]:
    return [Mutation(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def read_renames(path: Path | None, since: str, tree: Path) -> Renames:
    """Read renames from a file; they override those that git finds."""
    found = Renames(**json.loads(path.read_text(encoding="utf-8"))) if path else Renames()
    return Renames({**(git_renames(since, tree) if since else {}), **found.modules}, found.names, found.functions)


def git_renames(since: str, tree: Path) -> dict[str, str]:
    """Return the modules that git reports as renamed between a commit and HEAD, based on file similarity."""
    argv = ["git", "diff", "-M40%", "-l0", "--diff-filter=R", "--name-status", since, "HEAD", "--", "toolkit"]
    output = subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=True).stdout
    rows = (line.split("\t") for line in output.splitlines())
    return {module_of(old): module_of(new) for _, old, new in rows}


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def check_all(mutations: list[Mutation], tree: Path, renames: Renames) -> int:
    """Print where each mutation applies; return the number of those that do not apply."""
    missing = 0
    for mutation in mutations:
        try:
            path, number, new = locate(mutation, tree, renames)
            print(f"{mutation.number:3} {path.relative_to(tree)}:{number + 1}: {new.strip()}")
        except NotApplicableError as error:
            missing += 1
            print(f"{mutation.number:3} not applicable: {error}")
    return missing


def run_all(mutations: list[Mutation], tree: Path, renames: Renames, limit_s: float) -> Mapping[str, int]:
    """Run the mutations, and print a JSON line for each; return the number of mutations by verdict."""
    counts: dict[str, int] = {}
    for mutation in mutations:
        report = run_one(mutation, tree, renames, limit_s)
        counts[report["verdict"]] = counts.get(report["verdict"], 0) + 1
        print(json.dumps(report), flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("tree", type=Path)
    drawing.add_argument("-o", "--output", type=Path, required=True)
    drawing.add_argument("--seed", type=int, default=471)
    drawing.add_argument("--count", type=int, default=40)
    for name in ("check", "run"):
        command = commands.add_parser(name)
        command.add_argument("mutations", type=Path)
        command.add_argument("--tree", type=Path, default=Path())
        command.add_argument("--renames", type=Path)
        command.add_argument("--since", default="", metavar="COMMIT", help="add renames that git finds since then")
        command.add_argument("--only", type=int, nargs="+", help="numbers of mutations")
        command.add_argument("--limit", type=float, default=LIMIT_S, help="time limit per mutation in seconds")
    asked = parser.parse_args()
    if asked.command == "draw":
        drawn = draw(asked.tree.resolve(), asked.seed, asked.count)
        asked.output.write_text(json.dumps([asdict(one) for one in drawn], indent=1) + "\n", encoding="utf-8")
        return
    mutations = read_mutations(asked.mutations)
    chosen = [one for one in mutations if asked.only is None or one.number in asked.only]
    tree = asked.tree.resolve()
    renames = read_renames(asked.renames, asked.since, tree)
    if asked.command == "check":
        sys.exit(bool(check_all(chosen, tree, renames)))
    print(json.dumps(run_all(chosen, tree, renames, asked.limit)))


if __name__ == "__main__":
    main()
