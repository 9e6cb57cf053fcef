"""The verdict of `hotloop.verify`: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.measure import RATIO

if TYPE_CHECKING:
    from hotloop.measure import Comparison
    from hotloop.step.prove.culprit import Culprit

_ROWS = 8
_WIDTH = 140


@dataclasses.dataclass(frozen=True)
class Worst:
    """One measure of one tensor, beside its limit.

    Args:
        kind: result, gradient, update (of a parameter by the optimizer) or buffer.
        name: the tensor.
        measure: slope, residual, relative, error ratio; or finite, missing, shape, dtype, which have no numbers.
        value: the measure; None where it is not a finite number.
        limit: what a right compile may have.
        nearness: value over limit; above 1 it failed.
    """

    kind: str
    name: str
    measure: str
    value: float | None
    limit: float | None
    nearness: float
    says: str = ""


@dataclasses.dataclass(frozen=True)
class StepVerdict:
    """One step: whether it agreed by itself, its worst tensor, and what did not agree."""

    step: int
    agrees: bool
    worst: str
    why: str = ""
    reference: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether compiled code trains as eager does; ``str`` is a table for people.

    Args:
        passes: nothing is past its limit over all steps, and something ran compiled.
        preset: what was verified.
        compute_dtype: what the step multiplies matrices in: float32, tf32, bfloat16, float16 or float64.
        reference: what both were held against: float64, float32, or eager (then it alone is the measure).
        reference_why: why it was no wider one; empty where it is float64.
        steps: each step by itself. A step may be past a limit by chance where there are few bits; all together tell.
        worst: the measures nearest to their limits or past them, over all steps, the worst first.
        why: what is wrong, in one line; empty where it passes.
        visible: the factor by which a typical gradient would have to be wrong to be seen: 0.001 is 0.1%. None where no
            gradient was judged alone.
        ran: what ran compiled: the state of each component, as `hotloop.status` gives it.
        blamed: the region at fault; None where it passes or was not searched for.
        seconds: what all of it took.
        copied_bytes: the largest copy of the state that was held.
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
    copied_bytes: int = 0
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Give the verdict as plain JSON data."""
        plain = dataclasses.asdict(dataclasses.replace(self, blamed=None))
        worst = [{**one, "nearness": _finite(one["nearness"])} for one in plain["worst"]]
        return {**plain, "worst": worst, "blamed": self.blamed.to_dict() if self.blamed is not None else None}

    def __rich__(self) -> Group:
        lines: list[RenderableType] = [Text.assemble(("hotloop verify: ", "bold"), *self._headline())]
        if self.why:
            lines.append(Text(self.why))
        if self.blamed is not None:
            lines.append(Text(f"at fault: {self.blamed}", style="bold"))
        lines += [self._table(), *map(Text, self._notes())]
        return Group(*lines)

    def _headline(self) -> list[tuple[str, str]]:
        agreed = sum(one.agrees for one in self.steps)
        steps = f" over {len(self.steps)} steps in {self.compute_dtype} ({agreed} agree by themselves)"
        word = ("passes", "bold green") if self.passes else ("fails", "bold red")
        return [(f"{self.preset} ", "bold"), word, (steps, "")]

    def _table(self) -> Table:
        table = Table(show_edge=False)
        for column in ("tensor", "of", "measure", "value", "limit", "of its limit"):
            right = column in ("value", "limit", "of its limit")
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        shown: dict[tuple[str, str], Worst] = {}
        for one in self.worst:  # of each tensor the worst measure
            shown.setdefault((one.kind, one.name), one)
        for one in list(shown.values())[:_ROWS]:
            style = "red" if one.nearness > 1 else ""
            row = (
                _plain(one),
                one.kind,
                one.measure,
                _number(one),
                _text(one.limit, one.measure),
                _share(one.nearness),
            )
            table.add_row(*(Text(each, style=style) for each in row))
        return table

    def _notes(self) -> list[str]:
        against = {
            "float64": "eager, and the same steps in float64",
            "float32": "eager, and the same steps in float32",
        }.get(self.reference, "eager alone")
        notes = [f"held against {against}" + (f": {self.reference_why}" if self.reference_why else "")]
        if self.visible is not None:
            notes.append(f"smallest wrong factor seen in a typical gradient: {self.visible:.1e}")
        states = [f"{name} {one.get('state', '')} ({one.get('running', '')})" for name, one in self.ran.items()]
        notes.append(f"ran: {', '.join(states) or 'nothing compiled'}")
        notes.append(f"{self.seconds:.1f} s, {self.copied_bytes / 2**20:,.0f} MiB copied")
        return notes

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, force_terminal=False).print(self)
        return text.getvalue().rstrip()


def worst_of(joined: dict[str, Comparison]) -> tuple[Worst, ...]:
    """Rank the measures of all kinds of tensors by how near they are to their limits; what has no limit first."""
    found = []
    for kind, comparison in joined.items():
        judged = {(one.name, one.measure) for one in comparison.scores}
        plain = [one for one in comparison.failures if (one.name, one.measure) not in judged]
        found += [Worst(kind, one.name, one.measure, None, None, float("inf"), str(one)) for one in plain]
        found += [
            Worst(kind, one.name, one.measure, _finite(abs(one.value)), _finite(one.limit), one.nearness)
            for one in comparison.scores
        ]
    return tuple(sorted(found, key=lambda one: -one.nearness)[:_KEPT])


_KEPT = 32


def _plain(one: Worst) -> str:
    """Give a tensor's own name, without what the column beside it says."""
    return one.name.removeprefix(f"{one.kind} of ").removeprefix(f"{one.kind} ").removesuffix(" at the optimizer step")


def _number(one: Worst) -> str:
    return _text(one.value, one.measure) if not one.says else one.says.partition(": ")[2]


def _text(value: float | None, measure: str) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if measure == RATIO else f"{value:.1e}"


def _share(nearness: float) -> str:
    return f"{nearness:.0%}" if nearness < 1e4 else "far past it"  # noqa: PLR2004 - no figure that anybody reads


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
