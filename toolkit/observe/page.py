"""The web page of a run as one self-contained file."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

__all__ = ["report_page"]


def report_page(data: dict[str, Any]) -> str:
    """Return the page with its scripts, styles and data. Its policy permits no other scripts, and no requests."""
    web, policy = files("toolkit.observe") / "web", {"script": "script-src", "style": "style-src"}

    def inline(match: re.Match[str]) -> str:
        kind, content = "script" if match[2] else "style", (web / (match[1] or match[2])).read_text(encoding="utf-8")
        policy[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        return f"<{kind}>{content}</{kind}>"

    page = (web / "page.html").read_text(encoding="utf-8")
    page = re.sub(r'<link rel="stylesheet" href="static/(.+)">|<script src="static/(.+)"></script>', inline, page)
    rule = f"default-src 'none'; img-src data:; {'; '.join(policy.values())}"
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{rule}">', 1)
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return page.replace("<script>", f'<script type="application/json" id="data">{embedded}</script>\n<script>', 1)
