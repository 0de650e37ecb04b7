"""List phrases that the language rules in CONTRIBUTING.md replace, with file and line. Standard library only.

python3 scripts/check_language.py                 all files that the rules cover
python3 scripts/check_language.py toolkit/comm    only files below these paths
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COVERED = ("toolkit", "jobs", "scripts", "benchmarks", "templates", "site_configs", "docs", "README.md", "Makefile")
# These files quote the phrases, or record messages of earlier releases.
EXEMPT = ("CONTRIBUTING.md", "CHANGELOG.md", "scripts/check_language.py")
SUFFIXES = {".py", ".md", ".toml", ".j2", ".cfg", ".svg", ""}

_PHRASES = r"""(?<!\w)(
    (?<!there\s)is\ no(?!\ longer)(?=\ )
    | (?<![\"=])nobody(?!\") | no\ one\ knows | somebody | anybody | whoever
    | mend(?:s|ed|ing)?
    | without\ a\ word | so\ many | in\ turn | one\ after\ the\ other
    | stands?\ (?:where|for|in|behind|there)
    | goes\ on | went\ on | going\ on
    | hears?\ of | (?:came|comes?)\ to\ (?:its|their)\ end
    | looks?\ at | ask(?:s|ed)?\ Slurm | Slurm\ is\ asked | asks?\ for
    | hand(?:s|ed)?\ (?:over|on) | gives?\ back | given\ back | gave\ back
    | left\ out | leaves?\ out | sets?\ aside | written\ over
    | waited\ for | tried\ again | is\ due | wins\ over | its\ own\ business
    | nearest\ name | a\ text(?!\ file)
    )(?!\w)"""
# A space in a phrase also matches a line break, even between two comment lines.
_SPACED = _PHRASES.replace(r"\ ", r"\s+(?:\#\s+)?")
PATTERN = re.compile(_SPACED, re.IGNORECASE | re.VERBOSE)


class Phrase(NamedTuple):
    path: str
    line: int
    phrase: str


def covered_files(paths: list[str]) -> list[str]:
    """Return the tracked files below `paths` that the rules cover, relative to the repository root."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [name for name in names if name not in EXEMPT and Path(name).suffix in SUFFIXES]


def find_phrases(text: str, path: str) -> Iterator[Phrase]:
    """Yield every phrase in `text`, even if a line break splits it."""
    for match in PATTERN.finditer(text):
        yield Phrase(path, text.count("\n", 0, match.start()) + 1, " ".join(match[1].split()))


def main() -> None:
    phrases = [
        phrase
        for name in covered_files(sys.argv[1:] or list(COVERED))
        for phrase in find_phrases((ROOT / name).read_text(errors="replace"), name)
    ]
    for path, line, phrase in phrases:
        print(f"{path}:{line}: {phrase}")
    print(f"{len(phrases)} phrases", file=sys.stderr)
    sys.exit(1 if phrases else 0)


if __name__ == "__main__":
    main()
