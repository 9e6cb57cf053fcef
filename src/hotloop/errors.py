"""Every exception that hotloop raises itself.

::

    HotloopError
    ├── ConfigError (ValueError)                 a setting, a preset or an argument that cannot be used
    ├── DataError (ValueError)                   rows of a data set that do not fit, by line number
    ├── RecordError (ValueError)                 a run record that cannot be read
    ├── UnsupportedTorchError (RuntimeError)     torch is older than hotloop supports, or lacks a part
    ├── PresetUnavailableError (RuntimeError)    ``strict=True`` and this machine cannot run the preset
    ├── CompileFailedError (RuntimeError)        ``strict=True`` and a compile failed
    ├── CompiledRunError (RuntimeError)          compiled code failed while it ran; nobody owned the step to undo it
    ├── StaleOutputError (RuntimeError)          memory of a CUDA graph is read, or about to be reused, while it is held
    ├── StepLostError (RuntimeError)             a step failed that cannot be undone; the last checkpoint is sound
    ├── TrainingFailedError (RuntimeError)       a run of ``hotloop train`` that cannot go on; its checkpoint is kept
    ├── RunPrunedError (RuntimeError)            a run of a search that is not worth going on with
    ├── SearchStoppedError (RuntimeError)        a search that cannot go on; its finished trials are kept
    └── MissingExtraError (ImportError)          an optional dependency is missing; says which extra has it

The user's own exceptions are never wrapped in one of these.
"""

from __future__ import annotations

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

    It cannot be undone here, since a part of the step may have been executed; ``hotloop.Loop`` owns the step and can.
    ``component`` is the name of the one whose code it was.
    """

    def __init__(self, message: str, component: str = "") -> None:
        super().__init__(message)
        self.component = component


class StaleOutputError(HotloopError, RuntimeError):
    """An output of a CUDA graph was read after a later call overwrote it, or is held where it is about to be.

    The message names the output, its component, where it was made, and what to do: consume it, clone it
    (`hotloop.own`), or make it again. ``outputs`` has each with name, shape, place and memory, however many there are.
    """

    def __init__(self, message: str, outputs: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)


class StepLostError(HotloopError, RuntimeError):
    """A step of a ``hotloop.Loop`` failed where it cannot be undone: a parameter was written, or the GPU is lost.

    The message names the tier and the cause. ``__cause__`` is the original exception. Checkpoints are sound.
    """


class TrainingFailedError(HotloopError, RuntimeError):
    """A run that cannot go on; the message names cause, remedy and the checkpoint. ``__cause__`` is the original.

    ``alone`` is the message without the checkpoint, for a run that nobody goes on with.
    """

    def __init__(self, message: str, alone: str | None = None) -> None:
        super().__init__(message)
        self.alone = message if alone is None else alone


class RunPrunedError(HotloopError, RuntimeError):
    """A run of a search that is not worth going on with: what it was told by whoever hears of its validations."""


class SearchStoppedError(HotloopError, RuntimeError):
    """A search that cannot go on: every trial fails, or its storage is gone. What is finished is kept."""


class MissingExtraError(HotloopError, ImportError):
    """An optional dependency is needed; the message says which extra of hotloop installs it."""


def missing_extra(what: str, extra: str, error: ImportError) -> MissingExtraError:
    """Build the one message for an optional dependency that is not installed."""
    return MissingExtraError(f"{what} needs {error.name or error}: install it with pip install 'hotloop[{extra}]'.")
