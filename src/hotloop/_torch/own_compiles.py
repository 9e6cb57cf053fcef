"""Runs what a program compiles itself (``torch.compile(optimizer.step)``) as plain Python for a while."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_TORCH = Path(torch.__file__).parent
_COMPILES_ITSELF = tuple(str(_TORCH / folder) for folder in ("_higher_order_ops", "nn/attention"))
"""Code of torch that compiles a part of itself in eager, too: ``torch.cond``, ``flex_attention``."""


def _has_dynamo() -> bool:
    return "torch._dynamo" in sys.modules


@contextlib.contextmanager
def uncompiled(*, attention: bool = False) -> Iterator[list[None]]:
    """Run compiled functions as plain Python while the block runs; yield a list with an item for each call of one.

    ``torch.cond`` and its like compile themselves at each call, also in eager, and lose gradients without that. They
    go on to do so.

    Args:
        attention: this holds for ``torch.compile(flex_attention)``, too. Uncompiled, that makes a number of each pair
            of tokens, which may be more than fits in memory; and it writes nothing that would have to be seen.
    """
    if not _has_dynamo():  # nothing is compiled, and a program that compiles nothing need not import it
        yield []
        return
    met: list[None] = []

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            return _compiled_all_the_same(made) if _is_torchs_own(_caller()) else made

        return compile_

    def stance() -> str:
        if not attention and _calls_torchs_own(_wrapper_above()):
            return ""
        met.append(None)
        return "force_eager"

    with replaced(torch, "compile", make), _stance_here(stance):
        yield met


class _Stance:
    """The compiler's stance, which torch keeps for the whole process: another in threads that ask for one."""

    lock = threading.Lock()

    def __init__(self, elsewhere: Any) -> None:
        self.elsewhere = elsewhere

    def asked(self) -> str:
        """Return the running thread's own stance, empty for the program's; `replaced` where a thread asks for one."""
        return ""

    @property
    def stance(self) -> str:
        """The name of the stance."""
        return self.asked() or str(self.elsewhere.stance)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["elsewhere"], name)


@contextlib.contextmanager
def _stance_here(stance: Callable[[], str]) -> Iterator[None]:
    """Set the compiler's stance in this thread alone while the block runs: it is asked for at each compiled call.

    ``torch.compiler.set_stance`` sets it for all threads. Another thread's ``torch.cond`` would train nothing
    meanwhile, and where two such blocks end in the order in which they began, all would stay eager for good.
    """
    try:
        set_stance = private("torch._dynamo.eval_frame:_set_stance")
        private("torch._dynamo.eval_frame:_stance")
    except CapabilityMissingError:
        with torch.compiler.set_stance(stance() or "default"):
            yield
        return
    with _Stance.lock:
        stands = set_stance.__globals__["_stance"]
        if not isinstance(stands, _Stance):  # stays there: in threads that ask for nothing, it is what stood before
            set_stance(_Stance(stands))
    with replaced(_Stance, "asked", lambda _: lambda _self: stance()):
        yield


def _caller() -> FrameType | None:
    """Return the frame that calls ``torch.compile``, past its replacement and the dispatcher of `replaced`."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    return frame


def _compiled_all_the_same(made: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _stance_here(str):
            return made(*args, **kwargs)

    return call


def _is_torchs_own(caller: FrameType | None) -> bool:
    return caller is not None and caller.f_code.co_filename.startswith(_COMPILES_ITSELF)


def _wrapper_above() -> FrameType | None:
    """Return the frame of torch's that asks which stance a compiled call is to have."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame


def _calls_torchs_own(wrapper: FrameType | None) -> bool:
    """Return whether what is called compiled is a function of torch's own, ``flex_attention`` say."""
    function = wrapper.f_locals.get("fn") if wrapper is not None else None
    code = getattr(inspect.unwrap(function) if function is not None else None, "__code__", None)
    return code is not None and code.co_filename.startswith(_COMPILES_ITSELF)
