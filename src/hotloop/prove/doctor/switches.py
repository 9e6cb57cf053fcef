"""Finds who changes torch's settings: a profile function sees each call of torch's setters while a block runs.

Nothing of torch's is replaced: Python itself reports the calls, and what a block changes and takes back is no finding.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from hotloop import events as ev
from hotloop._torch.graphs import is_user_file
from hotloop.cache.ambient import torch_settings

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_SETTERS = ("set_", "_set_")
_GRAD_SETTER = "_set_grad_enabled"
_GRAD, _ANOMALY = "grad mode", "anomaly detection"
_NAMES = {"matmul precision": "float32_matmul_precision"}
"""Names of ours that people look for under torch's."""
_SLOW = (_ANOMALY, "deterministic")
"""Settings that cost speed, so that they are told even where the program itself changes them on purpose."""
_SAME = ("fp32_precision", "tf32", "matmul precision")
"""Precision has many names for one thing: of those that one line changes, the first is told."""


@dataclasses.dataclass(frozen=True)
class _Place:
    by: str
    file: str | None
    line: int | None


class Switches:
    """Notes which of torch's settings the block leaves changed, and whose line changed each last.

    Args:
        phase: what the block is, for what nobody's line was seen for: ``the import``, ``make()``, ``a step``.
        own: the folder of the program; what its own files set before the first step is taken to be meant.
        meant: whether it is (it is not inside a step).
    """

    def __init__(self, phase: str, own: Path | None, *, meant: bool = True) -> None:
        self._phase, self._own, self._meant = phase, own, meant
        self._before: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        self._previous: Any = None
        self.events: list[ev.SettingSwitched] = []

    def __enter__(self) -> Self:
        self._before = self._latest = _settings()
        self._previous = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(self._previous)
        told: set[tuple[Any, ...]] = set()
        for name, after in _settings().items():
            if self._before.get(name) == after:
                continue
            place = self._places.get(name, _Place(self._phase, None, None))
            precision = any(word in name for word in _SAME)
            key = (place, precision or name)
            if key in told or (self._is_own(place) and self._meant and name not in _SLOW):
                continue
            told.add(key)
            self.events.append(
                ev.SettingSwitched(
                    setting=_NAMES.get(name, name),
                    before=str(self._before.get(name)),
                    after=str(after),
                    by=place.by,
                    file=place.file,
                    line=place.line,
                )
            )

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_return" or not called.__name__.startswith(_SETTERS):
            return
        if called.__name__ == _GRAD_SETTER:  # a no_grad block sets it twice, a thousand times in a factory
            self._places[_GRAD] = _place_of(frame, self._phase)
            return
        now = _settings()
        for name, value in now.items():
            if value != self._latest.get(name):
                self._places[name] = _place_of(frame, self._phase)
        self._latest = now

    def _is_own(self, place: _Place) -> bool:
        if place.file is None or self._own is None or "site-packages" in place.file:
            return False
        return Path(place.file).resolve().is_relative_to(self._own)


def _settings() -> dict[str, Any]:
    return {
        **torch_settings(),
        _GRAD: torch.is_grad_enabled(),
        _ANOMALY: torch.is_anomaly_enabled(),
    }


def _place_of(frame: FrameType | None, phase: str) -> _Place:
    """Give the innermost frame that is not torch's: a framework's where it was one."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return _Place(phase, None, None)
    return _Place(str(frame.f_globals.get("__name__", phase)), frame.f_code.co_filename, frame.f_lineno)
