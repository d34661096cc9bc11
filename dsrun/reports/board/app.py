"""The board's web application (Starlette): addresses, and who may ask.

It answers GET and HEAD alone. A page of another site must not read it through the browser: the Host has to be the
loopback's (DNS rebinding), and nothing allows other origins. Another user of the machine must not read it either, who
can reach every port of the loopback address: the address that is printed has a token, which becomes a cookie.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from dsrun.errors import DsrunError
from dsrun.reports.board.known_runs import KnownRuns
from dsrun.reports.board.views import MOST_COMPARED, Views
from dsrun.reports.figures import AXES
from dsrun.reports.page import POLICY, render

HOSTS = ["127.0.0.1", "localhost"]
TABLE_EVERY_S, RUN_EVERY_S = 2, 4
"""Seconds between two requests of an open page."""
BOARD_POLICY = f"{POLICY}; connect-src 'self'; form-action 'self'; frame-ancestors 'none'"
"""The board's pages ask it for what is new, too."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Answer = Callable[[Request], Awaitable[Response]]


class TokenMiddleware(BaseHTTPMiddleware):
    """Lets in who knows the token: from the address once, then from the cookie."""

    def __init__(self, app: Any, *, token: str, cookie: str) -> None:
        super().__init__(app)
        self._token, self._cookie = token, cookie

    async def dispatch(self, request: Request, call_next: Answer) -> Response:
        """The answer, or a refusal."""
        token = request.query_params.get("token")
        if token is not None and self._is_right(token):
            # A path that begins with two slashes would be another host's address.
            answer: Response = RedirectResponse("/" + request.url.path.lstrip("/\\"), status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        elif self._is_right(request.cookies.get(self._cookie, "")):
            answer = await call_next(request)
        else:
            answer = PlainTextResponse(
                "Open the address that `dsrun board` printed: it ends in the token.\n", status_code=403
            )
        answer.headers.update(HEADERS)
        return answer

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode("utf-8", "replace"), self._token.encode())


def make_app(runs: KnownRuns, token: str, port: int = 0) -> Starlette:
    """The board of some runs. Raises DsrunError where their folder is not there."""
    views = Views(runs)
    # Templates are compiled and fonts are found now, so that the first answer is as fast as the others.
    _page("board.html.j2", every_s=TABLE_EVERY_S, title="", **views.table())

    def table(request: Request) -> Response:
        values = views.table()
        if "part" in request.query_params:
            return _part(request, render("board_table_body.html.j2", **values))
        return _page("board.html.j2", every_s=TABLE_EVERY_S, title="dsrun board", **values)

    def run(request: Request) -> Response:
        by, name = _axis(request), runs.name_of(request.path_params["key"])
        body = views.run(name, by) if name is not None else None
        if body is None:
            return _missing()
        if "part" in request.query_params:
            return _part(request, body)
        return _page("board_page.html.j2", every_s=RUN_EVERY_S, title=name, body=body)

    def compare(request: Request) -> Response:
        keys = request.query_params.getlist("run")
        names = [name for key in keys if (name := runs.name_of(key)) is not None]
        if len(names) < 2:
            return _page("board_page.html.j2", every_s=0, title="Compare runs", body="", note=TOO_FEW)
        body = views.comparison(names, _axis(request))
        if "part" in request.query_params:
            return _part(request, body)
        return _page("board_page.html.j2", every_s=RUN_EVERY_S, title="Compare runs", body=body)

    async def failed(_: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, DsrunError) else 500
        return PlainTextResponse(f"dsrun: {error}\n", status_code=status)

    return Starlette(
        routes=[Route("/", table), Route("/run/{key}", run), Route("/compare", compare)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
            Middleware(TokenMiddleware, token=token, cookie=f"dsrun-board-{port}"),
        ],
        exception_handlers={DsrunError: failed},
    )


TOO_FEW = f"Choose two runs in the table, or more (up to {MOST_COMPARED}), and compare them."


def _axis(request: Request) -> str:
    by = request.query_params.get("by", "step")
    return by if by in AXES else "step"


def _page(template: str, **values: Any) -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {"Content-Security-Policy": BOARD_POLICY.format(nonce=nonce)}
    return HTMLResponse(render(template, nonce=nonce, note=values.pop("note", ""), **values), headers=headers)


def _part(request: Request, text: str) -> Response:
    """The new content of an open page; 304 where it shows that already."""
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(text, headers={"ETag": tag})


def _missing() -> Response:
    return PlainTextResponse("The board has no such run (any more).\n", status_code=404)
