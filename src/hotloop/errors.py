"""Every exception that hotloop raises itself, and `describe`, which puts any exception into one line.

::

    HotloopError
    ├── ConfigError (ValueError)                 a setting, a preset or an argument that cannot be used
    ├── DataError (ValueError)                   rows of a data set that do not fit, by line number
    ├── RecordError (ValueError)                 a run record that cannot be read
    ├── UnsupportedTorchError (RuntimeError)     torch is older than hotloop supports, or lacks a part
    ├── PresetUnavailableError (RuntimeError)    ``strict=True``, and this machine cannot run the preset
    ├── CompileFailedError (RuntimeError)        ``strict=True``, and a compile failed
    ├── CompiledRunError (RuntimeError)          compiled code failed while it ran, outside of a ``hotloop.Loop``
    ├── StaleOutputError (RuntimeError)          an output of a CUDA graph is read or held although its memory is reused
    ├── StepLostError (RuntimeError)             a step failed and cannot be undone; the last checkpoint is sound
    ├── TrainingFailedError (RuntimeError)       a run of ``hotloop train`` that cannot continue; its checkpoint is kept
    ├── RunPrunedError (RuntimeError)            a run of a search that is not worth continuing
    ├── SearchStoppedError (RuntimeError)        a search that cannot continue; its finished trials are kept
    └── MissingExtraError (ImportError)          an optional dependency is missing; the message names the extra

The user's own exceptions are never wrapped in one of these.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class HotloopError(Exception):
    """Base of every exception that hotloop raises itself."""


class ConfigError(HotloopError, ValueError):
    """A setting, preset or argument that cannot be used; the message names it, its value and what was expected."""


class DataError(HotloopError, ValueError):
    """Rows of a data set that do not fit, listed by line number with the reason."""


class RecordError(HotloopError, ValueError):
    """A run record that is missing, torn beyond repair, or of a schema that this version does not read."""


class UnsupportedTorchError(HotloopError, RuntimeError):
    """The installed torch is older than hotloop supports, or lacks a part that was asked for."""


class PresetUnavailableError(HotloopError, RuntimeError):
    """With ``strict=True``: this machine cannot run the preset that was asked for."""


class CompileFailedError(HotloopError, RuntimeError):
    """With ``strict=True``: a compile failed. ``__cause__`` is torch's own exception."""


class CompiledRunError(HotloopError, RuntimeError):
    """Compiled code failed while it ran, where eager does not fail. ``__cause__`` is the original exception.

    The step cannot be undone here, since a part of it may have run; ``hotloop.Loop`` owns the step and can undo it.
    ``component`` is the name of the component whose code failed.
    """

    def __init__(self, message: str, component: str = "") -> None:
        super().__init__(message)
        self.component = component


class StaleOutputError(HotloopError, RuntimeError):
    """An output of a CUDA graph was read after a later call overwrote it, or is held while a call would overwrite it.

    The message names the output, its component, where it was made, and what to do: consume it, clone it
    (`hotloop.own`), or make it again. ``outputs`` lists every such output with name, shape, place and memory.
    """

    def __init__(self, message: str, outputs: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)


class StepLostError(HotloopError, RuntimeError):
    """A step of a ``hotloop.Loop`` failed and cannot be undone: a parameter was written, or the GPU is lost.

    The message names the tier and the cause. ``__cause__`` is the original exception. Checkpoints are sound.
    """


class TrainingFailedError(HotloopError, RuntimeError):
    """A run that cannot continue; the message names cause, remedy and the checkpoint. ``__cause__`` is the original.

    ``alone`` is the message without the checkpoint, for a run that nobody continues.
    """

    def __init__(self, message: str, alone: str | None = None) -> None:
        super().__init__(message)
        self.alone = message if alone is None else alone


class RunPrunedError(HotloopError, RuntimeError):
    """A run of a search that is not worth continuing, as the search decided from its validations."""


class SearchStoppedError(HotloopError, RuntimeError):
    """A search that cannot continue: every trial fails, or its storage is gone. Finished trials are kept."""


class MissingExtraError(HotloopError, ImportError):
    """An optional dependency is needed; the message says which extra of hotloop installs it."""


def missing_extra(what: str, extra: str, error: ImportError) -> MissingExtraError:
    """Build the one message for an optional dependency that is not installed."""
    return MissingExtraError(f"{what} needs {error.name or error}: install it with pip install 'hotloop[{extra}]'.")


def describe(error: BaseException) -> str:
    """Return an exception's class and the first line of its message; for a program that failed, its name and its error.

    There is no full stop at the end: the sentence that it is put into goes on, or ends with its own.
    """
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else str(next(iter(error.cmd), ""))
        program = pathlib.Path(command.split()[0]).name if command.split() else "a program"
        if error.returncode >= 0:
            return f"{program} ended with exit code {error.returncode}{_first_error(error)}"
        signals = {number.value: number.name for number in signal.Signals}
        return f"{program} was ended by {signals.get(-error.returncode, f'signal {-error.returncode}')}"
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first, _, _ = lines[0].partition(". This could be because")  # torch's dispatcher goes on with a list of backends
    first = first if first.endswith("..") else first.removesuffix(".")
    return f"{type(error).__name__}: {first}"


def _first_error(error: subprocess.CalledProcessError) -> str:
    """Return the first error that a compiler printed, behind a colon; empty where it printed none."""
    output = error.output or error.stderr or b""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    found = next((line for line in text.splitlines() if "error: " in line), "")
    return f": {found.partition('error: ')[2].strip()[:200]}" if found else ""


def message_of(error: BaseException) -> str:
    """Return an exception's message; empty where its own ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it may raise anything
        return ""
