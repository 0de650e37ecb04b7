"""Strings that a shell, template, parser, terminal or scheduler would treat as more than a plain string.

Each of them would make a file CANARY if any shell ever read it as a command.
"""

from __future__ import annotations

import json
from pathlib import Path

from whole_checkpoints import make_whole_checkpoint

VALUES = {
    "empty": "",
    "blank": " ",
    "blanks": "  a  b  ",
    "tab": "a\tb",
    "newline": "a\nb",
    "last newline": "a\n",
    "carriage return": "a\rb\r\n",
    "other line ends": "a\x0b\x0c\x1c\x85\u2028\u2029b",
    "single quote": "it's",
    "double quote": 'a "b" c',
    "both quotes": "'\"'\"'",
    "substitution": "$(touch CANARY)",
    "old substitution": "`touch CANARY`",
    "variable": "$HOME ${HOME} $1 $@ $? $$",
    "arithmetic": "$((1+1)) $[1+1]",
    "semicolon": "a; touch CANARY",
    "and": "a && touch CANARY || touch CANARY",
    "pipe and background": "a | touch CANARY & touch CANARY",
    "redirection": "a > CANARY < CANARY <(touch CANARY)",
    "out of single quotes": "'; touch CANARY; '",
    "out of double quotes": '"; touch CANARY; "',
    "command on a line of its own": "a\ntouch CANARY\n",
    "end of the here-document": "TOOLKIT_JOB",
    "behind the here-document": "\nTOOLKIT_JOB\ntouch CANARY\n",
    "another here-document": "<<'EOF'\nEOF\ntouch CANARY\n",
    "directive": "\n#SBATCH --wrap='touch CANARY'\n",
    "directive alone": "#SBATCH --hold",
    "comment": "a # b #c",
    "globs": "* ? [a-z] {a,b} !(a) **/*",
    "history": "!! !$ ^a^b^",
    "home": "~",
    "home of root": "~root/x",
    "path out": "../../../../etc/passwd",
    "option": "-x",
    "long option": "--help",
    "end of options": "--",
    "dash": "-",
    "backslashes": "\\a\\\\b\\",
    "escaped letters": "\\n\\t\\x1b\\u0041\\0",
    "Slurm's patterns": "%j %A_%a %x %N %% %",
    "format": "%s%n %(x)s {0} {x} {",
    "jinja": "{{ 7 * 7 }} {% raw %} {# x #}",
    "equals": "a=b=c",
    "only equals": "=",
    "TOML true": "true",
    "TOML number": "0x10",
    "TOML float": "nan",
    "TOML date": "1979-05-27",
    "TOML list": '[1, "a"]',
    "TOML table": "{ a = 1 }",
    "TOML text": '"""a"""',
    "more TOML": '1\n[job]\nentry = ["touch", "CANARY"]',
    "JSON": 'null", "x": [1], "y": "',
    "YAML": "no",
    "YAML object": "!!python/object/apply:os.system [touch CANARY]",
    "separators": "a|b,c;d:e\x1ff\x1eg",
    "non-ASCII": "Grüße, 日本語, Ελληνικά",
    "beyond 16 bits": "👩\u200d👩\u200d👧 𝕏 \U0010ffff",
    "combining": "e\u0301 \u00e9 \u1112\u1161\u11ab",
    "right to left": "\u202etxt.exe \u05d0\u05d1 \u2066x\u2069",
    "invisible": "\ufeff\u200b\u00ad\u2060x",
    "terminal colours": "\x1b[31mred\x1b[0m",
    "terminal title": "\x1b]0;owned\x07",
    "terminal clear": "\x1b[2J\x1b[1;1H\x1bc",
    "terminal in one letter": "\x9b31m\x9d0;x\x9c",
    "bell, backspace, delete": "a\x07b\x08c\x7f",
    "all control characters": "".join(map(chr, range(1, 32))),
    "long": "x" * 130_000,
}

# Names of folders. All of them are taken for a job file's folder.
FOLDERS = [
    "two  blanks ", "tab\tand\nnewline", "it's \"quoted\"", "$(touch CANARY)", "`touch CANARY`", "; touch CANARY",
    "&& touch CANARY #", "$HOME", "*?[a]{b,c}", "~", "-x", "--", "%j %A %a %x %%", "#SBATCH --hold", "back\\slash",
    "esc\x1b[31m", "{{ 7 * 7 }}", "a=b", "TOOLKIT_JOB", "Grüße 日本語 e\u0301 \u202e", "x" * 200,
]  # fmt: skip
# Slurm opens its log in a run's folder, and knows no way to write these.
NO_RUNS = ("tab\tand\nnewline", "back\\slash", "esc\x1b[31m")

# A program that says what has reached it, byte for byte.
SHOW = """
import json, os, sys
job = json.load(open(os.environ["TOOLKIT_RESOLVED_JOB"], encoding="utf-8"))
print(json.dumps({
    "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
    "environment": {os.fsencode(name).hex(): os.fsencode(value).hex() for name, value in os.environ.items()},
    "args": job["args"], "source": job["checkpoint"]["source"], "paths": job["data"]["paths"],
}))
"""


def toml(value: str) -> str:
    """`value` as a TOML string, with an escape for every character that is not an ASCII letter or digit."""
    return '"' + "".join(letter if letter.isalnum() and letter.isascii() else f"\\U{ord(letter):08x}" for letter in value) + '"'  # fmt: skip


def hexed(values: dict[str, str]) -> dict[str, str]:
    """Names and values as SHOW prints an environment."""
    return {name.encode().hex(): value.encode().hex() for name, value in values.items()}


def variables(prefix: str = "V") -> dict[str, str]:
    """Each value under a variable's name."""
    return {f"{prefix}{number}": value for number, value in enumerate(VALUES.values())}


def write_job(folder: Path, python: str, *, tables: str = "") -> Path:
    """A job whose words, variables and arguments are all of these values, with the program that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "show.py").write_text(SHOW)
    words = ", ".join(map(toml, [python, str(folder / "show.py"), *VALUES.values()]))
    table = ", ".join(f"{name} = {toml(value)}" for name, value in variables().items())
    arguments = "\n".join(f"{toml(name)} = {toml(value)}" for name, value in VALUES.items())
    make_whole_checkpoint(folder, 1, name=VALUES["substitution"])  # what is none would be refused
    (folder / "1 2 c {a,b} !(a) 3" / "text").mkdir(parents=True)  # so would globs that match nothing
    path = folder / "hostile.toml"
    path.write_text(
        f'[job]\nname = "hostile"\nentry = [{words}]\n{tables}\n[env]\nvars = {{ {table} }}\n'
        f"[checkpoint]\nsource = {toml(VALUES['substitution'])}\n"
        f"[data]\npaths = [{toml(VALUES['globs'])}]\n[args]\n{arguments}\n"
    )
    return path


def check_shown(text: str, argv: list[str] | None = None, environment: dict[str, str] | None = None) -> None:
    """What a rank of `write_job` printed is what was written, byte for byte."""
    shown = json.loads(text)
    wanted = [*VALUES.values(), *(argv or [])]
    assert shown["argv"] == [value.encode().hex() for value in wanted]
    given = hexed(variables() | (environment or {}))
    assert {name: shown["environment"].get(name) for name in given} == given
    assert shown["args"] == VALUES
    assert (shown["source"], shown["paths"]) == (VALUES["substitution"], [VALUES["globs"]])


def canaries(*folders: Path) -> list[Path]:
    """Files that only a shell that read a value can have made."""
    return [path for folder in folders for path in folder.rglob("CANARY*")]
