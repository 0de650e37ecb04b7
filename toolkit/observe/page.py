"""The web page of a run as one self-contained file."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

__all__ = ["report_page"]

_PART = re.compile(r'<(link)[^>]* href="static/(.+)">|<(script) src="static/(.+)"></script>')


def report_page(data: dict[str, Any]) -> str:
    """Return the page with its scripts, styles and data. Its policy permits no other scripts, and no requests."""
    web = files("toolkit.observe") / "web"
    sources = {"script": "script-src", "style": "style-src"}

    def inline(match: re.Match[str]) -> str:
        kind, content = "script" if match[3] else "style", (web / (match[2] or match[4])).read_text(encoding="utf-8")
        sources[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        return f"<{kind}>{content}</{kind}>"

    page = _PART.sub(inline, (web / "page.html").read_text(encoding="utf-8"))
    policy = f"default-src 'none'; img-src data:; {'; '.join(sources.values())}"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    return page.replace("<script>", f'<script type="application/json" id="data">{embedded}</script>\n<script>', 1)
