"""The loop's events as lines for the log: what keeps a tier that was asked for from running is a warning."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hotloop import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable


def line_of(event: ev.Event, *, asked: bool) -> tuple[int, str]:
    """Return level and line of an event; the line is empty where the event is no news.

    Where the user ``asked`` for the tier by name, anything else that runs is against their wish.
    """
    phrase = _PHRASES.get(type(event))
    against = isinstance(event, ev.StepUndone | ev.SentinelDisagreed) or (
        asked and isinstance(event, ev.TierDeclined | ev.TierChanged)
    )
    return (logging.WARNING if against else logging.INFO), phrase(event) if phrase is not None else ""


def _declined(event: ev.TierDeclined) -> str:
    at = f" at {event.location}: {event.source}" if event.file else ""
    return f"{event.function}: {event.tier} declined{at}: {event.reason}. {event.hint}"


def _proven(event: ev.TierProven) -> str:
    copied = f"{event.copied_bytes / 2**20:,.0f} MiB copied{' in host memory' if event.on_host else ''}"
    return f"{event.function}: {event.tier} agrees over {event.steps} steps ({event.worst}; {copied})"


def _captured(event: ev.Captured) -> str:
    outside = f"; {', '.join(event.outside)} outside" if event.outside else ""
    return f"{event.function}: {event.operations:,} operations captured in {event.seconds:.2f} s{outside}"


_PHRASES: dict[type[ev.Event], Callable[[Any], str]] = {
    ev.TierDeclined: _declined,
    ev.TierProven: _proven,
    ev.Captured: _captured,
    ev.StepUndone: lambda event: (
        f"{event.function}: step {event.step + 1} failed in {event.tier} and ran eager: {event.reason}"
    ),
    ev.SentinelDisagreed: lambda event: (
        f"{event.function}: step {event.step + 1} in {event.tier} does not agree with eager: {event.reason}"
    ),
    ev.CaptureDropped: lambda event: f"{event.function}: to be captured anew, since something changed: {event.reason}",
    ev.TierChanged: lambda event: (
        f"from step {event.step + 1} on {event.to_tier}, before {event.from_tier}: {event.reason}"
    ),
}
