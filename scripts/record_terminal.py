"""Record commands in a terminal of 100 columns, and write their output as an SVG file.

.venv/bin/python scripts/record_terminal.py docs/terminal.svg "toolkit run train_lm -n 2" "toolkit status last"
.venv/bin/python scripts/record_terminal.py docs/watch.svg "timeout -s INT 5 toolkit watch last"
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
# Cursor movements, such as those of a progress bar that rewrites its line.
_MOVEMENTS = re.compile(r"\x1b\[[0-9;?]*[A-HJ-KST-ln-z]|\x1b[()][A-Z0-9]")


def record(command: str) -> str:
    """Run a command on a pseudo-terminal; return its output, with only the last contents of overwritten lines."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, shell=True, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    printed = bytearray()
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # the last writer has closed the terminal
            break
        if not block:
            break
        printed += block
    process.wait()
    # A live display erases its lines from the last one upwards before it draws them again: keep its last state.
    printed = printed.rpartition(b"\x1b[1A\x1b[2K")[2]
    text = _MOVEMENTS.sub("", printed.decode(errors="replace").replace("\r\n", "\n"))
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")).rstrip("\n")


def main() -> None:
    target, *commands = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    for command in commands:
        shown = re.sub(r"^timeout (-s \w+ )?\d+ ", "", command)  # ends a command that follows a run
        console.print(Text.assemble(("$ ", "bold green"), (shown, "bold")))
        console.print(Text.from_ansi(record(command)))
    # Use the monospace font of the viewer; rich would make it download a font from a CDN.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="toolkit"), flags=re.DOTALL)
    Path(target).write_text(svg.replace("Fira Code", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
