"""The server of `toolkit dash`: it only reads, and answers only requests to this host, on TCP only those with the token."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.observe.page import MEDIA_TYPES, web_file

__all__ = ["application"]

PERIOD_S = 5.0
FILES = ("dash.js", "dash.css", "uPlot.iife.min.js", "uPlot.min.css")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
}  # fmt: skip


# A run id, "" for all runs, and metrics -> events by name, and whether they are final; None for an unknown run.
Look = Callable[[str, Sequence[str]], tuple[Mapping[str, Any], bool] | None]


def application(look: Look, token: str = "", period_s: float = PERIOD_S) -> ASGIApp:
    """Return the application. With a token, a browser must open `/?token=TOKEN` once."""

    def page(request: Request) -> Response:
        return Response(web_file("page.html"), media_type="text/html")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("not found", 404)
        return Response(web_file(name), media_type=MEDIA_TYPES[name.rpartition(".")[2]])

    async def events(request: Request) -> Response:
        run, metrics = request.query_params.get("run", ""), request.query_params.getlist("metric")
        first = await run_in_threadpool(look, run, metrics)
        if first is None:
            return PlainTextResponse("not found", 404)

        async def stream() -> AsyncIterator[str]:
            sent: dict[str, str] = {}
            shown = first
            while shown is not None:
                for name, value in shown[0].items():
                    if (data := json.dumps(value, allow_nan=False)) != sent.get(name):
                        sent[name] = data
                        yield f"event: {name}\ndata: {data}\n\n"
                if shown[1]:
                    break
                await asyncio.sleep(period_s)
                shown = await run_in_threadpool(look, run, metrics)
            yield "event: end\ndata: {}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    routes = [Route("/", page), Route("/static/{name}", static), Route("/events", events)]
    return _Guard(Starlette(routes=routes), token)


class _Guard:
    """Refuses requests of other sites and without the token, and adds headers to all responses."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._session = secrets.token_urlsafe(32)  # cookies are shared by all ports of a host, so it is not the token
        self._cookie = f"toolkit-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        if host.rpartition(":")[0] not in ("localhost", "127.0.0.1") and host not in ("localhost", "127.0.0.1"):
            return PlainTextResponse("expected localhost or 127.0.0.1 as host", 400)  # DNS rebinding
        if request.method not in ("GET", "HEAD") and urlsplit(origin).netloc != host:
            return PlainTextResponse("expected a request of this page", 403)
        if not self._token:
            return None
        if _same(request.query_params.get("token", ""), self._token):
            response = RedirectResponse(f"/?{request.url.remove_query_params('token').query}", 303)
            response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
            return response
        if _same(request.cookies.get(self._cookie, ""), self._session):
            return None
        return PlainTextResponse("open the URL that `toolkit dash` printed", 401)


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
