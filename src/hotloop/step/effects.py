"""What a function that is called in C, or that saves, does past a step's tensors; a replay runs no Python, so not that.

A call is told by its name and by what it belongs to: what it is handed is not to be seen from outside.
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import types
from typing import Any

WRITE_OUTSIDE = "return what has to be noted, and write it outside the step: a replay runs no Python"
DRAW_FROM_TORCH = (
    "draw from torch's own stream, without generator=: a recording takes that one along, and a replay makes no other"
)
_DO_OUTSIDE = "do it outside the step: a replay runs no Python"
_ASK_OUTSIDE = "read it outside the step, and hand the step what it needs as a tensor: a replay runs no Python"

_WRITES = frozenset({"write", "writelines", "writerow", "writerows"})
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_SAVERS = {
    ("torch", "save"): "f",
    ("numpy", "save"): "file",
    ("numpy", "savez"): "file",
    ("numpy", "savez_compressed"): "file",
    ("numpy", "savetxt"): "fname",
    ("safetensors", "save_file"): "filename",
    ("PIL", "save"): "fp",
    ("pandas", "to_csv"): "path_or_buf",
}
"""What is well known to write a file, by package and function, and the argument that names the file. A library may
write others without being asked: what it has worked out for the next time."""
_SAVER_NAMES = frozenset(name for _, name in _SAVERS)


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a call does: why a step that makes it is not captured, and what to do.

    ``said``: it is only said, as a print is, and keeps no step from being captured. ``once``: it may not be done twice.
    ``direct``: it counts where the program's own code makes the call, and not where Python's makes it for that.
    """

    reason: str
    hint: str = ""
    said: bool = False
    once: bool = True
    direct: bool = False


def _table() -> dict[tuple[str, str], Effect]:
    """Give what is known of calls in C, by the module that their owner is or is from, and by name."""
    known: dict[tuple[str, str], Effect] = {}
    for system in ("posix", "nt"):
        for name in ("write", "writev", "pwrite", "pwritev", "sendfile", "truncate", "ftruncate"):
            known[system, name] = Effect(f"the step writes to a file (os.{name})", WRITE_OUTSIDE)
        for name in ("remove", "unlink", "rename", "replace", "mkdir", "rmdir", "link", "symlink"):
            known[system, name] = Effect(f"the step changes files (os.{name})", _DO_OUTSIDE)
        random = "the step draws from the system's random numbers (os.urandom)"
        known[system, "urandom"] = Effect(random, DRAW_FROM_TORCH, once=False)
    for place in (
        ("posix", "system"),
        ("nt", "system"),
        ("_posixsubprocess", "fork_exec"),
        ("_winapi", "CreateProcess"),
    ):
        known[place] = Effect("the step starts a program", _DO_OUTSIDE)
    known["_pickle", "dump"] = Effect("the step writes to a file or a buffer (pickle.dump)", WRITE_OUTSIDE)
    known["numpy", "tofile"] = Effect("the step writes to a file (tofile)", WRITE_OUTSIDE, direct=True)
    for name in ("execute", "executemany", "executescript"):
        known["sqlite3", name] = Effect(f"the step asks a database ({name})", _DO_OUTSIDE)
    for name in ("send", "sendall", "sendto", "recv", "recv_into"):
        for home in ("socket", "_socket"):
            known[home, name] = Effect(f"the step talks to another program ({name})", _DO_OUTSIDE)
    clocks = [
        ("time", name + by) for name in ("time", "perf_counter", "monotonic", "process_time") for by in ("", "_ns")
    ]
    for place in (*clocks, ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")):
        reason = f"the step reads the clock ({place[1]})"
        known[place] = Effect(reason, _ASK_OUTSIDE, once=False, direct=True)
    return known


_KNOWN = _table()


def effect_of(name: str, owner: Any) -> Effect | None:
    """Give what a call in C does, by its name and what it belongs to; None where that is nothing, or not known."""
    if name in _WRITES and is_standard_stream(owner):
        return Effect(f"{name} to a standard stream", said=True)
    if name in _WRITES and (is_file(owner) or type(owner).__module__ == "_csv"):
        return Effect(f"the step writes to a file ({name})", WRITE_OUTSIDE)
    if isinstance(owner, types.ModuleType):
        home = owner.__name__
    else:
        home = (owner if isinstance(owner, type) else type(owner)).__module__
    return _KNOWN.get((home, name))


def saves_to(frame: types.FrameType) -> str:
    """Name the function of a library that a frame has just begun and that will write a file; empty for all others."""
    name = frame.f_code.co_name
    if name not in _SAVER_NAMES:
        return ""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    target = frame.f_locals.get(_SAVERS.get((package, name), ""))
    return f"{package}.{name}" if isinstance(target, str | os.PathLike) or is_file(target) else ""


def is_standard_stream(one: Any) -> bool:
    """Tell whether a stream is the program's output, or its buffer."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(one is stream or one is getattr(stream, "buffer", stream) for stream in streams if stream is not None)


def is_file(one: Any) -> bool:
    """Tell whether a stream writes to a file, or to another process."""
    return isinstance(one, _FILES) and not is_standard_stream(one)
