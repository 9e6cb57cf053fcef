"""Who may ask the server what: host names, the token, the cookie, the key, and the headers of each answer.

A browser sends the cookies of 127.0.0.1 to every port of it, so another server on this machine learns ours. The cookie
therefore only lets its holder look. What acts needs the key as well, which the page keeps in the storage of its own
port (``assets/key.js``) and sends in a header or a field. Both are handed over for the token, which is good once.
"""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
import secrets
import urllib.parse
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from hotloop.train import configure

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = "/static/"
"""Scripts and styles of the package: the same for everybody, so that they need no token."""
_ELSEWHERE = ("cross-site", "same-site")
"""What browsers say of a request that a page of another site, or of another port of this one, asks for."""
_NOT_OURS = (
    "A page that is not hotloop's has asked for this one. To see it, type hotloop's address into your browser, or use "
    "a bookmark."
)
_NOT_OUR_FORM = (
    "hotloop takes forms only from its own pages. Open the page by its link on hotloop's list of runs, and send the "
    "form again from there."
)
_NO_KEY = "This browser may look, not act. Open the last address that `hotloop ui` printed."
FORM = "hotloop.form"
"""The key of a request's scope that holds its checked form."""
_LARGEST = 2**20
"""Bytes of a form: settings are some kilobytes."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
# The browser follows no cross-site redirect with a strict cookie; a page that goes on by itself is of this site.
_WELCOME = """<!doctype html><html lang="en" data-key="{key}"><meta charset="utf-8"><link rel="icon" href="data:,">
<script src="/static/key.js"></script><meta http-equiv="refresh" content="0; url=/"><title>hotloop</title>
<p><a href="/">Go on to hotloop</a></p></html>"""


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclasses.dataclass
class Access:
    """The secrets that open one server, new at each start.

    Args:
        hosts: names that a request may be addressed to, beside numbers and ``localhost``.
        renewed: receives the next token once one was used.
        token: opens the server to a browser, once; it stands in the printed address.
        name: of the cookie: another port cannot overwrite a cookie whose name it does not know beforehand.
        session: the value of the cookie, which lets a browser look.
        key: lets a page act.
    """

    hosts: frozenset[str] = frozenset()
    renewed: Callable[[str], None] = lambda token: None  # noqa: ARG005 - nobody prints it
    token: str = dataclasses.field(default_factory=_secret, repr=False)
    name: str = dataclasses.field(default_factory=lambda: f"hotloop_{secrets.token_hex(4)}")
    session: str = dataclasses.field(default_factory=_secret, repr=False)
    key: str = dataclasses.field(default_factory=_secret, repr=False)

    def cookie(self, scheme: str) -> str:
        """Return the name of the cookie; browsers take ``__Host-`` over https alone, and then from no other host."""
        return f"__Host-{self.name}" if scheme == "https" else self.name

    def spend(self, given: str) -> bool:
        """Return whether a token opens the server; it does so once, and another takes its place."""
        if not _same(given, self.token):
            return False
        self.token = _secret()
        self.renewed(self.token)
        return True

    def knows(self, host: str) -> bool:
        """Return whether a request may be addressed to a name: a name of a stranger's may point to this machine."""
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Guard:
    """Answers what must not pass, and lets the rest through with its form read and checked.

    Args:
        app: answers the rest.
        access: who may ask.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        configure.runs_programs.set(False)  # a program judges its settings in a process of its own
        request = Request(scope, receive)
        refused = self._refusal(request)
        if refused is None and request.method not in ("GET", "HEAD"):
            refused = await self._read_form(request)
        await (refused or self.app)(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer for who may not ask, or the welcome for who brings the token."""
        if not self._addressed(request):
            return PlainTextResponse("This server answers to its own address only.", 421)
        if request.url.path.startswith(STATIC):
            return None
        # Also from another site: links to it are clicked in chats and opened from files, and nobody can guess it.
        if request.method == "GET" and self.access.spend(request.query_params.get("token", "")):
            return self._welcome(request)
        if request.headers.get("sec-fetch-site") in _ELSEWHERE:
            return PlainTextResponse(_NOT_OURS, 403)
        if _same(request.cookies.get(self.access.cookie(request.url.scheme), ""), self.access.session):
            return None
        return PlainTextResponse("Open the last address that `hotloop ui` printed: each is good once.", 401)

    def _welcome(self, request: Request) -> Response:
        """Hand a browser what lets it look and act."""
        welcome = HTMLResponse(_WELCOME.format(key=self.access.key), headers={"cache-control": "no-store"})
        scheme = request.url.scheme
        name, secure = self.access.cookie(scheme), scheme == "https"
        welcome.set_cookie(name, self.access.session, httponly=True, samesite="strict", path="/", secure=secure)
        return welcome

    def _addressed(self, request: Request) -> bool:
        try:
            return self.access.knows(request.headers.get("host", ""))
        except ValueError:  # brackets that do not close, and the like
            return False

    async def _read_form(self, request: Request) -> Response | None:
        """Read a form into the request's scope; return the answer to one that is forged or too large."""
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return PlainTextResponse(_NOT_OUR_FORM, 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST:
                return PlainTextResponse("This form is too large.", 413)
        try:
            form = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
        except ValueError:
            return PlainTextResponse("This form cannot be read: expected text in UTF-8.", 400)
        field = form.pop("hotloop-key", "")
        if not _same(request.headers.get("x-hotloop-key", field), self.access.key):
            return PlainTextResponse(_NO_KEY, 403)
        request.scope[FORM] = form
        return None


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _with_headers(send: Send) -> Send:
    """Return a sender that puts the headers of every answer in, where an answer has none of its own."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sender
