"""Graph breaks and functions that stay eager, by cause: one advice a line, however many frames met it."""

from __future__ import annotations

import functools
import re

from hotloop import events as ev
from hotloop.diagnose.case import Case, grouped
from hotloop.diagnose.recompile import count, recompiles, resumed_at
from hotloop.diagnose.rule import Advice, Found, Problem
from hotloop.diagnose.words import times

_MANY = "each break splits the graph: more launches, no fusion across the line, and the host works between the parts"
_break = functools.partial(Problem, rule="graph_break", cost=_MANY)

PROBLEMS = (
    _break(
        kind="self_log",
        symptom="Lightning's self.log breaks the graph",
        cause="self.log is disabled for torch.compile, and the results that it keeps grow, so the code around it is "
        "recompiled",
        change="return the values from the compiled part and call self.log outside it: compile the model, not "
        "training_step",
    ),
    _break(
        kind="item",
        symptom="a tensor's value is read in Python",
        cause="Python has to wait for the value (.item(), float(), numpy, .tolist()), so the graph ends before it",
        change="keep the value a tensor inside the model (torch's function instead of numpy's), and read it outside",
        cost=f"{_MANY}; on a GPU each read also waits for everything that was launched",
    ),
    _break(
        kind="branch",
        symptom="a branch, loop or assert depends on a tensor's value",
        cause="the code that runs next depends on a value that exists only after the graph has run",
        change="use torch.where (torch.cond for large branches, torch._assert_async for an assert), or move it out of "
        "the model",
    ),
    _break(
        kind="shape",
        symptom="the size of a result depends on values",
        cause="the number of rows that a mask or nonzero() returns depends on values, which are unknown while tracing",
        change="keep the full size: multiply by the mask, or use torch.where or masked_fill",
    ),
    _break(
        kind="print",
        symptom="a print, log call or warning breaks the graph",
        cause="printing and logging happen in Python, between two graphs",
        change="move the print out of the model: return the value, and print or log it outside; a hook of the model's "
        "is compiled with it, and breaks the graph as well",
    ),
    _break(
        kind="disabled",
        symptom="a function that is disabled for torch.compile is called",
        cause="its author marked it with torch.compiler.disable, or it calls torch._dynamo.graph_break()",
        change="take the decorator or call off if the function can be traced, or call it outside the model",
    ),
    _break(
        kind="call",
        symptom="a call cannot be traced",
        cause="the function is a builtin of Python or of a C extension, and torch cannot trace into it",
        change="move the call out of the model; an extension's operator can be registered with torch.library.custom_op",
    ),
    _break(
        kind="other",
        symptom="a line cannot be traced",
        cause="torch does not know how to trace it",
        change="rewrite the line so that it can be traced, or move it out of the model",
    ),
)
EAGER = Problem(
    rule="frame_eager",
    symptom="a whole function stays eager",
    cause="tracing stopped where it cannot go on in a new graph: inside try, with, or a loop over a generator",
    cost="everything in that function runs at eager speed; what it calls may still be compiled",
    change="fix the line as for a graph break, or move it out of the try, with or loop",
)
RAISED = Problem(
    rule="frame_eager",
    kind="raised",
    symptom="a function stays eager after it raised exceptions of its own",
    cause="the function raised in call after call while torch traced it, and torch gives up on such a function",
    cost="everything in that function runs at eager speed; what it calls may still be compiled",
    change="check for the error before the model is called, or raise it outside of the model",
)
"""A problem of rule `frame_eager`: an exception that leaves a function ends its trace without a graph break."""
_KINDS = {problem.kind: problem for problem in (*PROBLEMS, RAISED)}
_RESUMED = "torch_dynamo_resume_in_"
"""How torch names the rest of a function behind a graph break."""
_REASONS = (
    ("self_log", r"_ResultCollection\.log"),
    ("print", r"`print`"),
    ("raised", r"Observed exception"),
    ("item", r"\.item\(\)|\.tolist\(\)|_local_scalar_dense"),
    ("branch", r"ata-dependent branching|^generic_jump"),  # at its second stop at a branch torch says ``generic_jump``
    ("shape", r"ynamic shape operator"),
    ("print", r"logging\.Logger|`_warnings\.warn`"),
    ("disabled", r"compiler\.disable|dynamo\.disable|graph_break\(\)"),
    ("call", r"marked as skipped|builtin operator"),
)
"""Each problem's kind with what torch's reason holds then; the first that fits is the cause."""


def cause_of(reason: str, source: str) -> Problem:
    """Return the problem behind a stop of tracing, from torch's reason and the text of the line."""
    if source.startswith("print("):  # whatever it prints
        return _KINDS["print"]
    kind = next((kind for kind, pattern in _REASONS if re.search(pattern, reason)), "other")
    if kind == "disabled" and "self" in source and re.search(r"\.log(?:_dict)?\(", source):
        kind = "self_log"
    return _KINDS[kind]


def what_of(problem: Problem, reason: str) -> str:
    """Say what stopped tracing, with the function's name if torch's reason holds it."""
    builtin = re.search(r"builtin (?:operator )?`([^`]+?)\.?`", reason)
    if problem.kind == "call" and builtin:
        return f"a call to {builtin[1].removeprefix('<unknown module>.')} cannot be traced"
    disabled = re.search(r"function `?<function (?:[^ ]*\.)?([^ .]+) at ", reason)
    if problem.kind == "disabled" and disabled:
        return f"{disabled[1]}, which is disabled for torch.compile, is called"
    return f"a line cannot be traced ({reason})" if problem.kind == "other" else problem.symptom


def find(case: Case) -> Found:
    """Yield one advice per place, or per line that leads to a place in an installed package."""
    # `frame_eager` advises on a line that keeps its whole function eager.
    stays_eager = {(event.component, event.file, event.line) for event in case.of(ev.FrameEager) if event.file}
    places = grouped(case.of(ev.GraphBreak), lambda event: (event.component, event.file, event.line))
    places = [group for group in places if (group[0].component, group[0].file, group[0].line) not in stays_eager]
    for group in places:
        if _is_known_elsewhere(group, [other for other in places if other is not group]):
            continue
        leads = [event for event in group if event.by_file]
        for same_lead in grouped(leads, lambda event: (event.by_file, event.by_line)) or [group]:
            yield _advice(case, same_lead)


def _is_known_elsewhere(group: list[ev.GraphBreak], others: list[list[ev.GraphBreak]]) -> bool:
    """Return whether a break only repeats another break, or torch's own code asks for it (its optimizers do).

    The call of a function that broke breaks again; torch's reason is ``step_unsupported`` then. So does that
    function when torch traces it as a frame of its own: inside a library, no line of the program is known for it.
    """
    first, has_lead = group[0], any(event.by_file for event in group)
    file = first.file or ""
    if not has_lead and "graph_break()" in first.reason and re.search(r"site-packages[/\\]torch[/\\]", file):
        return True
    reasons = {other[0].reason for other in others if other[0].component == first.component}
    if all(event.reason == "step_unsupported" for event in group):
        return bool(reasons - {"step_unsupported"})
    installed = re.search(r"(?:^|[/\\])(?:lib[/\\]python3|Lib[/\\]|site-packages[/\\]|dist-packages[/\\])", file)
    return not has_lead and installed is not None and first.reason in reasons


def _advice(case: Case, group: list[ev.GraphBreak]) -> Advice:
    """Return the advice on the breaks at one place."""
    event = next((event for event in group if not event.reason.startswith("generic_jump")), group[0])
    problem = cause_of(event.reason, event.source)
    place = {"component": event.component, "file": event.file, "line": event.line, "source": event.source}
    what = what_of(problem, event.reason)
    if event.by_file is not None and problem.kind == "self_log":
        # Nobody looks for self.log in Lightning's own file: name the program's line.
        place |= {"file": event.by_file, "line": event.by_line, "source": event.by_source}
    elif event.by_file is not None:
        what += f" in an installed package, called at {event.by_file}:{event.by_line}: {event.by_source}"
    again = [recompile for recompile in recompiles(case) if recompile.is_caused_by(event)]
    if again:
        what += f"; the code behind it was recompiled {times(len(again))}, since its result changed"
    # The first compiles of the code behind the break, which torch names by the line of the break.
    behind = {(event.file, event.line), (event.by_file, event.by_line)}
    first = [one for one in case.of(ev.Compiled) if one.phase == "forward" and one.frame.endswith("/0")]
    resumed = [one for one in first if (one.file, resumed_at(one.function)) in behind]
    return problem.advice(
        what,
        **place,
        times=len(group),
        milliseconds=case.waited_ms(event.file, event.line),
        compiles=len([one for one in resumed if one.component == event.component]) + count(again),
        seconds=sum(recompile.seconds for recompile in again),
    )


def find_eager(case: Case) -> Found:
    """Yield one advice per line that keeps functions eager."""
    # Nobody can change the rest of a function of torch's own, and no work of the program is in it.
    events = [event for event in case.of(ev.FrameEager) if event.file or not event.function.startswith(_RESUMED)]
    for group in grouped(events, lambda one: (one.component, one.file, one.line, "" if one.file else one.function)):
        yield _advice_eager(case, group)


def _advice_eager(case: Case, group: list[ev.FrameEager]) -> Advice:
    """Return the advice on one line."""
    event, place = group[0], case.place(group[0])
    known, function = cause_of(event.reason, place["source"]), event.function
    if function.startswith(_RESUMED):
        function = f"the rest of {function.removeprefix(_RESUMED).rpartition('_at_')[0]}"
    if known is RAISED:
        return RAISED.advice(f"{function} stays eager: it raised exceptions of its own", **place, times=len(group))
    why, change = what_of(known, event.reason), f"{known.change}; or move the line out of the try or with"
    if known.kind == "other":
        why, change = event.reason, event.hint if event.hint and not event.file else EAGER.change
    return EAGER.advice(
        f"{function} stays eager: {why}",
        **place,
        times=len(group),
        milliseconds=case.waited_ms(event.file, event.line),
        change=change,
    )
