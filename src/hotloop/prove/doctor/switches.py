"""Finds who changes torch's settings: a profile function sees each call of torch's setters while a block runs.

Nothing of torch's is replaced: Python itself reports the calls. A change that the block takes back is no finding.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from hotloop import events as ev
from hotloop._torch.dynamo import never_trace, set_tracer
from hotloop._torch.graphs import is_user_file
from hotloop.cache.ambient import torch_settings

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_GRAD, _ANOMALY, _PRECISION = "grad mode", "anomaly detection", "matmul precision"
_SAME = ("fp32_precision", "tf32", _PRECISION)
"""Torch has many names for one precision: a line that changes several of them is one finding, the first."""


@dataclasses.dataclass(frozen=True)
class _Place:
    by: str
    file: str | None = None
    line: int | None = None

    @classmethod
    def of(cls, frame: FrameType | None, phase: str) -> _Place:
        """Return the place of the innermost frame that is not torch's: the program's, or a framework's."""
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return cls(phase)
        return cls(str(frame.f_globals.get("__name__", phase)), frame.f_code.co_filename, frame.f_lineno)


class Switches:
    """Notes which of torch's settings the block leaves changed, and which line changed each of them last.

    Args:
        phase: the name of the block, for changes whose line was not seen: ``the import``, ``make()``, ``a step``.
        own: the folder of the program.
        meant: changes by the program's own files are taken to be meant, as before the first step, and are no findings.
            Those that cost speed (anomaly detection, deterministic kernels) are findings in any case.
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
        noted: set[tuple[Any, ...]] = set()
        for name, after in _settings().items():
            if self._before.get(name) == after:
                continue
            place = self._places.get(name, _Place(self._phase))
            is_precision = any(word in name for word in _SAME)
            key = (place, is_precision or name)
            slow = name in (_ANOMALY, "deterministic")
            if key in noted or (self._is_own(place) and self._meant and not slow):
                continue
            noted.add(key)
            self.events.append(
                ev.SettingSwitched(
                    setting="float32_matmul_precision" if name == _PRECISION else name,  # torch's own name
                    before=str(self._before.get(name)),
                    after=str(after),
                    by=place.by,
                    file=place.file,
                    line=place.line,
                )
            )

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_return" or not called.__name__.startswith(("set_", "_set_")):
            return
        if called.__name__ == "_set_grad_enabled":  # by each no_grad block, a thousand times in a factory
            self._places[_GRAD] = _Place.of(frame, self._phase)
            return
        before = set_tracer(None)  # torch may be tracing the step (torch.cond compiles itself), and must not trace this
        try:
            now = _settings()
        finally:
            set_tracer(before)
        for name, value in now.items():
            if value != self._latest.get(name):
                self._places[name] = _Place.of(frame, self._phase)
        self._latest = now

    def _is_own(self, place: _Place) -> bool:
        if place.file is None or self._own is None or "site-packages" in place.file:
            return False
        return Path(place.file).resolve().is_relative_to(self._own)

    never_trace(_called)


def _settings() -> dict[str, Any]:
    return {**torch_settings(), _GRAD: torch.is_grad_enabled(), _ANOMALY: torch.is_anomaly_enabled()}
