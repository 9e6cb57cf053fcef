"""What a rule looks at: the events and figures of one run, read from its record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hotloop import events as ev

_T = TypeVar("_T")
DEFAULT_STEPS = 1_000
"""Steps that costs are weighed over where the run does not say how many steps are planned."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, as rules see it.

    Args:
        events: what was observed, in order.
        measurements: the record's; ``ways`` maps a way to run (``eager``, a preset, a tier) to
            its figures ``step_ms``, ``cold_seconds``, ``peak_bytes``, as far as they were measured; ``shapes`` maps a
            step's name to its census, as `hotloop.measure.Census.to_dict` returns it.
        settings: the record's; ``total_steps`` is how many steps are planned, ``run`` the way that was asked for. If
            that way was measured, rules that compare ways look at it only.
        environment: the record's: versions, device; ``HOTLOOP_DISABLE`` if it is set; ``device_memory_bytes``.
        components: each component's status, as ``hotloop.status`` returns it.
        starts: how often the run was started; beyond 1, an earlier start could have filled the compile caches.
    """

    events: Sequence[ev.Event] = ()
    measurements: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    components: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    starts: int = 1

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Case:
        """Read a run record's document; events of kinds that this version does not know are left out."""
        starts = document.get("starts")
        return cls(
            events=tuple(_readable_events(document.get("events") or ())),
            measurements=document.get("measurements") or {},
            settings=document.get("settings") or {},
            environment=document.get("environment") or {},
            components=document.get("components") or {},
            starts=starts if isinstance(starts, int) else 1,
        )

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def planned(self) -> int | None:
        """How many steps are planned; None if the run does not say."""
        total = self.settings.get("total_steps")
        return total if type(total) is int and total > 0 else None

    @property
    def steps(self) -> int:
        """How many steps costs are weighed over: the planned steps, else `DEFAULT_STEPS`."""
        return self.planned or DEFAULT_STEPS

    @property
    def on_cpu(self) -> bool:
        """Whether the run is known to be on the CPU, where there is no device to wait for."""
        return str(self.environment.get("device", "")).partition(":")[0] == "cpu"

    def causes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each cause in the components' status, after the component's name."""
        for name, status in self.components.items():
            causes = status.get("causes") if isinstance(status, Mapping) else None
            for cause in causes if isinstance(causes, list | tuple) else ():
                if isinstance(cause, Mapping):
                    yield name, cause

    def source(self, file: str | None, line: int | None) -> str:
        """Return the text of a line of code if any cause or event of the run holds it, else an empty string."""
        if not file:
            return ""
        for _, cause in self.causes():
            if (cause.get("file"), cause.get("line")) == (file, line) and cause.get("source"):
                return str(cause["source"])
        for event in self.events:
            text = getattr(event, "source", "")
            if text and (getattr(event, "file", None), getattr(event, "line", None)) == (file, line):
                return str(text)
        return ""

    def place(self, event: Any) -> dict[str, Any]:
        """Return where an event points, as fields of `Advice`: component, file, line and the line's text."""
        source = getattr(event, "source", "") or self.source(event.file, event.line)
        return {"component": event.component, "file": event.file, "line": event.line, "source": source}

    def waited_ms(self, file: str | None, line: int | None) -> float | None:
        """Return the ms that a step waited for the device at a line; None if it did not, or was not measured."""
        here = [event for event in self.of(ev.HostSync) if file and (event.file, event.line) == (file, line)]
        known = [event.seconds for event in here if event.seconds is not None]
        return max(known) * 1e3 if known else None

    def measured_ways(self) -> dict[str, Mapping[str, Any]]:
        """Return the figures of the ways to run besides eager that have a step time; only the run's own, if timed."""
        ways = self.measurements.get("ways")
        names = [name for name in ways if name != "eager"] if isinstance(ways, Mapping) else []
        timed = {name: self.way(name) for name in names if number(self.way(name).get("step_ms"))}
        asked = self.settings.get("run")
        return {asked: timed[asked]} if isinstance(asked, str) and asked in timed else timed

    def way(self, name: str) -> Mapping[str, Any]:
        """Return the figures of one way to run; empty if it was not measured."""
        ways = self.measurements.get("ways")
        figures = ways.get(name, {}) if isinstance(ways, Mapping) else {}
        return figures if isinstance(figures, Mapping) else {}


def grouped(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group items by a key, in the order in which the keys first came."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def number(value: object) -> float | None:
    """Return a positive finite number as a float; None for anything else that a record may hold."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return None


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the 95% intervals of two ways' step times meet, so that neither is known to be faster.

    If the figures of either way lack an interval, the two are taken not to meet.
    """
    if "none" in (one.get("difference"), other.get("difference")):  # `hotloop bench` found no difference beyond noise
        return True
    ends = [number(figures.get(key)) for figures in (one, other) for key in ("step_ms_low", "step_ms_high")]
    low, high, other_low, other_high = ends
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return low <= other_high and other_low <= high


def _readable_events(entries: Sequence[Mapping[str, Any]]) -> Iterator[ev.Event]:
    """Yield the events of a record that this version knows; a value of another type than its field's drops its event.

    A record is a file that anybody can have written. A step number that the event's class has no field for is ignored.
    """
    for entry in entries:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        for attempt in (fields, {key: value for key, value in fields.items() if key != "step"}):
            try:
                event = ev.from_dict(attempt)
            except ValueError:
                continue
            if all(_has_type(getattr(event, field.name), str(field.type)) for field in dataclasses.fields(event)):
                yield event
            break


def _has_type(value: object, annotation: str) -> bool:
    if value is None:
        return annotation.endswith(" | None")
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple"):
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)
