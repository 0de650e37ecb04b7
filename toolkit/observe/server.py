"""The server of `toolkit dash`. It only reads, and answers only requests to this host; on TCP only those with the token."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

__all__ = ["application"]

WEB = Path(str(files("toolkit.observe"))) / "web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; img-src data:"
)
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; base-uri 'none'; frame-ancestors 'none'", "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip
# A run id, "" for all runs, and metrics -> events by name, and whether they are final; None for an unknown run.
Look = Callable[[str, Sequence[str]], tuple[Mapping[str, Any], bool] | None]


def application(look: Look, token: str = "", period_s: float = 5.0) -> Callable[..., Any]:
    """Return the ASGI application. With a token, a browser must open `/?token=TOKEN` once."""

    async def events(request: Request) -> Response:
        asked = request.query_params.get("run", ""), request.query_params.getlist("metric")
        first = await run_in_threadpool(look, *asked)

        async def stream() -> AsyncIterator[str]:
            shown, sent = first, dict[str, str]()
            while shown is not None:
                for name, value in shown[0].items():
                    if (data := json.dumps(value, allow_nan=False)) != sent.get(name):
                        sent[name] = data
                        yield f"event: {name}\ndata: {data}\n\n"
                if shown[1]:
                    break
                await asyncio.sleep(period_s)
                shown = await run_in_threadpool(look, *asked)
            yield "event: end\ndata: {}\n\n"

        return StreamingResponse(stream(), 404 if first is None else 200, media_type="text/event-stream")

    page, static = Route("/", lambda _: FileResponse(WEB / "page.html")), Mount("/static", StaticFiles(directory=WEB))
    app = Starlette(routes=[page, static, Route("/events", events)])
    # A browser sends cookies to all ports of a host, so the cookie is not the token.
    cookie, session = f"toolkit-{secrets.token_hex(4)}", secrets.token_hex(32)

    def rejection(request: Request) -> Response | None:
        host, query = request.headers.get("host", ""), request.query_params
        if host.partition(":")[0] not in ("localhost", "127.0.0.1"):  # DNS rebinding
            return PlainTextResponse("expected localhost or 127.0.0.1 as host", 400)
        if request.method not in ("GET", "HEAD") and urlsplit(request.headers.get("origin", "")).netloc != host:
            return PlainTextResponse("expected a request of this page", 403)
        if not token or _same(request.cookies.get(cookie, ""), session):
            return None
        if not _same(query.get("token", ""), token):
            return PlainTextResponse("open the URL that `toolkit dash` printed", 401)
        response = RedirectResponse("/?" + request.url.remove_query_params("token").query, 303)
        response.set_cookie(cookie, session, httponly=True, samesite="strict")
        return response

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (rejection(Request(scope)) or app)(scope, receive, send_with_headers)

    return guarded


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
