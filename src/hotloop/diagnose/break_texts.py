"""Why tracing stopped, from torch's words and the line: the causes that rules `graph_break` and `frame_eager` share."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from hotloop.diagnose.rule import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

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
        kind="numpy",
        symptom="numpy breaks the graph",
        cause="numpy turns the tensor into a Python value, which no graph can hold",
        change="use torch's function instead (torch.rand, torch.median), or move the line out of the model",
    ),
    _break(
        kind="item",
        symptom="a tensor's value is read in Python",
        cause="Python has to wait for the value (.item(), float(), int(), .tolist()), so the graph ends before it",
        change="keep the value a tensor inside the model, and read it outside",
        cost=f"{_MANY}; on a GPU each read also waits for everything that was launched",
    ),
    _break(
        kind="assert",
        symptom="an assert looks at a tensor's value",
        cause="the code that runs next depends on a value that exists only after the graph has run",
        change="use torch._assert_async(condition), or check outside the model",
    ),
    _break(
        kind="branch",
        symptom="a branch or loop depends on a tensor's value",
        cause="the code that runs next depends on a value that exists only after the graph has run",
        change="use torch.where (torch.cond for large branches), or move the branch out of the model",
    ),
    _break(
        kind="shape",
        symptom="the size of a result depends on values",
        cause="the number of rows that a mask or nonzero() returns depends on values, which are unknown while tracing",
        change="keep the full size: multiply by the mask, or use torch.where or masked_fill",
    ),
    _break(
        kind="print",
        symptom="a print breaks the graph",
        cause="a print happens in Python, between two graphs",
        change="move the print out of the model: return the value, and print it outside; a hook of the model's is "
        "compiled with it, and breaks the graph as well",
    ),
    _break(
        kind="logging",
        symptom="a log call or warning breaks the graph",
        cause="logging happens in Python, between two graphs",
        change="move the log call out of the model: return the value and log it outside",
    ),
    _break(
        kind="disabled",
        symptom="a function that is disabled for torch.compile is called",
        cause="its author marked it with torch.compiler.disable (torch._dynamo.disable), so the graph ends before it",
        change="take the decorator off if the function can be traced, or call it outside the model",
    ),
    _break(
        kind="asked",
        symptom="the code asks for a graph break",
        cause="torch._dynamo.graph_break() is called there",
        change="remove the call to torch._dynamo.graph_break()",
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
RAISED = Problem(
    rule="frame_eager",
    kind="raised",
    symptom="a function stays eager after it raised exceptions of its own",
    cause="the function raised in call after call while torch traced it, and torch gives up on such a function",
    cost="everything in that function runs at eager speed; what it calls may still be compiled",
    change="check for the error before the model is called, or raise it outside of the model",
)
"""A problem of rule `frame_eager`: an exception that leaves a function ends its trace without a graph break."""


def _is_branch(reason: str) -> bool:
    """Return whether tracing stopped at a branch on a tensor; at its second stop there torch says ``generic_jump``."""
    return "ata-dependent branching" in reason or reason.startswith("generic_jump")


_TESTS: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("self_log", lambda reason, _: "_ResultCollection.log" in reason),
    ("print", lambda reason, source: "`print`" in reason or source.startswith("print(")),  # whatever it prints
    ("numpy", lambda reason, source: "_local_scalar_dense" in reason and ("np." in source or "numpy" in source)),
    ("raised", lambda reason, _: "Observed exception" in reason),
    ("item", lambda reason, _: re.search(r"\.item\(\)|\.tolist\(\)|_local_scalar_dense", reason) is not None),
    ("assert", lambda reason, source: _is_branch(reason) and source.startswith("assert")),
    ("branch", lambda reason, _: _is_branch(reason)),
    ("shape", lambda reason, _: "ynamic shape operator" in reason),
    ("logging", lambda reason, _: "logging.Logger" in reason or "`_warnings.warn`" in reason),
    ("disabled", lambda reason, _: "compiler.disable" in reason or "dynamo.disable" in reason),
    ("asked", lambda reason, _: "graph_break()" in reason),
    ("call", lambda reason, _: "marked as skipped" in reason or "builtin operator" in reason),
)
"""Each problem's kind with its test of torch's reason and of the line's text; the first that holds is the cause."""


def cause_of(reason: str, source: str) -> Problem:
    """Return the problem behind a stop of tracing, from torch's reason and the text of the line."""
    kind = next((kind for kind, test in _TESTS if test(reason, source)), "other")
    if kind == "disabled" and "self" in source and re.search(r"\.log(?:_dict)?\(", source):
        kind = "self_log"
    return next(problem for problem in (*PROBLEMS, RAISED) if problem.kind == kind)


def what_of(problem: Problem, reason: str) -> str:
    """Say what stopped tracing, with the function's name if torch's reason holds it."""
    builtin = re.search(r"builtin (?:operator )?`([^`]+?)\.?`", reason)
    if problem.kind == "call" and builtin:
        return f"a call to {builtin[1].removeprefix('<unknown module>.')} cannot be traced"
    disabled = re.search(r"function `?<function (?:[^ ]*\.)?([^ .]+) at ", reason)
    if problem.kind == "disabled" and disabled:
        return f"{disabled[1]}, which is disabled for torch.compile, is called"
    return f"a line cannot be traced ({reason})" if problem.kind == "other" else problem.symptom
