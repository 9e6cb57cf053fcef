"""Before a compile is spent: what the batches to come say about buckets and shapes, and whether an odd shape pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotloop.decide import odd_pays, remaining
from hotloop.errors import ConfigError
from hotloop.step.calls.preview import look

if TYPE_CHECKING:
    from hotloop.step.calls.buckets import Buckets
    from hotloop.step.calls.shapes import Shapes
    from hotloop.step.context import Context

Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""What is done to a call's arguments before the step gets them: declared padding."""


def choose_buckets(context: Context, buckets: Buckets, prepare: Prepare, batches: Any) -> None:
    """Choose the sizes of buckets that were declared without, from batches of the run.

    Raises:
        ConfigError: the batches cannot be read ahead, or an argument does not fit its bucket.
    """
    if not (names := buckets.without_sizes):
        return

    def visit(args: tuple[Any, ...]) -> None:
        prepare(args, {})  # buckets without sizes count the sizes that they get

    preview = look(batches, visit)
    if preview.why_not:
        raise ConfigError(f"buckets[{names[0]!r}] has no sizes, and {preview.why_not}: give to=(64, 128)")
    for line in buckets.choose():
        context.reports.decided(line, {"action": "buckets", "looked_at": preview.read})


def look_ahead(  # noqa: PLR0913 - of a loop, of a step, of the settings: each is told once
    context: Context, name: str, shapes: Shapes, prepare: Prepare, batches: Any, *, declared_shapes: int = 0
) -> None:
    """Read some of a run's batches, and decide what to do about their shapes.

    Args:
        context: of the loop.
        name: the step's.
        shapes: of the step's calls.
        prepare: pads a call's arguments.
        batches: what the run's batches come from.
        declared_shapes: how many sizes of batches the user chose beforehand; 0 where not told.
    """

    def visit(args: tuple[Any, ...]) -> None:
        try:
            shapes.see_ahead(*prepare(args, {}))
        except (ConfigError, TypeError):  # the step takes other arguments than a batch: `Shapes.fits` will say so
            shapes.see_ahead(args, {})

    preview = look(batches, visit)
    plan = shapes.decide(declared_shapes)
    if plan is None:
        context.reports.say_once(f"{name}: the batches were not looked at: {preview.why_not}")
        return
    context.compiled.static |= plan.own_code
    numbers = {"action": "shapes", "choice": plan.choice, "looked_at": preview.read}
    context.reports.decided(f"shapes: {plan.reason}", numbers)
    if advice := shapes.advice_ahead():
        context.reports.say_once(advice)


def worth_a_compile(context: Context, share: float) -> bool:
    """Return whether code for a shape with this share of the steps saves more than it takes; True where unknown."""
    progress = context.progress
    usual = context.reports.seconds_of(context.base_tier.name)
    fast = context.reports.seconds_of(progress.tier.name)
    if usual is None or fast is None:
        return True
    left = remaining(progress.steps, context.total_steps).steps
    return odd_pays(share, left, usual - fast, context.compiled.seconds())
