"""What was asked for and what runs: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import collections
import dataclasses
import io
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotloop import events as ev
from hotloop.compiling.observe import Cause
from hotloop.diagnose import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.compiling.control.component import Component
    from hotloop.compiling.observe import GraphInfo, Tally

State = Literal["pending", "compiled", "partial", "eager", "as-given"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentStatus:
    """The status of one component.

    ``state`` is ``pending`` (not called yet), ``compiled``, ``partial`` (some frame or graph eager or on a lower rung)
    or ``eager``; whenever it is not what was asked for, ``causes`` says why. ``running`` is the preset in force
    (``none`` when eager). Both are ``as-given`` where the user compiled it by torch's own means, which is not counted.
    ``frames_compiled`` and ``frames_eager`` count executions: graphs that ran on a rung above
    ``none``; and graphs that ran on ``none``, or calls that reached no graph. ``compiles`` counts compilations,
    ``compile_seconds`` is their wall-clock time. ``modes`` holds the same counts for training and inference apart,
    and ``calls_per_step``: how often so many calls were made between two optimizer steps.

    ``recompiles`` counts all of them, and ``recompiled`` names the places, with the newest reason of each; the places
    of ``graph_breaks`` are among the ``causes``.

    Under presets with CUDA graphs also, by mode: ``calls_per_mark`` (between two marked steps), ``shapes`` (calls by
    the shapes of their tensors) and ``calls_in_backward`` (made while a backward ran). ``outputs_copied`` and
    ``bytes_copied`` tell what was copied so that it may be held, ``cudagraphs_skipped`` why torch captured no graph.
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

    def to_dict(self) -> dict[str, Any]:
        """Give the status as plain JSON data."""
        data = dataclasses.asdict(self)
        lists = ("regions", "cudagraphs_skipped", "causes", "recompiled")
        return {**data, **{name: list(data[name]) for name in lists}}


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of everything that was handed to `hotloop.compile`; ``str`` gives a table for people."""

    components: dict[str, ComponentStatus]
    skipped: tuple[str, ...] = ()
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Give the status as plain JSON data."""
        parts = {name: status.to_dict() for name, status in self.components.items()}
        return {"components": parts, "skipped": list(self.skipped), "hint": self.hint}

    def compile_lines(self) -> list[str]:
        """Say for people how often each component's graphs broke, and how often it was compiled anew, and where."""
        return [line for name, status in self.components.items() for line in _compile_lines(name, status)]

    def __rich__(self) -> Table:
        table = Table(title="hotloop", title_justify="left", show_edge=False)
        for column in (
            "component",
            "asked for",
            "running",
            "state",
            "compiles",
            "graphs run",
            "eager",
            "seconds",
            "why",
        ):
            table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
        for name, status in self.components.items():
            table.add_row(*(Text(cell) for cell in _cells(name, status)))
        notes = [f"left out: {', '.join(self.skipped)}"] if self.skipped else []
        notes += self.compile_lines()
        notes += [line for name, status in self.components.items() for line in graph_lines(name, status)]
        table.caption_justify = "left"
        table.caption = "\n".join([*notes, *([self.hint] if self.hint else [])]) or None
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, force_terminal=False)
        console.print(self)
        text = console.file
        assert isinstance(text, io.StringIO)
        return text.getvalue().rstrip()


_NUMBERS = ("compiles", "graphs run", "eager", "seconds")
_PLACES = 3
"""Places of graph breaks, and of recompiles, that are named for people."""


def _compile_lines(name: str, status: ComponentStatus) -> list[str]:
    breaks = [_place(cause) or cause.reason for cause in status.causes if cause.stage == ev.GraphBreak.kind]
    anew = [f"{at}: {one.reason}" if (at := _place(one)) else one.reason for one in status.recompiled]
    found = (("graph break", status.graph_breaks, breaks), ("recompile", status.recompiles, anew))
    return [f"{name}: {words.count(many, what)}: {_listed(places)}" for what, many, places in found if many]


def _listed(places: list[str]) -> str:
    left = len(places) - _PLACES
    return "; ".join([*places[:_PLACES], *([f"and {words.count(left, 'more place')}"] if left > 0 else [])])


def _place(cause: Cause) -> str:
    return f"{cause.file}:{cause.line}" if cause.file else ""


def graph_lines(name: str, status: ComponentStatus) -> list[str]:
    """Say for people what a component's CUDA graphs did; nothing where it has none."""
    lines = []
    if status.outputs_copied:
        size = status.bytes_copied / 2**20
        lines.append(f"{name}: {status.outputs_copied:,} outputs of CUDA graphs copied, {size:,.1f} MiB")
    for mode, counts in status.modes.items():
        if (shapes := counts.get("shapes")) and (calls := counts["calls"]):
            most = max(shapes, key=shapes.__getitem__)
            others = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
            pace = ", ".join(f"{times:,} steps of {each}" for each, times in counts["calls_per_step"].items())
            again = f"; {counts['calls_in_backward']:,} inside a backward" if counts["calls_in_backward"] else ""
            lines.append(
                f"{name}, {mode}: {calls:,} calls on {most}{others}{f' ({pace} calls)' if pace else ''}{again}"
            )
    return [*lines, *(f"{name}: no CUDA graph was captured: {reason}" for reason in status.cudagraphs_skipped)]


def _cells(name: str, status: ComponentStatus) -> tuple[str, ...]:
    asked = status.requested if status.inference == status.requested else f"{status.requested} / {status.inference}"
    why = "\n".join(_cause_line(cause) for cause in status.causes)
    numbers = (
        str(status.compiles),
        str(status.frames_compiled),
        str(status.frames_eager),
        f"{status.compile_seconds:.1f}",
    )
    return (name, asked, status.running, status.state, *numbers, why)


def _cause_line(cause: Cause) -> str:
    at = f"{cause.file}:{cause.line}: {cause.source}\n  " if cause.file else ""
    hint = f" ({cause.hint})" if cause.hint else ""
    return f"{at}{cause.reason}{hint}"


def status_of(name: str, component: Component) -> ComponentStatus:
    """Derive a component's status from its two accounts; one that runs inside another has that one's."""
    outer = component.inside() if component.inside is not None else None
    if outer is not None and not any(tally.calls for tally in component.tallies):
        reason = f"it runs inside component {outer.name!r}, and is compiled with it"
        cause = Cause(reason, "inside", None, None, "", f"see the status of {outer.name!r}")
        return dataclasses.replace(status_of(name, outer), requested=component.config.training.name, causes=(cause,))
    tallies = component.tallies
    graphs: collections.Counter[GraphInfo] = collections.Counter()
    for tally in tallies:
        graphs.update(tally.graphs)
    state, running = _state(component, graphs)
    eager_graphs = sum(count for info, count in graphs.items() if info.running == "none")
    return ComponentStatus(
        name=name,
        requested=component.config.training.name,
        inference=component.config.inference.name,
        running=running,
        state=state,
        compiles=_total(tallies, "compiles"),
        frames_compiled=sum(graphs.values()) - eager_graphs,
        frames_eager=eager_graphs + _total(tallies, "eager_calls") + _total(tallies, "healed_calls"),
        recompiles=_total(tallies, "recompiles"),
        graph_breaks=_total(tallies, "graph_breaks"),
        fallbacks=sum(info.fallback is not None for info in graphs),
        causes=tuple(_causes(component, graphs)),
        compile_seconds=sum(tally.compile_seconds for tally in tallies),
        cache_hits=_total(tallies, "cache_hits"),
        cache_misses=_total(tallies, "cache_misses"),
        recompiled=tuple({place: cause for tally in tallies for place, cause in tally.recompiled.items()}.values()),
        regions=tuple(sorted({info.region for info in graphs})),
        outputs_copied=_total(tallies, "copied"),
        bytes_copied=_total(tallies, "copied_bytes"),
        cudagraphs_skipped=tuple(dict.fromkeys(reason for tally in tallies for reason in tally.cudagraphs_skipped)),
        modes={tally.mode: _mode(tally) for tally in tallies},
    )


def _total(tallies: Iterable[Tally], what: str) -> int:
    return sum(getattr(tally, what) for tally in tallies)


def _mode(tally: Tally) -> dict[str, Any]:
    eager = sum(count for info, count in tally.graphs.items() if info.running == "none")
    under_graphs = {
        "calls_per_mark": _pace(tally.per_mark.counts),
        "calls_in_backward": tally.in_backward,
        "shapes": dict(tally.shapes),
    }
    return {
        "calls": tally.calls,
        "frames_compiled": tally.executed - eager,
        "frames_eager": eager + tally.eager_calls + tally.healed_calls,
        "compiles": tally.compiles,
        "recompiles": tally.recompiles,
        "calls_per_step": _pace(tally.per_step.counts),
        **(under_graphs if tally.shapes else {}),
    }


def _pace(counts: collections.Counter[int]) -> dict[str, int]:
    """Give how often there were so many calls between two boundaries; JSON has no numbers for keys."""
    return {str(calls): times for calls, times in sorted(counts.items())}


def _state(component: Component, graphs: collections.Counter[GraphInfo]) -> tuple[State, str]:
    """Give the state and the preset in force, from what was executed."""
    asked = [lane for lane in component.lanes if lane.preset.backend != "eager"]
    if component.disabled or not asked or all(lane.eager for lane in asked):
        return "eager", "none"
    tallies = [lane.tally for lane in asked]
    if not any(tally.calls for tally in tallies):
        return ("eager", "none") if component.said_no_effect else ("pending", asked[0].tally.ladder.current.name)
    compiled = collections.Counter[str]()
    for info, count in graphs.items():
        if info.running != "none":
            compiled[info.running] += count
    if not compiled:
        return "eager", "none"
    requested = {lane.preset.name for lane in asked}
    running = next((name for name in compiled if name in requested), compiled.most_common(1)[0][0])
    whole = (
        all(info.running == info.requested for info in graphs)
        and not any(tally.eager_calls or tally.limited or tally.failures for tally in tallies)
        and not any(lane.eager for lane in asked)
        and not component.said_no_effect
    )
    return ("compiled" if whole else "partial"), running


def _causes(component: Component, graphs: Iterable[GraphInfo]) -> list[Cause]:
    found: dict[tuple[Any, ...], Cause] = {}
    if component.disabled:
        found["disabled",] = Cause(component.disabled, "disabled", None, None, "", "unset it to compile")
    for info in graphs:  # also where another component compiled the graph that this one runs
        if (event := info.fallback) is not None:
            cause = Cause(event.reason, event.stage, event.file, event.line, "", event.hint)
            found[event.reason, event.file, event.line] = cause
    for tally in component.tallies:
        found.update(tally.causes)
    return list(found.values())
