"""The language rules of CONTRIBUTING.md: no phrase of the table is in code, help, messages or pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_language.py"


def test_no_phrase_that_the_rules_replace_is_left() -> None:
    checked = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_a_phrase_is_found_with_its_line_also_across_a_line_break(tmp_path: Path) -> None:
    import runpy

    find_phrases = runpy.run_path(str(SCRIPT))["find_phrases"]
    text = "# the file is\n# no checkpoint\nthere is no file; it is no longer used; nobody knows\n"
    found = [(phrase.line, phrase.phrase) for phrase in find_phrases(text, "a.py")]
    assert found == [(1, "is # no"), (3, "nobody")]
