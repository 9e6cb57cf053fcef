"""Who may ask the server what: host names, the token, cookies, forged forms, and the headers of each answer."""

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

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = "/static/"
"""Scripts and styles of the package: the same for everybody, so that they need no token."""
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
    "cache-control": "no-cache",
}
# The browser follows no cross-site redirect with a strict cookie; a page that goes on by itself is of this site.
_WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">
<link rel="icon" href="data:,"><title>hotloop</title><p><a href="/">Go on to hotloop</a></p></html>"""


@dataclasses.dataclass(frozen=True)
class Access:
    """What opens one server: its token, which is new at each start.

    Args:
        port: that it listens on; its cookie is named after it, since cookies are shared between ports.
        hosts: names that a request may be addressed to, beside numbers and ``localhost``.
    """

    port: int
    hosts: frozenset[str] = frozenset()
    token: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token."""
        return f"hotloop_{self.port}"

    @property
    def csrf(self) -> str:
        """What each form has to send back: no other site can read it from a page."""
        return hmac.new(self.token.encode(), b"csrf", "sha256").hexdigest()

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
    """Answers what must not pass, and lets the rest through with its form read and checked."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
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
        given = request.query_params.get("token", "")
        if request.method == "GET" and given and self._is_token(given):
            welcome = HTMLResponse(_WELCOME)
            welcome.set_cookie(self.access.cookie, self.access.token, httponly=True, samesite="strict", path="/")
            return welcome
        if self._is_token(request.cookies.get(self.access.cookie, "")):
            return None
        return PlainTextResponse("Open the address that `hotloop ui` printed: it ends in ?token=...", 401)

    def _addressed(self, request: Request) -> bool:
        try:
            return self.access.knows(request.headers.get("host", ""))
        except ValueError:  # brackets that do not close, and the like
            return False

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.access.token.encode())

    async def _read_form(self, request: Request) -> Response | None:
        """Read a form into the request's scope; return the answer to one that is forged or too large."""
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return PlainTextResponse("This form comes from another site.", 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST:
                return PlainTextResponse("This form is too large.", 413)
        try:
            form = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
        except ValueError:
            return PlainTextResponse("This form cannot be read: expected text in UTF-8.", 400)
        given = request.headers.get("x-csrf-token") or form.pop("csrf", "")
        form.pop("csrf", None)
        if not hmac.compare_digest(given.encode(), self.access.csrf.encode()):
            return PlainTextResponse("This form was not made by this server, or by an earlier one: load it anew.", 403)
        request.scope[FORM] = form
        return None


def _with_headers(send: Send) -> Send:
    """Return a sender that puts the headers of every answer in, where an answer has none of its own."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sender
