"""What a rule looks at: the events and figures of one run, out of its record."""

from __future__ import annotations

import dataclasses
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
            its figures ``step_ms``, ``cold_seconds``, ``peak_bytes``, as far as they were measured.
        settings: the record's; ``total_steps`` is how many steps are planned.
        environment: the record's: versions, device.
        components: each component's status, as ``hotloop.status`` gives it.
    """

    events: Sequence[ev.Event] = ()
    measurements: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    components: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Case:
        """Take a run record's document; events of kinds that this version does not know are left out."""
        return cls(
            events=tuple(_events(document.get("events", ()))),
            measurements=document.get("measurements", {}),
            settings=document.get("settings", {}),
            environment=document.get("environment", {}),
            components=document.get("components", {}),
        )

    def of(self, kind: type[_E]) -> list[_E]:
        """Give the events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> int:
        """How many steps are planned."""
        planned = self.settings.get("total_steps")
        return planned if isinstance(planned, int) and planned > 0 else DEFAULT_STEPS

    def way(self, name: str) -> Mapping[str, Any]:
        """Give the figures of one way to run, empty where it was not measured."""
        ways = self.measurements.get("ways")
        found = ways.get(name, {}) if isinstance(ways, Mapping) else {}
        return found if isinstance(found, Mapping) else {}


def _events(entries: Sequence[Mapping[str, Any]]) -> Iterator[ev.Event]:
    for entry in entries:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        for given in (fields, {key: value for key, value in fields.items() if key != "step"}):
            try:
                event = ev.from_dict(given)
            except ValueError:
                continue
            yield event
            break
