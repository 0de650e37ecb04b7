"""Programs with the names of Slurm's commands that print prepared answers and record each call."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Sequence[str] | Mapping[str, str]
# The columns that toolkit requests from squeue (toolkit/slurm/job_facts.py), and what a row holds without its own value.
_COLUMNS = {
    "job_id": "", "state": "", "reason": "None", "nodes": "n1", "time_left": "1:00", "start_time": "N/A",
    "eligible_time": "N/A", "restarts": "0", "comment": "(null)", "partition": "(null)", "node_count": "(null)",
    "time_limit": "(null)", "end_time": "(null)", "dependency": "(null)", "required_nodes": "N/A",
}  # fmt: skip
# toolkit separates cells by a random mark, which it passes as the width of each column; `@` is its place here.
_SQUEUE = """\
arguments="$*"
mark=${{arguments#*--Format=JobArrayID:}}
if [ "$mark" != "$arguments" ]; then exec sed "s/@/${{mark%%,*}}/g" {rows}; fi
[ -e {comments} ] && exec cat {comments}
echo "squeue: error: expected the columns of toolkit, got $arguments" >&2
exit 1"""
# sinfo and scontrol answer in several formats; the mark is in the arguments of each.
_REPLACE_MARK = """\
mark=$(printf '%s' "$*" | grep -oE '~[0-9a-f]{{12}}~' | head -n 1)
sed "s/@/${{mark:-@}}/g" {answer}"""


class FakeSlurm:
    """Slurm's commands as shell scripts in `folder`, which the fixture `fake_slurm` puts first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        self._answers = folder / "answers"
        self._answers.mkdir(parents=True, exist_ok=True)

    def respond(self, command: str, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        """Make `command` print `stdout` and `stderr` and exit with `code`."""
        body = f"cat {self._answer(command, stdout)}\n" if stdout else ""
        body += f"cat {self._answer(f'{command}.stderr', stderr)} >&2\n" if stderr else ""
        self.script(command, f"{body}exit {code}")

    def respond_marked(self, command: str, stdout: str) -> None:
        """Make `command` print `stdout` with the mark of its arguments in place of each `@`."""
        self.script(command, _REPLACE_MARK.format(answer=self._answer(command, stdout)))

    def respond_in_turn(self, command: str, *errors: str) -> None:
        """Make call n of `command` fail with error n, or succeed where that is ""; the last one repeats."""
        for number, error in enumerate(errors):
            self._answer(f"{command}.{number}", error)
        answer = self._path(command)
        self.script(
            command,
            f'at=$(($(grep -c "^{command} " {shlex.quote(str(self._calls))}) - 1))\n'
            f"[ $at -lt {len(errors)} ] || at={len(errors) - 1}\n"
            f"[ -s {answer}.$at ] || exit 0\ncat {answer}.$at >&2\nexit 1",
        )

    def queue(self, *rows: Row, **columns: str) -> None:
        """Make squeue report `rows`: (job id, state, reason), or cells by column; `columns` are what all rows share."""
        self._answer("squeue", "".join(_row(row, **columns) for row in rows))
        self._write_squeue('"$rows"', f"rows={self._path('squeue')}\n")

    def queue_by_cluster(self, *, near: Row, **others: Row) -> None:
        """Make squeue report one row for each cluster: `near` without --clusters, the others by their names."""
        for name, row in {"near": near, **others}.items():
            self._answer(f"squeue.{name}", _row(row))
        cases = "".join(f"*--clusters={name}*) rows={self._path(f'squeue.{name}')};; " for name in others)
        self._write_squeue('"$rows"', f'case "$*" in {cases}*) rows={self._path("squeue.near")};; esac\n')

    def comments(self, *rows: Sequence[str]) -> None:
        """Make squeue print `rows` of cells when toolkit searches the queue for a comment."""
        self._answer("squeue.comments", "".join("\x1f".join(row) + "\n" for row in rows))
        if not (self.folder / "squeue").exists():
            self.queue()

    def without_accounting(self) -> None:
        """Make sacct fail as on a cluster without accounting."""
        self.respond("sacct", stderr="Slurm accounting storage is disabled\n", code=1)

    def script(self, command: str, body: str, shell: str = "/bin/sh") -> None:
        """Make `command` record its call and run `body`."""
        path = self.folder / command
        # Written beside and renamed: a program that is being run cannot be overwritten ("Text file busy").
        draft = self._answers / f"{command}.draft"
        # A test's PATH may have the commands of Slurm alone.
        draft.write_text(
            f"#!{shell}\nPATH=$PATH:/usr/bin:/bin\nprintf '%s\\n' \"{command} $*\" >> {shlex.quote(str(self._calls))}\n{body}\n"
        )
        draft.chmod(0o755)
        draft.replace(path)

    def calls(self, command: str = "") -> list[str]:
        """The recorded calls of `command`, or of all commands in their order, as `squeue --me`."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line for line in lines if not command or line.partition(" ")[0] == command]

    def _write_squeue(self, rows: str, choose_rows: str) -> None:
        comments = self._path("squeue.comments")
        self.script("squeue", choose_rows + _SQUEUE.format(rows=rows, comments=comments))

    def _answer(self, name: str, text: str) -> str:
        (self._answers / name).write_text(text)
        return self._path(name)

    def _path(self, name: str) -> str:
        return shlex.quote(str(self._answers / name))


def _row(cells: Row, **columns: str) -> str:
    own = cells if isinstance(cells, Mapping) else dict(zip(_COLUMNS, cells, strict=False))
    named = {**_COLUMNS, **columns, **own}
    assert named.keys() == _COLUMNS.keys(), f"expected columns of squeue, got {[*named]}"
    return "".join(f"{cell}@" for cell in (*named.values(), named["job_id"])) + "\n"
