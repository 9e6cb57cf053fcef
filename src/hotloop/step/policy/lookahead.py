"""Before a compile is spent: what the batches to come say about buckets and shapes, and whether an odd shape pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotloop.decide import odd_pays, remaining
from hotloop.errors import ConfigError
from hotloop.step.calls.preview import look

if TYPE_CHECKING:
    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner

Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""What is done to a call's arguments before the step gets them: declared padding."""


def choose_buckets(loop: Loop, prepare: Prepare, batches: Any) -> None:
    """Choose the sizes of buckets that were declared without, from batches of the run.

    Raises:
        ConfigError: the batches cannot be looked at, or an argument is not what its bucket says.
    """
    if not (names := loop.buckets.without_sizes):
        return

    def visit(args: tuple[Any, ...]) -> None:
        prepare(args, {})  # buckets without sizes take note of what they get

    looked = look(batches, visit)
    if looked.why_not:
        raise ConfigError(f"buckets[{names[0]!r}] has no sizes, and {looked.why_not}: give to=(64, 128)")
    for line in loop.buckets.choose():
        loop.decided(line, {"action": "buckets", "looked_at": looked.read})


def look_ahead(loop: Loop, runner: Runner, prepare: Prepare, batches: Any) -> None:
    """Look at some of a run's batches, and decide what to do about their shapes."""
    shapes = runner.shapes

    def visit(args: tuple[Any, ...]) -> None:
        try:
            shapes.see_ahead(*prepare(args, {}))
        except (ConfigError, TypeError):  # the step takes other arguments than a batch is: `Shapes.fits` will tell
            shapes.see_ahead(args, {})

    looked = look(batches, visit)
    plan = shapes.decide(loop.declared)
    if plan is None:
        loop.say_once(f"{runner.name}: the batches were not looked at: {looked.why_not}")
        return
    loop.compiled.static |= plan.own_code
    loop.decided(f"shapes: {plan.reason}", {"action": "shapes", "choice": plan.choice, "looked_at": looked.read})
    if advice := shapes.advice_ahead():
        loop.say_once(advice)


def worth_a_compile(loop: Loop, share: float) -> bool:
    """Tell whether code for a shape with so large a share of the steps saves more than it takes; True if unknown."""
    given, there = (loop.account.tiers.get(name) for name in (loop.given, loop.goal.name))
    usual, fast = given.seconds if given else None, there.seconds if there else None
    if usual is None or fast is None:
        return True
    left = remaining(loop.steps, loop.total_steps).steps
    return odd_pays(share, left, usual - fast, loop.compiled.seconds())
