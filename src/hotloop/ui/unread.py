"""Settings of a form that nothing reads beside the others: which, why, and the controls that are grey for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop.train import idle
from hotloop.train.nested import leaves
from hotloop.train.scope import within
from hotloop.ui import compilation, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

INFERENCE = "compile.inference"
COMPONENTS = "compile.components"


class Unread(NamedTuple):
    """A setting that nothing reads.

    Args:
        name: dotted.
        why: in the words of the form; empty where the table of components says it of all of them.
        refused: whether a command would be refused for it.
    """

    name: str
    why: str
    refused: bool


def find(
    values: Mapping[str, Any], names: Iterable[str], components: Sequence[str], varied: Sequence[str]
) -> Iterator[Unread]:
    """Yield what nothing reads of some settings, and of those of the components.

    Args:
        values: all settings as plain data.
        names: of the form's fields.
        components: of the recipe.
        varied: settings, or groups, that a search varies.
    """
    rules, plain = idle.unread(values, varied), dict(leaves(values))
    in_table = (INFERENCE, *(f"{COMPONENTS}.{one}.{lane}" for one in components for lane in ("training", "inference")))
    for name in (*names, *in_table):
        own = [rule for rule in rules if within(name, rule.names)]
        if not own:
            continue
        why = f"not used {own[0].because(plain)}"
        if any(compilation.COMPILE in rule.on for rule in own):
            why = "" if name in in_table else f"not used with {compilation.label(compilation.mode_of(values))}"
        elif name in in_table:
            why = why.partition(": ")[0]
        yield Unread(name, why, any(rule.refused for rule in own))


def controls(names: Iterable[str], rows: Sequence[ranges.Row]) -> Iterator[str]:
    """Yield the ids of the controls of settings; ``rows`` are the ranges of a search in the form."""
    for name in names:
        if name == ranges.SPACE:
            yield "range-add"
            yield from (f"range-{row.number}-{part}" for row in rows for part in ranges.PARTS)
        elif name == INFERENCE:
            yield "inference"
        elif name.startswith(f"{COMPONENTS}."):
            part, lane = name.removeprefix(f"{COMPONENTS}.").split(".")
            yield from (f"part-{part}", f"part-mode-{part}") if lane == "training" else (f"part-inference-{part}",)
        else:
            yield f"f-{name}"
