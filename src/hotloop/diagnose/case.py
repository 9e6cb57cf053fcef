"""What a rule looks at: the events and figures of one run, out of its record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hotloop import events as ev

_E = TypeVar("_E", bound=ev.Event)
DEFAULT_STEPS = 1_000
"""Steps that costs are weighed over where nobody said how many are planned."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, as rules see it.

    Args:
        events: what was observed, in order.
        measurements: the record's; ``ways`` maps a way to run (``eager``, a preset, ``preset by blocks``, a tier) to
            its figures ``step_ms``, ``cold_seconds``, ``peak_bytes``, as far as they were measured; ``shapes`` maps a
            step's name to its census, as `hotloop.measure.Census.to_dict` gives it.
        settings: the record's; ``total_steps`` is how many steps are planned, ``run`` the way that was asked for. With
            a ``run`` that was measured, rules that weigh ways look at that one only.
        environment: the record's: versions, device; ``HOTLOOP_DISABLE`` where it is set; ``device_memory_bytes``.
        components: each component's status, as ``hotloop.status`` gives it.
        starts: how often the run was started; beyond 1, an earlier start of it could have filled the compile caches.
    """

    events: Sequence[ev.Event] = ()
    measurements: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    components: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    starts: int = 1

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Case:
        """Take a run record's document; events of kinds that this version does not know are left out."""
        return cls(
            events=tuple(_events(document.get("events") or ())),
            measurements=document.get("measurements") or {},
            settings=document.get("settings") or {},
            environment=document.get("environment") or {},
            components=document.get("components") or {},
            starts=starts if isinstance(starts := document.get("starts"), int) else 1,
        )

    def of(self, kind: type[_E]) -> list[_E]:
        """Give the events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def planned(self) -> int | None:
        """How many steps are planned; None where nobody said."""
        total = self.settings.get("total_steps")
        return total if type(total) is int and total > 0 else None

    @property
    def steps(self) -> int:
        """How many steps costs are weighed over: those that are planned, else `DEFAULT_STEPS`."""
        return self.planned or DEFAULT_STEPS

    @property
    def on_cpu(self) -> bool:
        """Whether the run is known to be on the CPU, where there is no device to wait for."""
        return str(self.environment.get("device", "")).partition(":")[0] == "cpu"

    def causes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Give each cause that the components' status names, with the component's name."""
        for name, status in self.components.items():
            causes = status.get("causes") if isinstance(status, Mapping) else None
            for cause in causes if isinstance(causes, list | tuple) else ():
                if isinstance(cause, Mapping):
                    yield name, cause

    def source(self, file: str | None, line: int | None) -> str:
        """Give the text of a line as far as the run noted it; empty where it did not."""
        if not file:
            return ""
        for _, cause in self.causes():
            if (cause.get("file"), cause.get("line")) == (file, line) and cause.get("source"):
                return str(cause["source"])
        noted = (event for event in self.events if getattr(event, "file", None) == file)
        return next((text for one in noted if getattr(one, "line", None) == line and (text := _source(one))), "")

    def waited_ms(self, file: str | None, line: int | None) -> float | None:
        """Give what a step waited for the device at a line, in ms; None where it did not, or it was not measured."""
        here = [one for one in self.of(ev.HostSync) if file and (one.file, one.line) == (file, line)]
        known = [one.seconds for one in here if one.seconds is not None]
        return max(known) * 1e3 if known else None

    def measured_ways(self) -> dict[str, Mapping[str, Any]]:
        """Give the ways that compile or capture and have a step time: the one asked for, where it is among them."""
        ways = self.measurements.get("ways")
        names = [name for name in ways if name != "eager"] if isinstance(ways, Mapping) else []
        found = {name: self.way(name) for name in names if number(self.way(name).get("step_ms"))}
        asked = self.settings.get("run")
        return {asked: found[asked]} if isinstance(asked, str) and asked in found else found

    def way(self, name: str) -> Mapping[str, Any]:
        """Give the figures of one way to run, empty where it was not measured."""
        ways = self.measurements.get("ways")
        found = ways.get(name, {}) if isinstance(ways, Mapping) else {}
        return found if isinstance(found, Mapping) else {}


def number(value: object) -> float | None:
    """Read a positive finite number; None for everything else, which a record may hold as well."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and 0 < value < math.inf else None  # type: ignore[operator,arg-type]


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether the 95% intervals of two ways' steps meet, so that neither is known to be faster.

    Args:
        one: a way's figures; where an interval is missing, they are taken not to meet.
        other: another way's.
    """
    if "none" in (one.get("difference"), other.get("difference")):  # as `hotloop bench` judged it, against its noise
        return True
    ends = [number(figures.get(key)) for figures in (one, other) for key in ("step_ms_low", "step_ms_high")]
    low, high, other_low, other_high = ends
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return low <= other_high and other_low <= high


def _source(event: ev.Event) -> str:
    return str(getattr(event, "source", ""))


def _events(entries: Sequence[Mapping[str, Any]]) -> Iterator[ev.Event]:
    for entry in entries:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        for given in (fields, {key: value for key, value in fields.items() if key != "step"}):
            try:
                event = ev.from_dict(given)
            except ValueError:
                continue
            if _fits(event):
                yield event
            break


def _fits(event: ev.Event) -> bool:
    """Tell whether each value is of its field's type: a record is a file, and anybody can have written it."""
    return all(_is_a(str(field.type), getattr(event, field.name)) for field in dataclasses.fields(event))


def _is_a(annotation: str, value: object) -> bool:
    if value is None:
        return annotation.endswith(" | None")
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple"):
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)
