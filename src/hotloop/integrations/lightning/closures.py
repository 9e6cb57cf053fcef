"""Reads in an optimizer's own ``step`` whether it trains the same without the closure that the Trainer hands it.

The Trainer calls ``optimizer.step(closure)``, and the closure runs forward and backward. An owned step runs these two
and then calls ``optimizer.step()``. Both train the same only where ``step`` first runs the closure, if it was given
one, and only returns its loss, as torch's optimizers do, or hands the closure on to such a ``step``.
"""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import every_optimizers_pre_hooks, optimizer_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = "closure"  # the Trainer hands it over by this name


def closure_obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Say why a step without a closure would train otherwise; empty where it trains the same."""
    kind = type(optimizer).__name__
    if _has_pre_hook(optimizer):
        return (
            f"{kind} has a step pre-hook, or all optimizers have one, which the Trainer runs before forward and "
            "backward (they are in the optimizer's closure) and an owned step would run after them"
        )
    if _runs_first(optimizer, type(optimizer).__mro__):
        return ""
    return (
        f"{kind}.step may run its closure late or several times, or compute with its loss, and an owned step hands it "
        "none"
    )


def _runs_first(optimizer: torch.optim.Optimizer, kinds: tuple[type, ...]) -> bool:
    """Return whether the step of the first class that defines one runs its closure first, and only returns the loss.

    False where that cannot be read: a decorator of the program's, a ``step`` of one object, a missing source.
    """
    place = next((index for index, kind in enumerate(kinds) if "step" in vars(kind)), None)
    if place is None:
        return False
    function, by_class = _without_torch(vars(kinds[place])["step"]), type(optimizer).step
    if _without_torch(vars(optimizer).get("step", by_class)) is not _without_torch(by_class):
        return False
    body, names = _body_of(function)
    for index, statement in enumerate(body):
        found = _uses(statement, names)
        if not found and _changes_nothing(statement):
            continue
        rest = body[index + 1 :]
        if not found or any(_uses(one, names) for one in rest):
            return False
        if (call := _handed_on(statement, found)) is not None:
            return _only_returned(statement, rest) and _runs_first(*_receiver(optimizer, kinds[place + 1 :], call))
        run = _run_if_given(statement)
        return run is not None and _only_returned(run, rest)
    return False


def _has_pre_hook(optimizer: torch.optim.Optimizer) -> bool:
    try:
        return bool(optimizer_hooks(optimizer)[0] or every_optimizers_pre_hooks())
    except AttributeError:  # a wrapper around another optimizer that never called torch's __init__ has no hooks
        return False


def _without_torch(function: Any) -> Any:
    """Return the function inside the wrappers of torch's: its profiler's, ``no_grad``, a scheduler's."""
    while hasattr(function, "__wrapped__"):
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            break
        function = function.__wrapped__
    return function


def _body_of(function: Any) -> tuple[list[ast.stmt], set[str]]:
    """Return a step's statements, and the names that hold its closure; nothing where its source cannot be read."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return [], set()
    try:
        source = inspect.getsource(code)
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    except (OSError, SyntaxError):
        return [], set()
    step = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if step is None:
        return [], set()
    takes = step.args
    if any(one.arg == _NAME for one in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)):
        return step.body, {_NAME}
    return step.body, {one.arg for one in (takes.vararg, takes.kwarg) if one is not None}


def _uses(node: ast.AST, names: Iterable[str]) -> list[ast.Name]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in names]


def _changes_nothing(statement: ast.stmt) -> bool:
    """Return whether a statement before the closure runs is a check, or gives a constant or a name another name.

    Whatever else it sets may be read from the gradients of the step before: by a loop, a property, an operator.
    """
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.endswith("_health_check")  # torch's own, that a graph is not captured by mistake
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return isinstance(value, ast.Constant | ast.Name | None)
        case ast.If(body=body, orelse=[]):
            return all(isinstance(one, ast.Raise) for one in body)
    return False


def _handed_on(statement: ast.stmt, found: list[ast.Name]) -> ast.Call | None:
    """Return the call of another ``step`` that is given the closure as it is, and in which alone it occurs."""
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    plain = [one.value if isinstance(one, ast.Starred) else one for one in given]
    return call if all(any(name is one for one in plain) for name in found) else None


def _receiver(
    optimizer: torch.optim.Optimizer, above: tuple[type, ...], call: ast.Call
) -> tuple[torch.optim.Optimizer, tuple[type, ...]]:
    """Return whose ``step`` a call runs, and the classes it is looked up in: the base class's, or an attribute's."""
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return optimizer, above
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            inner = getattr(optimizer, name, None)
            if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and not _has_pre_hook(inner):
                return inner, type(inner).__mro__
    return optimizer, (torch.optim.Optimizer,)  # whose step has no statement


def _run_if_given(statement: ast.stmt) -> ast.stmt | None:
    """Return the statement that runs the closure once if there is one, and nothing where there is none."""
    match statement:
        case ast.Assign(value=ast.IfExp(test=test, body=yes, orelse=no)):
            run, otherwise = (yes, no) if _is_given(test) else (no, yes)
            one = isinstance(otherwise, ast.Constant) and _is_run(run) and _is_given(test) is not None
            return statement if one else None
        case ast.If(test=test, body=yes_body, orelse=no_body) if (given := _is_given(test)) is not None:
            body, other = (yes_body, no_body) if given else (no_body, yes_body)
            while len(body) == 1 and isinstance(body[0], ast.With):  # torch.enable_grad()
                if any(_uses(item, (_NAME,)) for item in body[0].items):
                    return None
                body = body[0].body
            if len(body) == 1 and isinstance(body[0], ast.Assign | ast.Expr | ast.AnnAssign) and _is_run(body[0].value):
                sets = all(isinstance(one, ast.Assign | ast.Pass) and _changes_nothing(one) for one in other)
                return body[0] if sets else None
    return None


def _is_given(test: ast.expr) -> bool | None:
    """Return whether a condition asks for a closure (True) or for none (False); None for any other."""
    match test:
        case ast.Name(id=name) if name == _NAME:
            return True
        case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=None)]) if name == _NAME:
            return isinstance(op, ast.IsNot) if isinstance(op, ast.Is | ast.IsNot) else None
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)) if name == _NAME:
            return False
    return None


def _is_run(value: ast.expr | None) -> bool:
    match value:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
            return name == _NAME
    return False


def _only_returned(run: ast.stmt, rest: list[ast.stmt]) -> bool:
    """Return whether the loss that a statement sets is returned, if anything, and nothing is computed of it."""
    targets = run.targets if isinstance(run, ast.Assign) else [run.target] if isinstance(run, ast.AnnAssign) else []
    if not all(isinstance(target, ast.Name) for target in targets):
        return False
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    nodes = [node for one in rest for node in ast.walk(one)]
    returned = {id(node.value) for node in nodes if isinstance(node, ast.Return) and node.value is not None}
    return all(id(use) in returned for one in rest for use in _uses(one, names))
