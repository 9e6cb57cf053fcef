"""Which parts of a module are taken out of it or called, by whatever code: by functions of torch's, which are heard."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType


def _code_of(name: str) -> CodeType | None:
    """Give the code of a method of modules; None where somebody has put there what is no function of Python's."""
    code: CodeType | None = getattr(inspect.unwrap(getattr(torch.nn.Module, name)), "__code__", None)
    return code


_ATTRIBUTE, _CALL, _CHILDREN, _ALL = map(_code_of, ("__getattr__", "__call__", "named_children", "named_modules"))
_CODES = [one for one in (_ATTRIBUTE, _CALL, _CHILDREN, _ALL) if one is not None]
PARTS_BY = frozenset(map(id, _CODES))
"""Identities of the code by which a part is taken or called."""
ALL_KNOWN = len(_CODES) == 4  # noqa: PLR2004 - each of them
_FOR_OTHERS = frozenset({"children", "named_children", "modules", "named_modules", "apply"})
"""Methods that hand the parts themselves to who asks; others of torch's (parameters, train) go through them for it."""


def parts_taken(frame: FrameType) -> list[torch.nn.Module]:
    """Give the parts that a function of torch's, which begins, is asked for; none where hotloop itself asks."""
    module: Any = frame.f_locals.get("self")
    outermost: FrameType = frame
    while outermost.f_back is not None and outermost.f_back.f_code.co_filename == frame.f_code.co_filename:
        outermost = outermost.f_back
    asks = outermost.f_back.f_globals.get("__name__", "") if outermost.f_back is not None else ""
    if asks.startswith("hotloop."):
        return []
    if frame.f_code is _CALL:
        return [module]
    if frame.f_code is _ATTRIBUTE:
        part = vars(module).get("_modules", {}).get(frame.f_locals.get("name"))
        return [part] if part is not None else []
    return list(module.modules()) if outermost.f_code.co_name in _FOR_OTHERS else []
