"""What was asked for and what runs: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from hotloop import events as ev
from hotloop.diagnose import words
from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.compiling.observe import Cause

State = Literal["pending", "compiled", "partial", "eager", "as-given"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentStatus:
    """The status of one component.

    - ``name``: its name in the table and in log lines. Where separate compiles called several components ``model``, the
      class is named as well: ``model (Generator)``.
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

    Under presets with CUDA graphs ``modes`` also holds ``calls_per_mark`` (between two marked steps), ``shapes`` (calls
    by the shapes of their tensors) and ``calls_in_backward`` (made while a backward ran). ``outputs_copied`` and
    ``bytes_copied`` count what was copied so that it may be held; ``cudagraphs_skipped`` says why torch captured no
    graph.
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
        """Return the status as plain JSON data."""
        data = dataclasses.asdict(self)
        lists = ("regions", "cudagraphs_skipped", "causes", "recompiled")
        return {**data, **{name: list(data[name]) for name in lists}}

    def compile_lines(self, name: str) -> list[str]:
        """Return lines for people on the component ``name``: how often its graphs broke, and why it was recompiled."""
        breaks = [cause.location or cause.reason for cause in self.causes if cause.stage == ev.GraphBreak.kind]
        anew = [f"{cause.location}: {cause.reason}" if cause.location else cause.reason for cause in self.recompiled]
        lines = []
        most = 3  # places that are named
        for what, count, places in (("graph break", self.graph_breaks, breaks), ("recompile", self.recompiles, anew)):
            if count:
                left = len(places) - most
                named = [*places[:most], *([f"and {words.count(left, 'more place')}"] if left > 0 else [])]
                lines.append(f"{name}: {words.count(count, what)}: {'; '.join(named)}")
        return lines

    def graph_lines(self, name: str) -> list[str]:
        """Return lines for people on the CUDA graphs of the component ``name``; none where it has none."""
        lines = []
        if self.outputs_copied:
            size = self.bytes_copied / 2**20
            lines.append(f"{name}: {self.outputs_copied:,} outputs of CUDA graphs copied, {size:,.1f} MiB")
        for mode, counts in self.modes.items():
            if (shapes := counts.get("shapes")) and (calls := counts["calls"]):
                most = max(shapes, key=shapes.__getitem__)
                others = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
                paces = ", ".join(f"{times:,} steps of {many}" for many, times in counts["calls_per_step"].items())
                pace = f" ({paces} calls)" if paces else ""
                again = f"; {counts['calls_in_backward']:,} inside a backward" if counts["calls_in_backward"] else ""
                lines.append(f"{name}, {mode}: {calls:,} calls on {most}{others}{pace}{again}")
        return [*lines, *(f"{name}: no CUDA graph was captured: {reason}" for reason in self.cudagraphs_skipped)]

    def cells(self, name: str) -> tuple[str, ...]:
        """Return the component's row of the table."""
        same = self.inference == self.requested
        why = []
        for cause in self.causes:
            at = f"{cause.location}: {cause.source}\n  " if cause.file else ""
            hint = f" ({cause.hint})" if cause.hint else ""
            why.append(f"{at}{cause.reason}{hint}")
        return (
            name,
            self.requested if same else f"{self.requested} / {self.inference}",
            self.running,
            self.state,
            str(self.compiles),
            str(self.frames_compiled),
            str(self.frames_eager),
            f"{self.compile_seconds:.1f}",
            "\n".join(why),
        )


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
        return [line for name, status in self._named() for line in status.compile_lines(name)]

    def _named(self) -> list[tuple[str, ComponentStatus]]:
        """Return each status with its key for a name, or the component's own name where that says more."""
        parts = self.components.items()
        return [(status.name if status.name.startswith(f"{key} (") else key, status) for key, status in parts]

    def __rich__(self) -> Table:
        table = Table(title="hotloop", title_justify="left", show_edge=False)
        for column in ("component", "asked for", "running", "state"):
            table.add_column(column, overflow="fold")
        for column in ("compiles", "graphs run", "eager", "seconds"):
            table.add_column(column, justify="right", overflow="fold")
        table.add_column("why", overflow="fold")
        for name, status in self._named():
            table.add_row(*map(Text, status.cells(name)))
        notes = [f"left out: {', '.join(self.skipped)}"] if self.skipped else []
        notes += self.compile_lines()
        notes += [line for name, status in self._named() for line in status.graph_lines(name)]
        notes += [self.hint] if self.hint else []
        table.caption_justify = "left"
        table.caption = Text("\n".join(notes), style="table.caption") if notes else None
        return table
