"""The web page of runs: as files that the server sends, or as one self-contained file."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

__all__ = ["MEDIA_TYPES", "report_page", "web_file"]

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def web_file(name: str) -> str:
    """Return the contents of a file of the page."""
    return files("toolkit.observe").joinpath("web", name).read_text(encoding="utf-8")


def report_page(data: dict[str, Any]) -> str:
    """Return the page with its scripts, styles and data; its policy permits these scripts and no request."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        content = web_file(match[1] or match[2])
        kind = "style" if match[1] else "script"
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{content}</{kind}>"

    page = re.sub(r'<link rel="stylesheet" href="static/(.+)">|<script src="static/(.+)"></script>', inline, web_file("page.html"))
    sources = "; ".join(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items())
    policy = f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; {sources}\">"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}', 1)
    return page.replace("<script>", f'<script type="application/json" id="data">{embedded}</script>\n<script>', 1)
