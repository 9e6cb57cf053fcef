"""What a program compiles itself (``torch.compile(optimizer.step)``), run uncompiled."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_TORCH = Path(torch.__file__).parent
_COMPILES_ITSELF = tuple(str(_TORCH / folder) for folder in ("_higher_order_ops", "nn/attention"))
"""Code of torch that compiles a part of itself in eager, too: ``torch.cond``, ``flex_attention``."""


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as plain Python while the block runs.

    ``torch.cond`` and its like compile themselves at each call, also in eager, and lose gradients without that. They
    go on to do so.
    """

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            return _compiled_all_the_same(made) if _is_torchs_own(_caller()) else made

        return compile_

    with replaced(torch, "compile", make), torch.compiler.set_stance("force_eager"):
        yield


def _caller() -> FrameType | None:
    """Return the frame that calls ``torch.compile``, past its replacement and the dispatcher of `replaced`."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    return frame


def _compiled_all_the_same(made: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("default"):
            return made(*args, **kwargs)

    return call


def _is_torchs_own(caller: FrameType | None) -> bool:
    return caller is not None and caller.f_code.co_filename.startswith(_COMPILES_ITSELF)
