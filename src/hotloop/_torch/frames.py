"""The code that a running operation belongs to, by its Python stack: compiled code, a module, the user's code."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from hotloop._torch.graphs import is_own_file, is_user_file

if TYPE_CHECKING:
    from types import CodeType, FrameType

_COMPILED = ("_functorch", "_inductor")
_TRACING = ("_dynamo", "convert_frame.py")
_CHECKPOINT = torch.utils.checkpoint.__file__
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(torch.__file__), name, "")  # noqa: PTH118, PTH120 - compared as strings
    for name in ("distributions", "nn", "optim", "amp")
)
"""Folders of torch whose Python reads values for reasons of its own: checks of arguments, mostly."""
_CALL = torch.nn.Module.__call__.__code__.co_filename
_CALLS = ("_call_impl", "_call_module")
_SCALED_STEP = torch.amp.GradScaler.step.__code__


@dataclasses.dataclass(frozen=True)
class Stack:
    """A Python stack, read from the inside out.

    Args:
        compiled: whether it runs in compiled code.
        tracing: whether it runs while dynamo traces, and is no work of the step.
        own: file and line of the innermost frame of the program itself; where there is none, of an installed package.
        reader: file and line of the innermost frame of the program, of a package, or of a library in torch
            (distributions, nn, optim, amp); what torch has for every operation is passed over.
        modules: the modules that are being called, the outermost first.
        checkpointed: file and line of the call of ``torch.utils.checkpoint``, with the modules called inside it.
        scaling: whether it runs in the ``step`` of a GradScaler.
        in_checkpoint: whether it runs in ``torch.utils.checkpoint``, also in a thread of autograd's, whose stack has
            none of the program's frames below.
    """

    compiled: bool
    tracing: bool
    own: tuple[str, int] | None
    reader: tuple[str, int] | None
    modules: tuple[torch.nn.Module, ...]
    checkpointed: tuple[tuple[str, int], tuple[torch.nn.Module, ...]] | None = None
    scaling: bool = False
    in_checkpoint: bool = False


def stack_of(frame: FrameType | None) -> Stack:
    """Read the stack that ends in a frame."""
    place: tuple[str, int] | None = None
    own: tuple[str, int] | None = None
    reader: tuple[str, int] | None = None
    modules: list[Any] = []
    inside: tuple[Any, ...] | None = None
    checkpointed = None
    compiled = tracing = scaling = False
    while frame is not None:
        kind = _kind(frame.f_code)
        compiled = compiled or kind == "compiled"
        tracing = tracing or kind == "tracing"
        scaling = scaling or kind == "scaling"
        if kind == "call":
            called = frame.f_locals.get("self", frame.f_locals.get("module"))
            modules += [called] if isinstance(called, torch.nn.Module) else []
        elif kind == "checkpoint":
            inside = tuple(reversed(modules))
        elif kind == "library":
            reader = reader or (frame.f_code.co_filename, frame.f_lineno)
        elif kind in ("user", "own"):
            here = (frame.f_code.co_filename, frame.f_lineno)
            reader = reader or here
            place, own = place or here, own or (here if kind == "own" else None)
            if inside is not None and checkpointed is None:
                checkpointed = (here, inside)
        frame = frame.f_back
    inside_one = inside is not None
    return Stack(compiled, tracing, own or place, reader, tuple(reversed(modules)), checkpointed, scaling, inside_one)


def shown(place: tuple[str, int]) -> str:
    """Return a place as text; one in a library of torch's by its path in torch: ``torch/nn/utils/clip_grad.py:109``."""
    file, line = place
    home = os.path.dirname(os.path.dirname(torch.__file__))  # noqa: PTH120 - compared as strings
    return f"{os.path.relpath(file, home) if file.startswith(_LIBRARIES) else file}:{line}"


@functools.cache
def _kind(code: CodeType) -> str:
    """Classify the frames of a code object; an empty text for most, which do not matter."""
    file = code.co_filename
    if file.startswith(_compiled_folders()) or "torchinductor_" in file:
        return "compiled"
    if file.endswith(os.path.join(*_TRACING)):  # noqa: PTH118 - compared as strings, for every operation
        return "tracing"
    if file == _CHECKPOINT or code is _SCALED_STEP:
        return "checkpoint" if file == _CHECKPOINT else "scaling"
    if code.co_name in _CALLS and (file == _CALL or "hotloop" in file):
        return "call"
    if file.startswith(_LIBRARIES):
        return "library"
    user = "user" if is_user_file(file) else ""
    return "own" if is_own_file(file) else user


@functools.cache
def _compiled_folders() -> tuple[str, ...]:
    """Return the folders of torch's own run-time of compiled code, and of the code that Inductor wrote."""
    home = os.path.dirname(torch.__file__)  # noqa: PTH120 - compared as strings
    folders = [os.path.join(home, name, "") for name in _COMPILED]  # noqa: PTH118
    if where := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        folders += [os.path.join(where, ""), os.path.join(os.path.realpath(where), "")]  # noqa: PTH118
    return tuple(folders)
