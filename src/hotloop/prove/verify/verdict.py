"""The verdict of `hotloop.verify`: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.measure import RATIO
from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.measure import Comparison
    from hotloop.prove.verify.culprit import Culprit

_ROWS = 8
_KEPT = 32


@dataclasses.dataclass(frozen=True)
class Worst:
    """A measure of a tensor, with its limit.

    Args:
        kind: result, gradient, update (of a parameter by the optimizer) or buffer.
        name: of the tensor.
        measure: slope, residual, relative, error ratio; or finite, missing, shape, dtype, which have no numbers.
        value: of the measure; None if it is not a finite number.
        limit: the largest value of a right compile.
        nearness: value over limit; above 1 it failed.
        says: for a measure without numbers, the failure as text.
    """

    kind: str
    name: str
    measure: str
    value: float | None
    limit: float | None
    nearness: float
    says: str = ""

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table, the tensor's name without what the column beside it says."""
        name = self.name.removeprefix(f"{self.kind} of ").removeprefix(f"{self.kind} ")
        number = ".1f" if self.measure == RATIO else ".1e"
        value = "" if self.value is None else format(self.value, number)
        return (
            name.removesuffix(" at the optimizer step"),
            self.kind,
            self.measure,
            self.says.partition(": ")[2] if self.says else value,
            "" if self.limit is None else format(self.limit, number),
            f"{self.nearness:.0%}" if self.nearness < 1e4 else "far past it",  # noqa: PLR2004 - nobody reads beyond
        )


@dataclasses.dataclass(frozen=True)
class StepVerdict:
    """The verdict on a single step: whether it agrees, its worst tensor, and why it does not agree."""

    step: int
    agrees: bool
    worst: str
    why: str = ""
    reference: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict(Shown):
    """Whether compiled code trains as eager does; ``str`` is a table for people.

    Args:
        passes: nothing is past its limit over all steps, and something ran compiled.
        preset: the preset or tier that was verified.
        compute_dtype: of the step's matrix products: float32, tf32, bfloat16, float16 or float64.
        reference: both were compared with float64, float32, or eager (then eager alone is the measure).
        reference_why: why the reference is not wider; empty if it is float64.
        steps: each step by itself. With few bits one step may be past a limit by chance; all steps together decide.
        worst: the measures nearest to their limits or past them, over all steps, the worst first.
        why: the fault in one line; empty if it passes.
        visible: the smallest wrong factor that is seen in a typical gradient: 0.001 is 0.1%. None if no gradient was
            judged alone.
        ran: the state of each compiled component, as `hotloop.status` gives it.
        blamed: the region at fault; None if it passes or was not searched for.
        seconds: of the whole verification.
        environment: versions and device.
    """

    passes: bool
    preset: str
    compute_dtype: str
    reference: str
    reference_why: str
    steps: tuple[StepVerdict, ...]
    worst: tuple[Worst, ...]
    why: str
    visible: float | None
    ran: dict[str, Any]
    blamed: Culprit | None = None
    seconds: float = 0.0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain JSON data."""
        plain = dataclasses.asdict(dataclasses.replace(self, blamed=None))
        worst = [{**measure, "nearness": _finite(measure["nearness"])} for measure in plain["worst"]]
        return {**plain, "worst": worst, "blamed": self.blamed.to_dict() if self.blamed is not None else None}

    def __rich__(self) -> Group:
        lines: list[RenderableType] = [Text.assemble(("hotloop verify: ", "bold"), *self._headline())]
        if self.why:
            lines.append(Text(self.why))
        if self.blamed is not None:
            lines.append(Text(f"at fault: {self.blamed}", style="bold"))
        return Group(*lines, self._table(), *map(Text, self._notes()))

    def _headline(self) -> list[tuple[str, str]]:
        agreed = sum(step.agrees for step in self.steps)
        steps = f" over {len(self.steps)} steps in {self.compute_dtype} ({agreed} agree by themselves)"
        word = ("passes", "bold green") if self.passes else ("fails", "bold red")
        return [(f"{self.preset} ", "bold"), word, (steps, "")]

    def _table(self) -> Table:
        table = Table(show_edge=False)
        for column in ("tensor", "of", "measure", "value", "limit", "of its limit"):
            right = column in ("value", "limit", "of its limit")
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        shown: dict[tuple[str, str], Worst] = {}
        for worst in self.worst:  # of each tensor the worst measure
            shown.setdefault((worst.kind, worst.name), worst)
        for worst in list(shown.values())[:_ROWS]:
            style = "red" if worst.nearness > 1 else ""
            table.add_row(*(Text(cell, style=style) for cell in worst.row()))
        return table

    def _notes(self) -> list[str]:
        against = "eager alone" if self.reference == "eager" else f"eager, and the same steps in {self.reference}"
        notes = [f"held against {against}" + (f": {self.reference_why}" if self.reference_why else "")]
        if self.visible is not None:
            notes.append(f"smallest wrong factor seen in a typical gradient: {self.visible:.1e}")
        states = [f"{name} {part.get('state', '')} ({part.get('running', '')})" for name, part in self.ran.items()]
        notes.append(f"ran: {', '.join(states) or 'nothing compiled'}")
        notes.append(f"{self.seconds:.1f} s")
        return notes


def worst_of(joined: dict[str, Comparison]) -> tuple[Worst, ...]:
    """Rank the measures of all kinds of tensors by how near their limits they are; failures without a limit first."""
    ranked = []
    for kind, comparison in joined.items():
        judged = {(score.name, score.measure) for score in comparison.scores}
        plain = [failure for failure in comparison.failures if (failure.name, failure.measure) not in judged]
        ranked += [Worst(kind, one.name, one.measure, None, None, float("inf"), str(one)) for one in plain]
        for score in comparison.scores:
            value, limit = _finite(abs(score.value)), _finite(score.limit)
            ranked.append(Worst(kind, score.name, score.measure, value, limit, score.nearness))
    return tuple(sorted(ranked, key=lambda worst: -worst.nearness)[:_KEPT])


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
