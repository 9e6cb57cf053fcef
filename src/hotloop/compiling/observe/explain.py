"""From torch's own words to events and one-line messages in the user's terms."""

from __future__ import annotations

import linecache
import logging
import os
import re
import textwrap
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch.graphs import is_user_file, last_user_frame
from hotloop._torch.module import inlined_in, root_name
from hotloop.diagnose import breaks
from hotloop.diagnose.no_effect import NoEffect
from hotloop.diagnose.recompile_words import words_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop._torch.dynamo import Break, Metric

_EXPLANATION = re.compile(r"Explanation: (.*)")
_HINT = re.compile(r"Hint: (.*)")
_GUARD_NUMBER = re.compile(r"^\s*-?\s*\d+/\d+:\s*")
_GUARD_COMMENT = re.compile(r"\s{2,}#\s")
_GUARD_ADVICE = re.compile(r"\. Guard failed on a parameter, .*")
_GUARD_PLACE = re.compile(r"# ([^#\n]+?):(\d+) in ")
_ROOT_ARGUMENT = re.compile(r"\bargs\[(\d+)\]")
_DECORATORS = 20
"""Lines between the first decorator of a function and its ``def``, at most."""
_LONGEST_REASON = 300
_RAISED_BY = re.compile(r"^backend='.*' raised:$")


def metric_events(metric: Metric, component: str | None) -> list[ev.Event]:
    """Give the events that one compilation metric stands for."""
    whole = root_name(metric.function)  # the component's entry, which is no line of the user's
    function = whole or metric.function or "?"
    file, line = _users_place(metric, whole=whole is not None)
    if metric.fail_type:
        return [_failure(metric, function, component, whole=whole is not None)]
    found: list[ev.Event] = []
    if metric.recompile_reason:
        found.append(_recompiled_event(metric, metric.recompile_reason, function, component, (file, line)))
    if (metric.has_code and metric.ops) or not metric.is_forward:  # code without operations holds no graph
        found.append(
            ev.Compiled(
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
                file=file,
                line=line,
            )
        )
    return found


def _recompiled_event(
    metric: Metric, text: str, function: str, component: str | None, begins: tuple[str | None, int | None]
) -> ev.Recompiled:
    """Give the event of a recompile, in the words of what the root calls where the guard is the root's own."""
    reason, begins = _in_users_words(metric.function, clean_guard(text), begins)
    file, line = _guard_place(text) or begins
    return ev.Recompiled(
        component=component,
        function=function,
        reason=reason,
        nth=int(metric.frame.rpartition("/")[2] or 0) if "/" in metric.frame else 0,
        file=file,
        line=line,
        frame=metric.frame,
        source=_source(file, line),
    )


def new_size(  # noqa: PLR0913 - what an event holds
    root: str, frame: str, function: str, component: str | None, *, reason: str, nth: int
) -> ev.Recompiled:
    """Give the event of a batch size that gets code of its own, by the name of its root: as much as a recompile."""
    reason, (file, line) = _in_users_words(root, reason, (None, None))
    return ev.Recompiled(
        component=component,
        function=function,
        reason=reason,
        nth=nth,
        file=file,
        line=line,
        frame=frame,
        source=_source(file, line),
    )


def _in_users_words(
    root: str | None, reason: str, begins: tuple[str | None, int | None]
) -> tuple[str, tuple[str | None, int | None]]:
    """Name a root's arguments as what it calls does, and say where that begins."""
    inlined = inlined_in(root)
    if inlined is None:
        return reason, begins
    reason = _ROOT_ARGUMENT.sub(lambda found: _argument(inlined.parameters, int(found[1])), reason)
    return reason, (inlined.file, _def_line(inlined.file, inlined.line)) if is_user_file(inlined.file) else begins


def _def_line(file: str, line: int) -> int:
    """Give the line of a function's ``def``; its code begins with the first decorator."""
    for number in range(line, line + _DECORATORS):
        if linecache.getline(file, number).lstrip().startswith(("def ", "async def ")):
            return number
    return line


def _argument(names: tuple[str, ...], place: int) -> str:
    return names[place] if place < len(names) else f"args[{place}]"


def _guard_place(text: str) -> tuple[str, int] | None:
    """Give the user's line that a failed guard comes from.

    torch 2.13 gives the whole stack with the first guard of a kind; else the comment behind the guard names the file by
    the end of its path, which is looked up among the files whose lines were read for it.
    """
    if (found := last_user_frame(text)) is not None:
        return found
    for short, line in reversed(_GUARD_PLACE.findall(text)):
        ending = os.sep + short.strip().removeprefix("./").replace("/", os.sep)
        known = [file for file in list(linecache.cache) if file.endswith(ending) and is_user_file(file)]
        if len(known) == 1:
            return known[0], int(line)
    return None


def _source(file: str | None, line: int | None) -> str:
    return linecache.getline(file, line).strip() if file and line else ""


def _users_place(metric: Metric, *, whole: bool) -> tuple[str | None, int | None]:
    """Give file and line where the function is the user's; torch's own and ours are no place to look at."""
    if whole or metric.file is None or not is_user_file(metric.file):
        return None, None
    return metric.file, metric.line


def _failure(metric: Metric, function: str, component: str | None, *, whole: bool) -> ev.Event:
    text = metric.fail_reason or metric.fail_type or ""
    own = _users_place(metric, whole=whole)
    if "recompile_limit" in text or metric.fail_type == "FailOnRecompileLimitHit":
        return ev.RecompileLimit(
            component=component,
            function=function,
            whole=whole,
            file=own[0],
            line=own[1],
            reason=f"{function} was compiled as often as torch's recompile limit allows; unseen inputs run eager",
        )
    file, line = own
    if metric.fail_file and is_user_file(metric.fail_file):
        file, line = metric.fail_file, metric.fail_line
    elif found := last_user_frame(text):
        file, line = found
    return ev.FrameEager(
        component=component,
        function=function,
        stage="trace",
        file=file,
        line=line,
        reason=f"{metric.fail_type}: {summary(text)}",
        hint=hint_of(text, _source(file, line)),
        source=_source(file, line),
    )


def break_event(entry: Break, component: str | None) -> ev.GraphBreak:
    """Give the event of a graph break."""
    return ev.GraphBreak(
        component=component,
        file=entry.file,
        line=entry.line,
        source=entry.source,
        reason=summary(entry.reason),
        hint=hint_of(entry.reason, entry.source),
        by_file=entry.by_file,
        by_line=entry.by_line,
        by_source=entry.by_source,
    )


def summary(text: str) -> str:
    """Give the first line that says something, with torch's explanation where it has one."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _RAISED_BY.match(line.strip())]
    first = lines[0] if lines else "unknown"
    explained = _EXPLANATION.search(text)
    full = f"{first}: {explained[1].strip()}" if explained and explained[1] not in first else first
    return textwrap.shorten(full.rstrip("."), _LONGEST_REASON, placeholder=" ...")


def hint_of(text: str, source: str = "") -> str:
    """Give how to mend it, from torch's words and the line: the cure of the catalogue, else torch's first hint."""
    problem = breaks.cause_of(summary(text), source)  # of torch's words without its hints, which name other causes too
    found = _HINT.search(text) if problem.kind == "other" else None
    return found[1].strip() if found else problem.change


def no_effect(problem: str, component: str | None, reason: str, **fields: Any) -> ev.NoEffect:
    """Give the event of a compile that takes no effect, with the catalogue's cure of the problem for its hint."""
    hint = NoEffect.problem(problem).change
    return ev.NoEffect(component=component, problem=problem, reason=reason, hint=hint, **fields)


def clean_guard(reason: str) -> str:
    """Give the failed guard of the newest compiled version, without torch's numbering."""
    lines = [_GUARD_NUMBER.sub("", line).strip() for line in reason.splitlines() if line.strip()]
    if not lines:
        return "unknown"
    return " ".join(_GUARD_ADVICE.sub("", _GUARD_COMMENT.split(lines[0])[0]).split())


def log_key(event: ev.Event) -> tuple[str, ...]:
    """Give what makes two events the same for the log: each reason is said once."""
    reason = re.sub(r"\d+", "#", str(getattr(event, "reason", "")))
    return (event.kind, event.component or "", str(getattr(event, "function", "")), event.location, reason)


def log_level(event: ev.Event) -> int:
    """Graph breaks cost speed and are common: they are told, not warned of."""
    return logging.INFO if isinstance(event, ev.GraphBreak) else logging.WARNING


def log_line(event: ev.Event) -> str:
    """Give an event as one line for the log, or an empty string for what is no news."""
    phrase = _PHRASES.get(type(event))
    if event.component is None or phrase is None:
        return ""
    at = f" at {event.location}" if event.location else ""
    return f"{event.component}: {phrase(event, at)}".rstrip()


def _fallback(event: ev.Fallback, at: str) -> str:
    what = "one graph" if event.scope == "graph" else "from the next graph on, all of it"
    return (
        f"preset {event.from_preset} failed ({event.stage}){at}: {event.reason}. "
        f"Running {what} {_running(event.to_preset)}. {event.hint}"
    )


def _recompiled(event: ev.Recompiled, _at: str) -> str:
    what, change = words_of(event)
    return f"{event.function} recompiled (no. {event.nth}): {what}. {change}"


def _frame_eager(event: ev.FrameEager, at: str) -> str:
    return f"{event.function} stays eager{at}: {event.reason}. {event.hint}"


def _limit(event: ev.RecompileLimit, at: str) -> str:
    return f"{event.reason}{at}"


def _graph_break(event: ev.GraphBreak, at: str) -> str:
    return f"graph break{at}: {event.reason}. {event.hint}"


def _unavailable(event: ev.Unavailable, _at: str) -> str:
    return f"preset {event.preset} cannot run here: {event.missing}. Running {_running(event.running)}."


def _no_effect(event: ev.NoEffect, at: str) -> str:
    told = f"{event.reason}{at}" if event.partly else f"compile has no effect{at}: {event.reason}"
    return f"{told}. {event.hint}"


_PHRASES: dict[type[ev.Event], Callable[[Any, str], str]] = {
    ev.Fallback: _fallback,
    ev.Recompiled: _recompiled,
    ev.FrameEager: _frame_eager,
    ev.RecompileLimit: _limit,
    ev.GraphBreak: _graph_break,
    ev.Unavailable: _unavailable,
    ev.NoEffect: _no_effect,
}


def _running(preset: str) -> str:
    return "eagerly" if preset == "none" else f"with preset {preset}"
