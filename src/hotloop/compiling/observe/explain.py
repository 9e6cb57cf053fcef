"""From torch's own words to events and one-line messages in the user's terms."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch.graphs import is_user_file, last_user_frame
from hotloop._torch.module import Inlined, root_name
from hotloop.diagnose import break_texts
from hotloop.diagnose.no_effect import NoEffect
from hotloop.diagnose.recompile_words import words_of
from hotloop.diagnose.switches import switch_for

if TYPE_CHECKING:
    from hotloop._torch.dynamo import Break, Metric

_Place = tuple[str | None, int | None]


class MetricEvents:
    """The events that one of torch's compilation metrics stands for.

    Args:
        metric: the metric.
        component: whose compile it was; None outside hotloop's own.
    """

    def __init__(self, metric: Metric, component: str | None) -> None:
        self._metric, self._component = metric, component
        root = root_name(metric.function)
        self._whole = root is not None
        """The function is the component's entry, which is no line of the user's."""
        self._function = root or metric.function or "?"
        self._place: _Place = (None, None)
        if not self._whole and metric.file is not None and is_user_file(metric.file):
            self._place = metric.file, metric.line

    def all(self) -> list[ev.Event]:
        """Return the events: a failure, or a recompile and a compile."""
        metric = self._metric
        if metric.fail_type:
            return [self._failed(metric.fail_type)]
        events: list[ev.Event] = []
        if metric.recompile_reason:
            events.append(self._recompiled(metric.recompile_reason))
        if (metric.has_code and metric.ops) or not metric.is_forward:  # code without operations holds no graph
            file, line = self._place
            events.append(
                ev.Compiled(
                    component=self._component,
                    frame=metric.frame,
                    function=self._function,
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
        return events

    def _recompiled(self, text: str) -> ev.Recompiled:
        frame = self._metric.frame
        reason, begins = _in_users_words(self._metric.function, clean_guard(text), self._place)
        file, line = _guard_place(text) or begins
        return ev.Recompiled(
            component=self._component,
            function=self._function,
            reason=reason,
            nth=int(frame.rpartition("/")[2] or 0) if "/" in frame else 0,
            file=file,
            line=line,
            frame=frame,
            source=_source(file, line),
        )

    def _failed(self, fail_type: str) -> ev.Event:
        metric = self._metric
        text = metric.fail_reason or fail_type
        file, line = self._place
        if "recompile_limit" in text or fail_type == "FailOnRecompileLimitHit":
            reason = (
                f"{self._function} was compiled as often as torch's recompile limit allows; unseen inputs run eager"
            )
            return ev.RecompileLimit(
                component=self._component,
                function=self._function,
                whole=self._whole,
                file=file,
                line=line,
                reason=reason,
            )
        if metric.fail_file and is_user_file(metric.fail_file):
            file, line = metric.fail_file, metric.fail_line
        elif place := last_user_frame(text):
            file, line = place
        return ev.FrameEager(
            component=self._component,
            function=self._function,
            stage="trace",
            file=file,
            line=line,
            reason=f"{fail_type}: {_summary(text)}",
            hint=hint_of(text, _source(file, line), file),
            source=_source(file, line),
        )


def new_size(  # noqa: PLR0913 - what an event holds
    root: str, frame: str, function: str, component: str | None, *, reason: str, nth: int
) -> ev.Recompiled:
    """Return the event of a batch size that gets code of its own, which costs as much as a recompile.

    ``root`` is the name of the root function that the code belongs to.
    """
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


def recomputed_limit(component: str, function: str) -> ev.RecompileLimit:
    """Return the event of code that checkpointed forwards had compiled as often as torch's recompile limit allows."""
    reason = (
        f"{function} was compiled as often as torch's recompile limit allows, in recomputations of checkpointed "
        "forwards (it changes with each call); it runs eager"
    )
    return ev.RecompileLimit(component=component, function=function, whole=True, file=None, line=None, reason=reason)


def no_effect(problem: str, component: str | None, reason: str, **fields: Any) -> ev.NoEffect:
    """Return the event of a compile that takes no effect, with the catalogue's cure of the problem for its hint."""
    hint = NoEffect.problem(problem).change
    return ev.NoEffect(component=component, problem=problem, reason=reason, hint=hint, **fields)


def _in_users_words(root: str | None, reason: str, begins: _Place) -> tuple[str, _Place]:
    """Name a root's arguments as the function that it calls does, and return where that function begins."""
    inlined = Inlined.by_root.get(root or "")
    if inlined is None:
        return reason, begins

    def argument(match: re.Match[str]) -> str:
        place = int(match[1])
        return inlined.parameters[place] if place < len(inlined.parameters) else match[0]

    reason = re.sub(r"\bargs\[(\d+)\]", argument, reason)
    if is_user_file(inlined.file):
        begins = inlined.file, _def_line(inlined.file, inlined.line)
    return reason, begins


def _def_line(file: str, line: int) -> int:
    """Return the line of a function's ``def``, up to 20 lines after its first decorator, where its code begins."""
    for number in range(line, line + 20):
        if linecache.getline(file, number).lstrip().startswith(("def ", "async def ")):
            return number
    return line


def _guard_place(text: str) -> tuple[str, int] | None:
    """Return the user's line that a failed guard comes from; None where torch does not tell it.

    torch 2.13 adds the whole stack to the first guard of a kind. Otherwise the comment behind the guard names the file
    by the end of its path, which is looked up among the files whose lines were read for the comment.
    """
    if (place := last_user_frame(text)) is not None:
        return place
    for short, line in reversed(re.findall(r"# ([^#\n]+?):(\d+) in ", text)):
        ending = os.sep + short.strip().removeprefix("./").replace("/", os.sep)
        known = [file for file in list(linecache.cache) if file.endswith(ending) and is_user_file(file)]
        if len(known) == 1:
            return known[0], int(line)
    return None


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
    problem = break_texts.cause_of(_summary(text), source)  # without torch's hints, which name other causes too
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


def log_line(event: ev.Event, name: str = "") -> str:
    """Return an event as one line for the log, or an empty string for an event that is not logged.

    Args:
        event: the event.
        name: of its component for people; by default the component's own.
    """
    if event.component is None:
        return ""
    at = f" at {event.location}" if event.location else ""
    match event:
        case ev.Fallback():
            what = "one graph" if event.scope == "graph" else "from the next graph on, all of it"
            line = f"preset {event.from_preset} failed ({event.stage}){at}: {event.reason}. "
            line += f"Running {what} {_with_preset(event.to_preset)}. {event.hint}"
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
    return f"{name or event.component}: {line}".rstrip()


def _with_preset(preset: str) -> str:
    return "eagerly" if preset == "none" else f"with preset {preset}"
