"""What a cell of the table says, and of what it is judged: exit codes, printed lines, losses and state."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

ROUNDING = 1e-4
"""Losses this close, relatively, are equal within the rounding of another compiler's arithmetic in 12 steps. So is a
tensor of the state whose elements are this close, relatively to its largest: what cancels out keeps its rounding."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        losses: of all steps; None for one that the program never saw, since its step was interrupted once it was done.
        final: the loss of the trained model.
        state: of the trained model and its optimizer, by name; exact, since JSON's numbers are as long as it takes.
    """

    losses: list[float | None]
    final: float
    state: dict[str, Any]
    ran: str = ""
    status: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault in one way.

    Attributes:
        as_documented: the run did all its steps, or ended as documented for the fault, and its resume did them.
        said: where the fault is named: "printed", "status", "" for nowhere, or "nothing to say".
        equal: "bits", "rounding", or "" where losses or state are others than eager's.
        codes: the exit codes of the processes, in their order.
        line: the line that names the fault.
        ran: how the model ran at the end.
        trouble: what is wrong, where something is.
        raised: why a traceback is right, where one was printed.
    """

    as_documented: bool
    said: str
    equal: str
    codes: tuple[int, ...] = ()
    line: str = ""
    ran: str = ""
    trouble: str = ""
    raised: str = ""

    @property
    def right(self) -> bool:
        return bool(self.as_documented and self.said and self.equal)


def left_by(folder: pathlib.Path, way: str) -> Outcome | None:
    """Return what a run left in its folder; None where there is nothing to read."""
    if not (folder / "state.json").exists():
        return None
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if way != "train":
        path = folder / "result.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        ran = ", ".join(dict.fromkeys(map(str, found["ran"])))
        return Outcome(found["losses"], found["final"], state, ran, found["status"])
    from hotloop import record
    from hotloop.errors import HotloopError

    try:
        document = record.load(folder / "run")
    except (OSError, HotloopError):
        return None
    validations = [one["loss"] for one in document["metrics"] if "loss" in one]
    components = document.get("components") or {}
    ran = [one["running"] for one in components.values()]
    return Outcome(
        [one["loss"] for one in document["steps"]],
        validations[-1] if validations else math.nan,
        state,
        ", ".join(dict.fromkeys(map(str, ran))),
        json.dumps([components, document.get("advice")]),
    )


def equality(ours: Outcome, eager: Outcome, unseen: int = 0) -> str:
    """Say how equal losses and state are: "bits", "rounding", or nothing; so many losses may be unseen."""
    if len(ours.losses) != len(eager.losses) or ours.losses.count(None) > unseen or None in eager.losses:
        return ""
    pairs = [*zip(ours.losses, eager.losses, strict=True), (ours.final, eager.final)]
    pairs = [(one, other) for one, other in pairs if one is not None]
    if all(one == other for one, other in pairs) and json.dumps(ours.state) == json.dumps(eager.state):
        return "bits"
    close = all(math.isclose(one, other, rel_tol=ROUNDING) for one, other in pairs)
    return "rounding" if close and not differing(ours.state, eager.state) else ""


def differing(ours: Mapping[str, Any], eager: Mapping[str, Any]) -> dict[str, float]:
    """Return the tensors of a state that differ by more than rounding, with the distance relative to the largest."""
    found = dict.fromkeys(ours.keys() ^ eager.keys(), math.inf)
    for name in ours.keys() & eager.keys():
        one, other = flat(ours[name]), flat(eager[name])
        largest = max(map(abs, other), default=0.0) or 1.0
        away = [abs(a - b) / largest for a, b in zip(one, other, strict=False)]
        if len(one) != len(other) or not all(each <= ROUNDING for each in away):
            found[name] = max(away, default=math.inf)
    return found


def flat(values: Any) -> list[float]:
    """Return the numbers of nested lists."""
    return [number for one in values for number in flat(one)] if isinstance(values, list) else [values]


def naming(said: str, output: str, status: str) -> tuple[str, str]:
    """Find the line that names the fault; return where it stands, and the line."""
    if not said:
        return "nothing to say", ""
    for place, text in (("printed", output), ("status", status)):
        if found := re.search(said, text):
            start = text.rfind("\n", 0, found.start()) + 1
            end = text.find("\n", found.end())
            return place, " ".join(text[start : end if end >= 0 else None].split())[:400]
    return "", ""


def judge(  # noqa: PLR0913 - each is judged by itself
    ours: Outcome | None,
    eager: Outcome,
    *,
    said: str,
    output: str,
    codes: tuple[int, ...],
    expected: tuple[int, ...],
    runs: str = "",
    unseen: int = 0,
    raises: str = "",
) -> Cell:
    """Judge one run, or a run and its resumes.

    Args:
        ours: what the last process left.
        eager: what the same way left eager and without the fault.
        said: a pattern that names the fault; empty where there is nothing to say.
        output: all that the processes printed.
        codes: their exit codes.
        expected: the exit codes that are documented for this fault.
        runs: what the model has to run in at the end; empty where that is for the fault to say.
        unseen: how many losses the program may not have seen.
        raises: why a traceback is right; empty where none is.
    """
    whole = ours is not None and len(ours.losses) == len(eager.losses)
    as_documented = bool(codes == expected and whole)
    place, line = naming(said, output, ours.status if ours else "")
    equal = equality(ours, eager, unseen) if ours else ""
    trouble = []
    if codes != expected:
        trouble.append(f"exit codes {codes} instead of {expected}")
    if not whole:
        trouble.append(f"{len(ours.losses) if ours else 0} of {len(eager.losses)} steps")
    if not place:
        trouble.append("nothing names the fault")
    if whole and not equal:
        trouble.append(f"losses are not eager's: {ours.losses} {ours.final} instead of {eager.losses} {eager.final}")
        trouble.append(f"state is not eager's: {differing(ours.state, eager.state)}")
    traceback = "Traceback (most recent call last)" in output
    if traceback and not raises:
        as_documented = False
        trouble.append("traceback: " + output[output.index("Traceback (most recent") :].strip().splitlines()[-1][:300])
    if runs and (ours is None or ours.ran != runs):
        as_documented = False
        trouble.append(f"ran {ours.ran if ours else 'nothing'} instead of {runs}")
    return Cell(
        as_documented,
        place,
        equal,
        codes,
        line,
        ours.ran if ours else "",
        "; ".join(trouble),
        raises if traceback else "",
    )
