"""The values of overrides, ``a.b=c``: as YAML has them; what YAML cannot read is text."""

from __future__ import annotations

import json
from typing import Any

from hotloop.train import conf_files
from hotloop.train.optional import require


def parse(text: str) -> Any:
    """Return the value of a text: ``3``, ``1e-3``, ``null``, ``'quoted'``, ``[1,2]``, ``{a: b}`` or text itself."""
    plain = text.strip()
    if not plain or " #" in plain:  # no comment
        return plain
    try:
        return require("yaml", "Reading settings").load(plain, Loader=conf_files.loader())
    except require("yaml", "Reading settings").YAMLError:
        return plain


def written(value: Any) -> str:
    """Return a value as `parse` reads it back."""
    return json.dumps(value, ensure_ascii=False, default=list)
