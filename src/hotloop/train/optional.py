"""The one way in for optional packages: imported at use, and a missing one says which extra installs it."""

from __future__ import annotations

import importlib
from typing import Any

from hotloop import errors


def require(module: str, what: str, extra: str = "train") -> Any:
    """Import an optional package.

    Args:
        module: its dotted name.
        what: what needs it, as the start of the message.
        extra: the extra of hotloop that installs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.missing_extra(what, extra, error) from error
