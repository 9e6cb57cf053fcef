"""Rules about an eager step that was measured in another form, which the user can have by a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.diagnose.rule import Case, number, overlap
from hotloop.diagnose.slower_preset import NOISE
from hotloop.diagnose.words import figure

if TYPE_CHECKING:
    from hotloop.diagnose.rule import Advice, Problem


def faster(case: Case, name: str, problem: Problem, how: str, *, beside_asked: bool = False) -> Advice | None:
    """Return advice where a way was measured to be faster than eager; None where it was not, or not measured.

    Args:
        case: the run.
        name: of the way.
        problem: whose words the advice takes.
        how: the way in words: "an eager step takes 3 ms HOW, 4 as it is".
        beside_asked: the way has to be faster than the preset that was asked for as well, which gives the same.
    """
    figures, eager = case.way(name), case.way("eager")
    took, plain = number(figures.get("step_ms")), number(eager.get("step_ms"))
    if took is None or plain is None:
        return None
    speed = number(figures.get("speed"))
    if speed is None and overlap(figures, eager):
        return None
    if speed is not None:  # measured in pairs, which tells where batches differ in size
        if figures.get("difference") != "faster":
            return None
        took = plain / speed
    asked = number(case.way(str(case.settings.get("run"))).get("step_ms")) if beside_asked else None
    bound = min(plain, asked or plain)
    if took * NOISE >= bound:
        return None
    return problem.advice(
        f"an eager step takes {figure(took)} ms {how}, {figure(plain)} as it is: {figure(plain / took)} times as fast",
        milliseconds=bound - took,
        **place_in(figures),
    )


def place_in(figures: Any) -> dict[str, Any]:
    """Return file, line and source that figures of a record name, as fields of an advice; empty without."""
    file, line, source = (figures.get(key) for key in ("file", "line", "source"))
    if not isinstance(file, str) or type(line) is not int:
        return {}
    return {"file": file, "line": line, "source": source if isinstance(source, str) else ""}
