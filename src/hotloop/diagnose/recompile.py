"""Recompiles, by what changed: one advice for all recompiles that the same thing caused, with their compiles."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.case import Case, grouped
from hotloop.diagnose.guards import LEFT_BEHIND, Guard, guard_of
from hotloop.diagnose.rule import Found, Problem
from hotloop.diagnose.words import several
from hotloop.report.text import count as counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ONE_MORE = "one more compile"
_recompile = functools.partial(
    Problem,
    rule="recompile",
    cost="one compile for each, up to torch's limit of 8 per function; after that, anything new runs eager",
)

PROBLEMS = (
    _recompile(
        kind="ragged_batch",
        symptom="the last batch of an epoch is smaller",
        cause="code is compiled for exact sizes first. hotloop.compile then adds code for a second batch size and "
        "keeps that of the full batches; torch.compile runs both on one dynamic graph from then on",
        change="nothing if the one compile pays; else drop the odd batch (drop_last=True in the DataLoader), or pad it",
        cost="one more compile; with torch.compile alone also a dynamic graph for all later full batches",
        remedy="odd_batch_eager",
    ),
    _recompile(
        kind="dynamic_lengths",
        symptom="a size varies from batch to batch",
        cause="code is compiled for exact sizes first; torch makes a size dynamic at its second value, and with "
        "dynamic=False it compiles once per size",
        change="mark the size dynamic on the first batch (torch._dynamo.mark_dynamic), or pad to a few sizes",
        cost="one more compile; with dynamic=False one for each size",
        remedy="mark_dynamic",
    ),
    _recompile(
        kind="size_relation",
        symptom="the code depends on a size",
        cause="the model compares, divides or branches on a size, so compiled code is valid for a range of sizes only",
        change="move the branch on the size out of the model, or pad batches so that all fall on one side of it",
        cost="one compile for each range",
        remedy="buckets",
    ),
    _recompile(
        kind="attribute",
        symptom="a value on a module or global changes",
        cause="torch treats what a module or global holds (a number, a flag, a string, None) as a constant, and "
        "compiles once for each value; a float becomes an input at its second value",
        change="keep it as a tensor (a buffer), pass it in as an argument, or set it once before training",
    ),
    _recompile(
        kind="train_eval",
        symptom="the model goes from train() to eval() within one lane",
        cause="modules like Dropout and BatchNorm behave differently then, so each mode has code of its own",
        change="nothing if it happens once; else set the mode once, and evaluate under torch.no_grad(), which has a "
        "lane of its own",
        cost=_ONE_MORE,
    ),
    _recompile(
        kind="setting",
        symptom="a global setting of torch's changes",
        cause="compiled code is valid for torch's settings at the time of its compile: gradient mode, autocast, "
        "threads, deterministic algorithms",
        change="set it once, before the first step; evaluate under torch.no_grad() or torch.inference_mode(), not both",
    ),
    _recompile(
        kind="input",
        symptom="a tensor has another dtype, layout, device or number of dimensions, or needs a gradient",
        cause="code is compiled for exactly such tensors as it saw first",
        change="give each input one form before the model: x.contiguous(), one dtype, one device; freeze layers once",
    ),
    _recompile(
        kind="new_object",
        symptom="a module, function or parameter was replaced by another",
        cause="code is compiled for the very objects that it saw: a new layer, or a class or function that is defined "
        "again, is another object",
        change="change the object in place instead of replacing it, and define classes and functions once, at the top "
        "of a file",
    ),
    _recompile(
        kind="growth",
        symptom="a list, modules or hooks that the model reads are added to",
        cause="a length is a constant of the code, and so are the modules and hooks that exist, adapters among them",
        change="return what you collect, or write into a tensor of fixed size; add layers, adapters and hooks before "
        "the first step",
    ),
    _recompile(
        kind="arguments",
        symptom="arguments of the call that are not tensors change",
        cause="numbers, strings, flags and the lengths of lists are constants of the code; a number becomes an input "
        "at its second value",
        change="pass a tensor if the value varies, and call the model with the same arguments each time",
    ),
    _recompile(
        kind="other",
        symptom="compiled code did not fit",
        cause="something that it depends on has changed",
        change="keep what the guard names the same from call to call",
    ),
)
LIMIT = Problem(
    rule="recompile_limit",
    symptom="a function was compiled as often as torch allows",
    cause="torch compiles one function 8 times at most (torch._dynamo.config.recompile_limit), and runs it "
    "eager for anything unseen after that, silently",
    cost="the compiles that filled the limit, and eager speed for what comes after",
    change="fix what recompiles it: see the advice on recompiles. Do not raise the limit: it hides the cause",
)
_KINDS = {problem.kind: problem for problem in PROBLEMS}
_WHAT = {
    "ragged_batch": "a batch of {last} came where batches had {first} ({subject})",
    "dynamic_lengths": "dimension {dim} of {subject} varies ({values})",
    "size_relation": "the code depends on a size ({subject})",
    "attribute": "{subject} changed (it was {values})",
    "growth": "the length of {subject} changed{was}",
    "arguments": "argument {subject} changed (it was {values})",
    "setting": "torch's setting {subject} changed",
    "input": "{subject} changed{change}",
    "new_object": "{subject} was replaced by another",
    "size": "dimension {dim} of {subject} is another one{change}",
    "other": "compiled code did not fit ({subject})",
}
"""What advice says of a cause; a cause that is not here is told by its symptom."""
_WHOLE = {"setting", "train_eval", "size"}
"""Causes that meet many places of a component at once: a mode, or a size that every frame and argument sees."""


@dataclasses.dataclass
class RecompiledFrame:
    """A recompile with the compiles of its frame, backward among them."""

    event: ev.Recompiled
    compiles: list[ev.Compiled] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds that the compiles took."""
        return sum(compiled.seconds for compiled in self.compiles)

    def is_caused_by(self, broken: ev.GraphBreak) -> bool:
        """Return whether a graph break caused it: a value that the break left behind, or what Lightning's log keeps."""
        if self.event.component != broken.component:
            return False
        if LEFT_BEHIND.search(self.event.reason):
            places = {(broken.file, broken.line), (broken.by_file, broken.by_line)}
            return (self.event.file, resumed_at(self.event.function)) in places
        return "_ResultCollection.log" in broken.reason and "_results" in self.event.reason


def recompiles(case: Case) -> list[RecompiledFrame]:
    """Return every recompile with the compiles of the same frame.

    They follow the recompile; if a batch size got code of its own, they come before it.
    """
    found: list[RecompiledFrame] = []
    latest: dict[tuple[str | None, str], RecompiledFrame] = {}
    before: dict[tuple[str | None, str], list[ev.Compiled]] = {}
    for event in case.events:
        if isinstance(event, ev.Recompiled):
            key = event.component, event.frame
            found.append(RecompiledFrame(event, before.pop(key, [])))
            if event.frame:
                latest[key] = found[-1]
        elif isinstance(event, ev.Compiled) and event.frame:
            key = event.component, event.frame
            owner = latest.get(key)
            (owner.compiles if owner else before.setdefault(key, [])).append(event)
    return found


def count(recompiled: Iterable[RecompiledFrame]) -> int:
    """Return how many times code was compiled; a backward counts as one with its forward."""
    return sum(max(1, sum(compiled.phase == "forward" for compiled in frame.compiles)) for frame in recompiled)


def resumed_at(function: str) -> int | None:
    """Return the line of the graph break behind which a function goes on; None for any other function."""
    resumed = re.match(r"^torch_dynamo_resume_in_.*_at_(?P<line>\d+)$", function)
    return int(resumed["line"]) if resumed else None


Group = list[tuple[RecompiledFrame, Guard]]


def find(case: Case) -> Found:
    """Yield one advice per thing that changed."""
    for kind, group in groups(case):
        first = next((frame.event for frame, _ in group if frame.event.file), group[0][0].event)
        guards = [guard for _, guard in group]
        yield problem_of(kind).advice(
            f"{changed(kind, guards)}: {counted(len(guards), 'recompile')}",
            **case.place(first),
            times=len(group),
            compiles=count(frame for frame, _ in group),
            seconds=sum(frame.seconds for frame, _ in group),
        )


def find_limits(case: Case) -> Found:
    """Yield one advice per function that reached torch's limit, with what recompiled it most."""
    known = [(kind, [frame.event for frame, _ in group]) for kind, group in groups(case)]
    for group in grouped(case.of(ev.RecompileLimit), lambda event: (event.component, event.function)):
        limited, what = group[0], f"{group[0].function} was compiled as often as torch allows"
        here = [(kind, [one for one in events if _is_of(one, limited)]) for kind, events in known]
        kind, events = max(here, key=lambda item: len(item[1]), default=("", []))
        if not events:
            yield LIMIT.advice(what, **case.place(limited), times=len(group))
            continue
        cause = problem_of(kind)
        yield LIMIT.advice(
            f"{what}; {counted(len(events), 'recompile')} came from one thing: {cause.symptom}",
            **case.place(events[0]),
            times=len(group),
            change=f"{cause.change}. Do not raise the limit: it hides the cause",
            remedy=cause.remedy,
        )


def _is_of(event: ev.Recompiled, limited: ev.RecompileLimit) -> bool:
    return (event.component, event.function) == (limited.component, limited.function)


def groups(case: Case) -> list[tuple[str, Group]]:
    """Return each thing that changed, by its kind in the catalogue, with the recompiles that it caused."""
    breaks = case.of(ev.GraphBreak)  # their advice counts the recompiles that they cause
    frames = [frame for frame in recompiles(case) if not any(map(frame.is_caused_by, breaks))]
    found = grouped([(frame, guard_of(frame.event)) for frame in frames], _key)
    return [(_kind([guard for _, guard in group]), group) for group in found]


def _key(item: tuple[RecompiledFrame, Guard]) -> tuple[object, ...]:
    frame, guard = item
    subject = guard.dim if guard.cause == "size" else "" if guard.cause in _WHOLE else guard.subject
    return frame.event.component, guard.cause, subject


def _kind(guards: list[Guard]) -> str:
    """Return the kind of what changed. torch names the first two sizes only: a smaller second is an odd batch's."""
    if guards[0].cause != "size":
        return guards[0].cause
    sizes = {value for guard in guards for value in guard.values}
    odd = guards[0].dim == 0 and len(sizes) == 2 and all(_became_smaller(guard.values) for guard in guards)  # noqa: PLR2004 - the usual size and the odd one
    return "ragged_batch" if odd else "dynamic_lengths"


def _became_smaller(sizes: Sequence[str]) -> bool:
    """Return whether the second of two sizes is the smaller one, or 1."""
    before, after = (*sizes, "", "")[:2]
    return after == "1" or (before.isdigit() and after.isdigit() and int(after) < int(before))


def problem_of(kind: str) -> Problem:
    """Return the problem behind a cause."""
    return _KINDS.get(kind, PROBLEMS[-1])


def changed(kind: str, guards: Sequence[Guard]) -> str:
    """Say what changed, with the values in torch's guards."""
    values = [value for guard in guards for value in guard.values]
    subject = several(guard.subject for guard in guards if guard.subject)
    if kind == "arguments" and subject in ("args", "kwargs"):
        return "the call has other arguments than before"
    return _WHAT.get(kind, problem_of(kind).symptom).format(
        subject=subject,
        values=several(values) or "not empty",
        was=f" (it was {several(values)})" if values else "",
        change=f" ({values[0]} to {values[1]})" if len(values) > 1 else "",
        first=values[0] if values else "another size",
        last=values[-1] if values else "another size",
        dim=guards[0].dim,
    )


def words_of(event: ev.Recompiled) -> tuple[str, str]:
    """Return what one recompile says has changed, and what to change."""
    guard = guard_of(event)
    # Only further recompiles show whether a size is a ragged batch or a length, and what a break left behind.
    alone = {"size": "dynamic_lengths", "break_value": "other"}
    return changed(guard.cause, [guard]), problem_of(alone.get(guard.cause, guard.cause)).change
