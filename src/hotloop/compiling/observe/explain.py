"""From torch's own words to events and one-line messages in the user's terms."""

from __future__ import annotations

import linecache
import re
import textwrap
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch.graphs import is_user_file, last_user_frame
from hotloop._torch.module import Inlined, root_name
from hotloop.diagnose import breaks, observed
from hotloop.diagnose.recompile import words_of
from hotloop.diagnose.switches import switch_for

if TYPE_CHECKING:
    from hotloop._torch.dynamo import Break, Metric

_Place = tuple[str | None, int | None]


def metric_events(metric: Metric, component: str | None) -> list[ev.Event]:
    """Return the events that one of torch's metrics stands for: a failure, or a recompile and a compile.

    Args:
        metric: the metric.
        component: whose compile it was; None outside hotloop's own.
    """
    root = root_name(metric.function)  # a component's entry is no line of the user's
    own = root is None and metric.file is not None and is_user_file(metric.file)
    place: _Place = (metric.file, metric.line) if own else (None, None)
    function = root or metric.function or "?"
    if metric.fail_type:
        return [_failed(metric, component, function, place, whole=root is not None)]
    events: list[ev.Event] = []
    if metric.recompile_reason:
        nth = metric.frame.partition("/")[2]
        events.append(
            _recompiled(
                metric.function,
                clean_guard(metric.recompile_reason),
                last_user_frame(metric.recompile_reason) or place,  # torch adds the stack to the first guard of a kind
                component=component,
                function=function,
                nth=int(nth) if nth.isdecimal() else 0,
                frame=metric.frame,
            )
        )
    if (metric.has_code and metric.ops) or not metric.is_forward:  # code without operations holds no graph
        compiled = ev.Compiled(
            component=component,
            frame=metric.frame,
            function=function,
            phase="forward" if metric.is_forward else "backward",
            seconds=metric.seconds,
            ops=metric.ops,
            guards=metric.guards,
            cache_hits=metric.cache_hits,
            cache_misses=metric.cache_misses,
            cudagraphs_skipped=metric.cudagraphs_skipped,
            file=place[0],
            line=place[1],
        )
        events.append(compiled)
    return events


def _failed(metric: Metric, component: str | None, function: str, place: _Place, *, whole: bool) -> ev.Event:
    text = metric.fail_reason or str(metric.fail_type)
    if "recompile_limit" in text or metric.fail_type == "FailOnRecompileLimitHit":
        reason = f"{function} was compiled as often as torch's recompile limit allows; unseen inputs run eager"
        return _limit(component, function, reason, place, whole=whole)
    if metric.fail_file and is_user_file(metric.fail_file):
        place = metric.fail_file, metric.fail_line
    file, line = last_user_frame(text) or place
    return ev.FrameEager(
        component=component,
        function=function,
        stage="trace",
        file=file,
        line=line,
        reason=f"{metric.fail_type}: {_summary(text)}",
        hint=hint_of(text, _source(file, line), file),
        source=_source(file, line),
    )


def _limit(component: str | None, function: str, reason: str, place: _Place, *, whole: bool) -> ev.RecompileLimit:
    file, line = place
    return ev.RecompileLimit(component=component, function=function, whole=whole, file=file, line=line, reason=reason)


def recomputed_limit(component: str, function: str) -> ev.RecompileLimit:
    """Return the event of code that checkpointed forwards had compiled as often as torch's recompile limit allows."""
    reason = (
        f"{function} was compiled as often as torch's recompile limit allows, in recomputations of checkpointed "
        "forwards (it changes with each call); it runs eager"
    )
    return _limit(component, function, reason, (None, None), whole=True)


def _recompiled(root: str | None, reason: str, place: _Place, **fields: Any) -> ev.Recompiled:
    """Return the event of a recompile, with a root's arguments named as the function that it calls names them."""
    inlined = Inlined.by_root.get(root or "")
    if inlined is not None:
        names = dict(enumerate(inlined.parameters))
        reason = re.sub(r"\bargs\[(\d+)\]", lambda match: names.get(int(match[1]), match[0]), reason)
        if place[0] is None and is_user_file(inlined.file):
            place = inlined.file, inlined.line
    file, line = place
    return ev.Recompiled(reason=reason, file=file, line=line, source=_source(file, line), **fields)


def new_size(root: str, reason: str, **fields: Any) -> ev.Recompiled:
    """Return the event of a batch size that gets code of its own, which costs as much as a recompile.

    ``root`` is the name of the root function that the code belongs to.
    """
    return _recompiled(root, reason, (None, None), **fields)


def break_event(entry: Break, component: str | None) -> ev.GraphBreak:
    """Return the event of a graph break."""
    return ev.GraphBreak(
        component=component,
        file=entry.file,
        line=entry.line,
        source=entry.source,
        reason=_summary(entry.reason),
        hint=hint_of(entry.reason, entry.source, entry.file),
        by_file=entry.by_file,
        by_line=entry.by_line,
        by_source=entry.by_source,
    )


def no_effect(problem: str, component: str | None, reason: str, **fields: Any) -> ev.NoEffect:
    """Return the event of a compile that takes no effect, with the catalogue's cure of the problem for its hint."""
    hint = observed.no_effect(problem).change
    return ev.NoEffect(component=component, problem=problem, reason=reason, hint=hint, **fields)


def _source(file: str | None, line: int | None) -> str:
    return linecache.getline(file, line).strip() if file and line else ""


def _summary(text: str) -> str:
    """Return the first line that says something, with torch's explanation where it has one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if not re.match(r"^backend='.*' raised:$", line)), "unknown")
    explained = re.search(r"Explanation: (.*)", text)
    full = f"{first}: {explained[1].strip()}" if explained and explained[1] not in first else first
    return textwrap.shorten(full.rstrip("."), 300, placeholder=" ...")


def hint_of(text: str, source: str = "", file: str | None = None) -> str:
    """Return how to mend a break or failure: the cure in our catalogue, else torch's first hint.

    Args:
        text: torch's words.
        source: the line.
        file: the line's file; where a library reads a value that an argument spares, that argument is the cure.
    """
    problem = breaks.cause_of(_summary(text), source)  # without torch's hints, which name other causes too
    if problem.kind in ("item", "branch") and (switch := switch_for(file or "", source)):
        return switch
    hint = re.search(r"Hint: (.*)", text) if problem.kind == "other" else None
    return hint[1].strip() if hint else problem.change


def clean_guard(reason: str) -> str:
    """Return the failed guard of the newest compiled version, without torch's numbering, comment and advice."""
    lines = [re.sub(r"^\s*-?\s*\d+/\d+:\s*", "", line).strip() for line in reason.splitlines() if line.strip()]
    if not lines:
        return "unknown"
    guard = re.split(r"\s{2,}#\s", lines[0])[0]
    return " ".join(re.sub(r"\. Guard failed on a parameter, .*", "", guard).split())


def log_key(event: ev.Event) -> tuple[str, ...]:
    """Return a key that equal events share, so that each reason is logged once."""
    reason = re.sub(r"\d+", "#", str(getattr(event, "reason", "")))
    return (event.kind, event.component or "", str(getattr(event, "function", "")), event.location, reason)


def log_line(event: ev.Event) -> str:
    """Return an event as one line for the log, or an empty string for an event that is not logged."""
    if event.component is None:
        return ""
    at = f" at {event.location}" if event.location else ""
    match event:
        case ev.Fallback():
            line = f"preset {event.from_preset} failed ({event.stage}){at}: {event.reason}. "
            line += f"Running one graph {_with_preset(event.to_preset)}. {event.hint}"
        case ev.Recompiled():
            reason, change = words_of(event)
            line = f"{event.function} recompiled (no. {event.nth}): {reason}. {change}"
        case ev.FrameEager():
            line = f"{event.function} stays eager{at}: {event.reason}. {event.hint}"
        case ev.RecompileLimit():
            line = f"{event.reason}{at}"
        case ev.GraphBreak():
            line = f"graph break{at}: {event.reason}. {event.hint}"
        case ev.Unavailable():
            running = _with_preset(event.running)
            line = f"preset {event.preset} cannot run here: {event.missing}. Running {running}."
        case ev.NoEffect():
            effect = f"{event.reason}{at}" if event.partly else f"compile has no effect{at}: {event.reason}"
            line = f"{effect}. {event.hint}"
        case _:
            return ""
    return f"{event.component}: {line}".rstrip()


def _with_preset(preset: str) -> str:
    return "eagerly" if preset == "none" else f"with preset {preset}"
