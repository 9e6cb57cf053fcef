"""Documents that a run's key signs: whoever else writes into a cluster's logs or folders cannot make one."""

from __future__ import annotations

import hmac
import json
from typing import Any

from hotloop.errors import DataError

_MARK = "hotloop-signed "


def dumps(key: str, document: Any) -> str:
    """Return a document as one line, with its signature."""
    body = json.dumps(document)
    return f"{_MARK}{_signature(key, body)} {body}"


def loads(key: str, text: str) -> Any:
    """Return the last document in a text that this key signed.

    Raises:
        DataError: there is none.
    """
    for line in reversed(text.splitlines()):
        found, _, rest = line.partition(_MARK)
        signature, _, body = rest.partition(" ")
        if not found and hmac.compare_digest(signature.encode(), _signature(key, body).encode()):
            return json.loads(body)
    raise DataError("it has nothing that the run's key signed")


def is_signed(line: str) -> bool:
    """Return whether a line of a log is for hotloop, not for a reader."""
    return line.startswith(_MARK)


def _signature(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(), "sha256").hexdigest()
