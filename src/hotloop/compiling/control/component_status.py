"""What was asked for and what runs: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from hotloop import events as ev
from hotloop.compiling.observe import Cause
from hotloop.report import text
from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.compiling.control.component import Component
    from hotloop.compiling.observe import GraphInfo

State = Literal["pending", "compiled", "partial", "eager", "as-given"]
_SUMS = ("compiles", "recompiles", "graph_breaks", "cache_hits", "cache_misses", "compile_seconds")
_MOST_PLACES = 3
"""Places of graph breaks or recompiles that a line names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentStatus:
    """The status of one component.

    - ``state``: ``pending`` (not called yet), ``compiled``, ``partial`` (some frame or graph eager or on a lower rung)
      or ``eager``; ``causes`` says why whenever it is not what was asked for.
    - ``running``: the preset in force (``none`` when eager). State and ``running`` are both ``as-given`` where the user
      compiled the component by torch's own means, which is not counted.
    - ``frames_compiled``: executions of graphs on a rung above ``none``.
    - ``frames_eager``: executions of graphs on ``none``, and calls that reached no graph.
    - ``compiles``: compilations; ``compile_seconds`` is their wall-clock time.
    - ``recompiles``: all of them; ``recompiled`` names the places, with the newest reason of each. The places of
      ``graph_breaks`` are among the ``causes``.
    - ``modes``: the same counts for training and inference apart, and ``calls_per_step``: how often so many calls were
      made between two optimizer steps.

    Under presets with CUDA graphs ``modes`` also holds ``shapes`` (calls by the shapes of their tensors) and
    ``calls_in_backward`` (made while a backward ran). ``outputs_copied`` and ``bytes_copied`` count what was copied so
    that it may be held; ``cudagraphs_skipped`` says why torch captured no graph.
    """

    name: str
    requested: str
    inference: str
    running: str
    state: State
    compiles: int = 0
    frames_compiled: int = 0
    frames_eager: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    fallbacks: int = 0
    causes: tuple[Cause, ...] = ()
    recompiled: tuple[Cause, ...] = ()
    compile_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    regions: tuple[str, ...] = ()
    outputs_copied: int = 0
    bytes_copied: int = 0
    cudagraphs_skipped: tuple[str, ...] = ()
    modes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, component: Component, name: str) -> ComponentStatus:
        """Return a component's status under the given name, from the tallies of its two lanes.

        A component that was called only inside another has the status of that other one.
        """
        tallies = [lane.tally for lane in component.lanes]
        outer = component.inside() if component.inside is not None else None
        config = component.config
        if outer is not None and not any(tally.calls for tally in tallies):
            reason = f"it runs inside component {outer.name!r}, and is compiled with it"
            cause = Cause(reason, "inside", hint=f"see the status of {outer.name!r}")
            return dataclasses.replace(cls.of(outer, name), requested=config.training.name, causes=(cause,))
        graphs: collections.Counter[GraphInfo] = collections.Counter()
        for tally in tallies:
            graphs.update(tally.graphs)
        state, running = _state(component, graphs)
        modes = {tally.mode: tally.to_dict() for tally in tallies}
        totals: dict[str, Any] = {count: sum(getattr(tally, count) for tally in tallies) for count in _SUMS}
        return cls(
            name=name,
            requested=config.training.name,
            inference=config.inference.name,
            running=running,
            state=state,
            frames_compiled=sum(mode["frames_compiled"] for mode in modes.values()),
            frames_eager=sum(mode["frames_eager"] for mode in modes.values()),
            fallbacks=sum(info.fallback is not None for info in graphs),
            causes=tuple(_causes(component, graphs)),
            recompiled=tuple({**tallies[0].recompiled, **tallies[1].recompiled}.values()),
            regions=tuple(sorted({info.region for info in graphs})),
            outputs_copied=sum(tally.copied for tally in tallies),
            bytes_copied=sum(tally.copied_bytes for tally in tallies),
            cudagraphs_skipped=tuple({**tallies[0].cudagraphs_skipped, **tallies[1].cudagraphs_skipped}),
            modes=modes,
            **totals,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        data = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    def compile_lines(self, name: str) -> list[str]:
        """Return lines for people on the component ``name``: how often its graphs broke, and why it was recompiled."""
        breaks = [cause.location or cause.reason for cause in self.causes if cause.stage == ev.GraphBreak.kind]
        anew = [f"{cause.location}: {cause.reason}" if cause.location else cause.reason for cause in self.recompiled]
        lines = []
        for what, count, places in (("graph break", self.graph_breaks, breaks), ("recompile", self.recompiles, anew)):
            if count:
                left = len(places) - _MOST_PLACES
                more = [f"and {text.count(left, 'more place')}"] if left > 0 else []
                lines.append(f"{name}: {text.count(count, what)}: {'; '.join([*places[:_MOST_PLACES], *more])}")
        return lines

    def cells(self, name: str) -> tuple[str, ...]:
        """Return the component's row of the table."""
        why = []
        for cause in self.causes:
            at = f"{cause.location}: {cause.source}\n  " if cause.file else ""
            hint = f" ({cause.hint})" if cause.hint else ""
            why.append(f"{at}{cause.reason}{hint}")
        same = self.inference == self.requested
        asked = self.requested if same else f"{self.requested} / {self.inference}"
        counts = map(str, (self.compiles, self.frames_compiled, self.frames_eager))
        return (name, asked, self.running, self.state, *counts, f"{self.compile_seconds:.1f}", "\n".join(why))


def _state(component: Component, graphs: collections.Counter[GraphInfo]) -> tuple[State, str]:
    """Return the state and the preset in force, from the graphs that were executed."""
    asked = [lane for lane in component.lanes if lane.preset.backend != "eager"]
    if component.disabled or all(lane.eager for lane in asked):
        return "eager", "none"
    if not any(lane.tally.calls for lane in asked):
        return ("eager", "none") if component.said_no_effect else ("pending", asked[0].tally.ladder.current.name)
    compiled = collections.Counter[str]()
    for info, count in graphs.items():
        if info.running != "none":
            compiled[info.running] += count
    if not compiled:
        return "eager", "none"
    requested = {lane.preset.name for lane in asked}
    running = next((name for name in compiled if name in requested), compiled.most_common(1)[0][0])
    partial = (
        component.said_no_effect
        or any(info.running != info.requested for info in graphs)
        or any(lane.eager or lane.tally.eager_calls or lane.tally.limited or lane.tally.failures for lane in asked)
    )
    return ("partial" if partial else "compiled"), running


def _causes(component: Component, graphs: collections.Counter[GraphInfo]) -> list[Cause]:
    """Return why the component does not run as asked, each reason at a place once."""
    causes: dict[tuple[Any, ...], Cause] = {}
    if component.disabled:
        causes["disabled",] = Cause(component.disabled, "disabled", hint="unset it to compile")
    for info in graphs:  # another component may have compiled the graph, and noted the fallback
        if (event := info.fallback) is not None:
            cause = Cause(event.reason, event.stage, event.file, event.line, hint=event.hint)
            causes[event.reason, event.file, event.line] = cause
    for lane in component.lanes:
        causes.update(lane.tally.causes)
    return list(causes.values())


@dataclasses.dataclass(frozen=True)
class Status(Shown):
    """The status of everything that was handed to `hotloop.compile`; ``str`` makes a table for people."""

    components: dict[str, ComponentStatus]
    skipped: tuple[str, ...] = ()
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        parts = {name: status.to_dict() for name, status in self.components.items()}
        return {"components": parts, "skipped": list(self.skipped), "hint": self.hint}

    def compile_lines(self) -> list[str]:
        """Return lines for people: how often each component's graphs broke and were compiled anew, and where."""
        return [line for name, status in self.components.items() for line in status.compile_lines(name)]

    def __rich__(self) -> Table:
        table = Table(title="hotloop", title_justify="left", show_edge=False)
        for column in ("component", "asked for", "running", "state"):
            table.add_column(column, overflow="fold")
        for column in ("compiles", "graphs run", "eager", "seconds"):
            table.add_column(column, justify="right", overflow="fold")
        table.add_column("why", overflow="fold")
        for name, status in self.components.items():
            table.add_row(*map(Text, status.cells(name)))
        notes = [f"left out: {', '.join(self.skipped)}"] if self.skipped else []
        notes += self.compile_lines()
        skips = [(name, why) for name, status in self.components.items() for why in status.cudagraphs_skipped]
        notes += [f"{name}: no CUDA graph was captured: {why}" for name, why in skips]
        notes += [self.hint] if self.hint else []
        table.caption_justify = "left"
        table.caption = Text("\n".join(notes), style="table.caption") if notes else None
        return table
