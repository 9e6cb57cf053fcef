"""Known side effects of C functions and library savers: file writes, clocks, sockets.

A replay runs no Python and would skip them, so a step that has one is not captured. A call is known by its name and its
owner; its arguments cannot be seen from outside.
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from hotloop.step.obstacle import DRAW_FROM_TORCH, RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITE_OUTSIDE = f"return what has to be noted, and write it outside the step: {RUNS}"
_DO_OUTSIDE = f"do it outside the step: {RUNS}"
_ASK_OUTSIDE = f"read it outside the step, and hand the step what it needs as a tensor: {RUNS}"

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
_LOADERS = {
    ("torch", "load"): "f",
    ("numpy", "load"): "file",
    ("numpy", "loadtxt"): "fname",
    ("PIL", "open"): "fp",
    ("pandas", "read_csv"): "filepath_or_buffer",
}
"""What is well known to write and to read a file, by package and function, and the argument that names the file. A
library may write and read others without being asked: what it has worked out for the next time."""
_ADDS = "add_"
_BOARDS = frozenset({"torch.utils.tensorboard.writer", "tensorboardX.writer"})
"""Whose writers have `add_scalar`, `add_image` and others."""
_TRACKERS = {
    "update": frozenset({"tqdm.std"}),
    "put": frozenset({"multiprocessing.queues"}),
    "log": frozenset({"wandb.sdk.wandb_run"}),
    "log_metric": frozenset({"mlflow.tracking.fluent"}),
    "log_metrics": frozenset({"mlflow.tracking.fluent"}),
}
_FILE_FUNCTIONS = frozenset(name for _, name in (*_SAVERS, *_LOADERS))


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a call does: why a step that makes it is not captured, and what to do.

    ``said``: it is only said, as a print is, and keeps no step from being captured.
    ``not_repeatable``: it may not be done twice.
    ``direct``: it counts where the program's own code makes the call, and not where Python's makes it for that.
    """

    reason: str
    hint: str = ""
    said: bool = False
    not_repeatable: bool = True
    direct: bool = False


def _of_the_system() -> Iterator[tuple[tuple[str, str], Effect]]:
    """Return the known effects of functions of Python's `os`."""
    random = Effect(
        "the step draws from the system's random numbers (os.urandom)", DRAW_FROM_TORCH, not_repeatable=False
    )
    for system in ("posix", "nt"):
        for name in ("write", "writev", "pwrite", "pwritev", "sendfile", "truncate", "ftruncate"):
            yield (system, name), Effect(f"the step writes to a file (os.{name})", WRITE_OUTSIDE)
        for name in ("remove", "unlink", "rename", "replace", "mkdir", "rmdir", "link", "symlink"):
            yield (system, name), Effect(f"the step changes files (os.{name})", _DO_OUTSIDE)
        for name in ("open", "read", "pread", "stat", "lstat", "access", "listdir", "scandir", "getcwd"):
            yield (system, name), Effect(f"the step looks at files (os.{name})", _ASK_OUTSIDE, not_repeatable=False)
        yield (system, "urandom"), random
        for name in ("system", "posix_spawn", "posix_spawnp"):  # by the second one `subprocess` starts most, since 3.14
            yield (system, name), _STARTS
    yield ("_posixsubprocess", "fork_exec"), _STARTS
    yield ("_winapi", "CreateProcess"), _STARTS


def _of_others() -> Iterator[tuple[tuple[str, str], Effect]]:
    """Return the known effects of streams, threads, databases and clocks."""
    for home in ("io", "_io"):
        yield (home, "open"), Effect("the step opens a file", _ASK_OUTSIDE, not_repeatable=False)
    for home in ("socket", "_socket"):
        for name in ("send", "sendall", "sendto", "recv", "recv_into"):
            yield (home, name), Effect(f"the step talks to another program ({name})", _DO_OUTSIDE)
    for name in ("start_new_thread", "start_joinable_thread"):  # the one before Python 3.13, the other since
        yield ("_thread", name), Effect("the step starts a thread", _DO_OUTSIDE)
    yield ("_queue", "put"), Effect("the step hands something to another thread (put)", _DO_OUTSIDE)
    for name in ("execute", "executemany", "executescript"):
        yield ("sqlite3", name), Effect(f"the step asks a database ({name})", _DO_OUTSIDE)
    yield ("_pickle", "dump"), Effect("the step writes to a file or a buffer (pickle.dump)", WRITE_OUTSIDE)
    yield ("numpy", "tofile"), Effect("the step writes to a file (tofile)", WRITE_OUTSIDE, direct=True)
    for home, name in (
        ("gc", "get_objects"),
        ("gc", "get_referrers"),
        ("sys", "_getframe"),
        ("", "get_num_threads"),
        ("", "__subclasses__"),
    ):
        yield (home, name), Effect(f"the step asks Python ({name})", _ASK_OUTSIDE, not_repeatable=False, direct=True)
    clocks = ("time", "perf_counter", "monotonic", "process_time")
    for home, name in (
        *(("time", name + unit) for name in clocks for unit in ("", "_ns")),
        *(("datetime", name) for name in ("now", "utcnow", "today")),
    ):
        yield (
            (home, name),
            Effect(f"the step reads the clock ({name})", _ASK_OUTSIDE, not_repeatable=False, direct=True),
        )


_STARTS = Effect("the step starts a program", _DO_OUTSIDE)
_KNOWN = {**dict(_of_the_system()), **dict(_of_others())}
"""Calls in C, by the module that their owner is or is from (any, where it is empty), and by name."""
CALLED = _WRITES | {name for _, name in _KNOWN}
"""Names of calls in C that may have an effect: a step calls thousands of others."""


def effect_of(name: str, owner: Any) -> Effect | None:
    """Return the effect of a C function, by its name and its owner; None where it has none, or none that is known."""
    if name in _WRITES and is_standard_stream(owner):
        return Effect(f"{name} to a standard stream", said=True)
    if name in _WRITES and (is_file(owner) or type(owner).__module__ == "_csv"):
        return Effect(f"the step writes to a file ({name})", WRITE_OUTSIDE)
    if isinstance(owner, types.ModuleType):
        home = owner.__name__
    else:
        home = (owner if isinstance(owner, type) else type(owner)).__module__
    return _KNOWN.get((home, name)) or _KNOWN.get(("", name))


def may_keep(name: str) -> bool:
    """Return whether a library function of this name may write or read a file, or keep its arguments."""
    return name in _FILE_FUNCTIONS or name in _TRACKERS or name.startswith(_ADDS)


def effect_of_library(frame: types.FrameType) -> Effect | None:
    """Return the effect of a library function that `may_keep` and has just begun; None where it has none."""
    name = frame.f_code.co_name
    if name not in _FILE_FUNCTIONS:
        return _kept_by(frame, name)
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    for known in (_SAVERS, _LOADERS):
        target = frame.f_locals.get(known.get((package, name), ""))
        if isinstance(target, str | os.PathLike) or is_file(target):
            if known is _SAVERS:
                return Effect(f"the step writes to a file ({package}.{name})", WRITE_OUTSIDE)
            return Effect(f"the step reads a file ({package}.{name})", _ASK_OUTSIDE, not_repeatable=False)
    return None


def _kept_by(frame: types.FrameType, name: str) -> Effect | None:
    """Return the effect of a function that keeps something for each call: a tracker, a progress bar, a queue."""
    module = str(frame.f_globals.get("__name__", ""))
    if module == "tqdm.std":
        return Effect("a progress bar's update", said=True)
    if module == "multiprocessing.queues" and name == "put":  # a thread writes it, at its own time
        return Effect("the step hands something to another process (put)", _DO_OUTSIDE)
    if module in _TRACKERS.get(name, _BOARDS):
        return Effect(f"the step writes to a tracker ({module.partition('.')[0]}'s {name})", WRITE_OUTSIDE)
    return None


def is_standard_stream(one: Any) -> bool:
    """Return whether a stream is the program's output, or its buffer."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(one is stream or one is getattr(stream, "buffer", stream) for stream in streams if stream is not None)


def is_file(one: Any) -> bool:
    """Return whether a stream writes to a file, or to another process."""
    return isinstance(one, _FILES) and not is_standard_stream(one)
