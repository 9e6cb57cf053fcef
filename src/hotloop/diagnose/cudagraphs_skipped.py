"""CUDA graphs were asked for inside torch.compile, and Inductor left them out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "cudagraphs_skipped"
_COST = "these graphs are launched kernel by kernel, at the speed of preset default"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*(?:\n\s*([^\n]+))?')
_TORCHS = re.compile(r"[/\\]torch[/\\]")


def _problem(kind: str, symptom: str, cause: str, change: str) -> Problem:
    return Problem(rule=RULE, kind=kind, symptom=symptom, cause=cause, cost=_COST, change=change, remedy="tier")


PROBLEMS = (
    _problem(
        "cpu",
        "a tensor on the CPU keeps CUDA graphs out",
        "a CUDA graph holds GPU work only, and the model computes with a tensor on the CPU",
        "make the tensor on the GPU (device=x.device), or move it there once, outside the model",
    ),
    _problem(
        "devices",
        "tensors on several devices keep CUDA graphs out",
        "a CUDA graph is one device's",
        "keep each compiled component on one device",
    ),
    _problem(
        "mutation",
        "an input that is changed in place keeps CUDA graphs out",
        "the graph would change its own copy of the input, not the caller's",
        "copy the input inside the model before it is changed, or hold it as a buffer of the module",
    ),
    _problem(
        "dynamic",
        "dynamic shapes keep CUDA graphs out",
        "a CUDA graph is for exact sizes",
        "pad to a few sizes and compile with dynamic=False",
    ),
    _problem(
        "operator",
        "an operator keeps CUDA graphs out",
        "the operator waits for the host or depends on values, which a replay cannot do",
        "replace the operator (a mask instead of boolean indexing, torch.where instead of cond), or move it out of the "
        "model",
    ),
    _problem(
        "other",
        "CUDA graphs were left out",
        "Inductor names the reason",
        "mend what the reason names, or ask for preset default, which does without",
    ),
)
_BY_KIND = {problem.kind: problem for problem in PROBLEMS}
_WORDS = (
    ("cpu device", "cpu"),
    ("multiple devices", "devices"),
    ("mutated inputs", "mutation"),
    ("input storage mutation", "mutation"),
    ("symbolic shapes", "dynamic"),
    ("dynamic", "dynamic"),
    ("incompatible op", "operator"),
    ("control flow operator", "operator"),
    ("index_put_", "operator"),
    ("sparsity", "operator"),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a reason and place."""
    groups: dict[tuple[object, ...], list[ev.Compiled]] = {}
    for event in case.of(ev.Compiled):
        if event.cudagraphs_skipped:
            key = (event.component, kind_of(event.cudagraphs_skipped), *_place(event.cudagraphs_skipped))
            groups.setdefault(key, []).append(event)
    for (component, kind, *place), group in groups.items():
        reason = (group[0].cudagraphs_skipped or "").split("Found from")[0].strip().rstrip(".")
        yield _BY_KIND[str(kind)].advice(
            f"CUDA graphs were left out of {count(len(group), 'graph')}: {reason}",
            component=component,
            **dict(zip(("file", "line", "source"), place, strict=True)),
            times=len(group),
        )


def kind_of(reason: str) -> str:
    """Give the problem behind torch's reason."""
    return next((kind for word, kind in _WORDS if word in reason), "other")


def _place(reason: str) -> tuple[str | None, int | None, str]:
    """Give the innermost line of the stack in the reason that is not torch's."""
    own = [found for found in _FRAME.findall(reason) if not _TORCHS.search(found[0])]
    return (own[-1][0], int(own[-1][1]), own[-1][2].strip()) if own else (None, None, "")
