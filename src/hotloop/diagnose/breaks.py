"""Why tracing stops, from torch's words and the line: the causes that graph breaks and given-up functions share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

_BUILTIN = re.compile(r"builtin (?:operator )?`([^`]+?)\.?`")
_DISABLED = re.compile(r"function `?<function (?:[^ ]*\.)?([^ .]+) at ")
_SELF_LOG = re.compile(r"\.log(?:_dict)?\(")
_MANY = "each break splits the graph: more launches, no fusion across the line, and the host works between the parts"


def _problem(kind: str, *, symptom: str, cause: str, change: str, cost: str = _MANY) -> Problem:
    return Problem(rule="graph_break", kind=kind, symptom=symptom, cause=cause, cost=cost, change=change)


PROBLEMS = (
    _problem(
        "self_log",
        symptom="Lightning's self.log breaks the graph",
        cause="self.log is disabled for torch.compile, and what it keeps grows, so the code around it is compiled anew",
        change="return the values from the compiled part and call self.log outside it: compile the model, not "
        "training_step",
    ),
    _problem(
        "numpy",
        symptom="numpy breaks the graph",
        cause="numpy gives a Python number there, which no graph can hold",
        change="use torch's function instead (torch.rand, torch.median), or move the line out of the model",
    ),
    _problem(
        "item",
        symptom="a tensor's value is read in Python",
        cause="Python has to wait for the value (.item(), float(), int(), .tolist()), so the graph ends before it",
        change="keep the value a tensor inside the model, and read it outside",
        cost=f"{_MANY}; on a GPU each read also waits for everything that was launched",
    ),
    _problem(
        "assert",
        symptom="an assert looks at a tensor's value",
        cause="which way Python goes depends on a value that exists only when the graph has run",
        change="use torch._assert_async(condition), or check outside the model",
    ),
    _problem(
        "branch",
        symptom="a branch or loop depends on a tensor's value",
        cause="which way Python goes depends on a value that exists only when the graph has run",
        change="use torch.where (torch.cond for large branches), or move the branch out of the model",
    ),
    _problem(
        "shape",
        symptom="the size of a result depends on values",
        cause="a mask or nonzero() gives as many rows as the values say, which is not known while tracing",
        change="keep the full size: multiply by the mask, or use torch.where or masked_fill",
    ),
    _problem(
        "print",
        symptom="a print breaks the graph",
        cause="a print happens in Python, between two graphs",
        change="move the print out of the model: return the value, and print it outside; a hook of the model's is "
        "compiled with it, and breaks the graph as well",
    ),
    _problem(
        "logging",
        symptom="a log call or warning breaks the graph",
        cause="logging happens in Python, between two graphs",
        change="move the log call out of the model: return the value and log it outside",
    ),
    _problem(
        "disabled",
        symptom="a function that is disabled for torch.compile is called",
        cause="its author marked it with torch.compiler.disable (torch._dynamo.disable), so the graph ends before it",
        change="take the decorator off if the function can be traced, or call it outside the model",
    ),
    _problem(
        "asked",
        symptom="the code asks for a graph break",
        cause="torch._dynamo.graph_break() is called there",
        change="remove the call to torch._dynamo.graph_break()",
    ),
    _problem(
        "call",
        symptom="a call cannot be traced",
        cause="it is a builtin of Python's or of a C extension, which torch cannot look into",
        change="move the call out of the model; an extension's operator can be registered with torch.library.custom_op",
    ),
    _problem(
        "other",
        symptom="a line cannot be traced",
        cause="torch does not know how to trace it",
        change="rewrite the line so that it can be traced, or move it out of the model",
    ),
)
RAISED = Problem(
    rule="frame_eager",
    kind="raised",
    symptom="a function stays eager after it raised exceptions of its own",
    cause="it raised in one call after another while torch traced it, which gives up a function that ends so",
    cost="everything in that function runs at eager speed; what it calls may still be compiled",
    change="check what it raises for before the model is called, or raise it outside of the model",
)
"""No graph break: an exception that leaves a function ends its trace. Its advice is `frame_eager`'s."""
BY_KIND = {problem.kind: problem for problem in (*PROBLEMS, RAISED)}


def _is_numpy(reason: str, source: str) -> bool:
    return "_local_scalar_dense" in reason and ("np." in source or "numpy" in source)


_TESTS: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("self_log", lambda reason, _: "_ResultCollection.log" in reason),
    ("print", lambda reason, source: "`print`" in reason or source.startswith("print(")),  # whatever it prints
    ("numpy", _is_numpy),
    ("raised", lambda reason, _: "Observed exception" in reason),
    ("item", lambda reason, _: any(one in reason for one in (".item()", ".tolist()", "_local_scalar_dense"))),
    ("assert", lambda reason, source: _branches(reason) and source.startswith("assert")),
    ("branch", lambda reason, _: _branches(reason)),
    ("shape", lambda reason, _: "ynamic shape operator" in reason),
    ("logging", lambda reason, _: "logging.Logger" in reason or "`_warnings.warn`" in reason),
    ("disabled", lambda reason, _: "compiler.disable" in reason or "dynamo.disable" in reason),
    ("asked", lambda reason, _: "graph_break()" in reason),
    ("call", lambda reason, _: "marked as skipped" in reason or "builtin operator" in reason),
)


def _branches(reason: str) -> bool:
    """Tell a branch on a tensor, in torch's words for people or, where it met the line again, for itself."""
    return "ata-dependent branching" in reason or reason.startswith("generic_jump")


def cause_of(reason: str, source: str) -> Problem:
    """Give the problem behind why tracing stopped, from torch's reason and the text of the line."""
    found = next((kind for kind, test in _TESTS if test(reason, source)), "other")
    if found == "self_log" or (found == "disabled" and "self" in source and _SELF_LOG.search(source)):
        return BY_KIND["self_log"]
    return BY_KIND[found]


def what_of(problem: Problem, reason: str) -> str:
    """Say what stopped tracing there, with the function's name where torch gives it."""
    if problem.kind == "call" and (found := _BUILTIN.search(reason)):
        return f"a call to {found[1].removeprefix('<unknown module>.')} cannot be traced"
    if problem.kind == "disabled" and (found := _DISABLED.search(reason)):
        return f"{found[1]}, which is disabled for torch.compile, is called"
    return f"a line cannot be traced ({reason})" if problem.kind == "other" else problem.symptom
