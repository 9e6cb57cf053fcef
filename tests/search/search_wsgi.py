"""A request to a WSGI application, without a server."""

from __future__ import annotations

from wsgiref.util import setup_testing_defaults


def get(app, path):
    """Give the status and the body of a GET."""
    environ, seen = {"PATH_INFO": path}, []
    setup_testing_defaults(environ)
    body = b"".join(app(environ, lambda status, headers, error=None: seen.append(status)))
    return seen[0], body
