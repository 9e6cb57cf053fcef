"""What the HotLoop callback of a fit runs, and what it has recorded of it, as a run's record has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.integrations.lightning import HotLoop

if TYPE_CHECKING:
    from hotloop.record import RunRecord
    from hotloop.train.settings import Settings
    from hotloop.train.task import Plan

_COPIED = ("decisions", "events", "verdicts")
"""Sections of the callback's own record that go into the run's."""
_FIRST = 3
"""Steps in each of which is asked what is compiled in place; later, it is asked once an epoch."""


class Compiled:
    """The HotLoop callback of a fit, if there is one.

    Args:
        settings: the run's.
        chosen: the presets of the module, training and inference, by `compiling.plan`.
        runs: how many runs will use what is compiled in this one.
        record: the run's.
    """

    def __init__(self, settings: Settings, chosen: Plan, runs: float, record: RunRecord) -> None:
        own, auto = settings.compile, settings.training.optimization.use_torch_compile == "auto"
        more = {"runs": max(1.0, runs), "layout": own.layout} if auto else {}
        run = "auto" if auto else chosen["model"][0] if chosen else None
        self.callback = HotLoop(run, sentinel=own.sentinel, **more) if run else None
        self._record, self._copied = record, dict.fromkeys(_COPIED, 0)
        self._in_place, self._steps = "", 0

    @property
    def asked(self) -> str:
        """What was asked for; empty where nothing was."""
        return self.callback.run if self.callback is not None else ""

    def running(self) -> str:
        """Return what the step just done ran in: a tier, a preset, ``eager``, or ``none`` without a callback."""
        if self.callback is None:
            return "none"
        self._steps += 1
        if self.callback.loop is not None:
            return self.callback.loop.account.running or "eager"
        if self._steps <= _FIRST:
            self._in_place = self.callback.status().running
        return self._in_place or "eager"

    def copy(self) -> None:
        """Copy what the callback has recorded since into the run's record."""
        kept = self.callback.record if self.callback is not None else None
        if kept is None:
            return
        for section, done in self._copied.items():
            entries = kept.document.get(section, [])
            for entry in entries[done:]:
                self._record.append(section, entry)
            self._copied[section] = len(entries)

    def components(self) -> dict[str, dict[str, Any]]:
        """Return what ran as the record has it."""
        if self.callback is None:
            return {"model": {"requested": "none", "running": "none", "state": "eager", "causes": []}}
        found = self.callback.status()
        self._in_place = running = found.running or "eager"
        parts = found.model.components.values() if found.model is not None else ()
        known: dict[str, Any] = next((one.to_dict() for one in parts), {"causes": []})
        state = "captured" if running.endswith("+graph") else "eager" if running == "eager" else "compiled"
        return {"model": {**known, "requested": self.asked, "running": running, "state": state}}

    def figures(self) -> dict[str, float]:
        """Return what a loop has saved and spent."""
        loop = self.callback.status().loop if self.callback is not None else None
        return {} if loop is None else {"seconds_saved": loop.seconds_saved, "prepare_seconds": loop.prepare_seconds}

    def notes(self) -> tuple[str, ...]:
        """Return why no loop owned the step, or which tiers its loop declined and what that decided last."""
        if self.callback is None:
            return ()
        found = self.callback.status()
        why = [f"the step is the Trainer's own: {one}" for one in found.why]
        if found.loop is None:
            return tuple(why)
        declined = [f"{one.name} declined: {one.why}" for one in found.loop.tiers if one.state == "declined"]
        return (*why, *declined, *found.loop.decisions[-1:])
