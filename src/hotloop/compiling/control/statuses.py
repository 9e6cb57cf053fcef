"""Finds the components of a model, and returns what runs of each, and why it is not what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import get_entry, is_compiled_function
from hotloop.compiling.apply.targets import Target, compiled_by_torch, components_of, entry_points, without_wrappers
from hotloop.compiling.control.component import CompiledFunction, Entry
from hotloop.compiling.control.component_status import ComponentStatus, State, Status
from hotloop.compiling.control.installed import MARKER, components
from hotloop.compiling.control.precompiled import AS_GIVEN, compiled_by_user, compiled_over
from hotloop.compiling.observe import Cause, collector

if TYPE_CHECKING:
    from collections.abc import Iterator


def status(model: Any) -> Status:
    """Return what was asked for and what runs, for each component of a model, mapping, pipeline or compiled callable.

    A component that its user compiled by torch's own means, and did not hand to hotloop, is ``as-given``.
    """
    collector.poll(force=True)
    if isinstance(model, CompiledFunction):
        return Status({model.component.name: ComponentStatus.of(model.component, model.component.name)})
    wrapped = isinstance(model, torch.nn.Module) and "" in compiled_by_torch(model)
    target = Target("module", {"model": model}) if wrapped else components_of(model)
    statuses: dict[str, ComponentStatus] = {}
    for name, part in target.components.items():
        if isinstance(part, CompiledFunction):
            statuses[name] = ComponentStatus.of(part.component, name)
        elif isinstance(part, torch.nn.Module):
            statuses.update(_module_status(name, part, f"{name}." if target.kind != "module" else ""))
        else:
            statuses[name] = _other_status(name, AS_GIVEN if is_compiled_function(part) else "eager")
    return Status(statuses, target.skipped, "\n".join(_hints(target, statuses)))


def is_compiled(model: Any) -> bool:
    """Return whether a compile is in force on a model or a part of it: hotloop's, called yet or not, or torch's own.

    For code that asks for ``model._orig_mod`` or ``OptimizedModule``, the wrapper of ``torch.compile``. `compile` makes
    none: the model is itself. A model that runs eager, since its compile failed or was taken off, is not compiled. A
    function counts as well.

    Args:
        model: anything that `compile` or ``torch.compile`` takes or returns.
    """
    return any(one.state != "eager" for one in status(model).components.values())


def _hints(target: Target, statuses: dict[str, ComponentStatus]) -> Iterator[str]:
    """Yield which parts of a pipeline were left eager, and where hotloop compiled over the user's own compile."""
    left = [name for name, status in statuses.items() if status.requested == "none" and target.kind == "pipeline"]
    if left and len(left) < len(statuses):
        example = f"{{{left[0]!r}: 'default', ...}}"
        yield f"eager: {', '.join(left)}; to compile them too, give preset a mapping, e.g. {example}"
    for name, part in target.components.items():
        if isinstance(part, torch.nn.Module) and part in components and (over := compiled_over(part)):
            yield f"{name}: {over}"


def _module_status(name: str, part: torch.nn.Module, prefix: str) -> dict[str, ComponentStatus]:
    """Return the status of a module's own component, or of those compiled inside it, or why it is eager.

    Args:
        name: of the module among the components.
        part: the module.
        prefix: what goes before the path of a component inside it.
    """
    if "" in compiled_by_torch(part):  # a wrapper; hotloop may have compiled the module inside, and has its tally
        inside = dict(part.named_children())["_orig_mod"]
        if any(module in components for module in inside.modules()):
            return _module_status(name, inside, prefix)
    if (own := components.get(part)) is not None:
        by_user = compiled_by_user(part)
        if by_user is not None and not any(isinstance(get_entry(point), Entry) for point in entry_points(part)):
            return {name: _other_status(name, AS_GIVEN, by_user)}  # module.compile() came after hotloop.compile
        return {name: ComponentStatus.of(own, name), **(_inside(name, part, prefix) if own.left else {})}
    if inner := _inside(name, part, prefix):
        return inner
    copies = {path: vars(module)[MARKER] for path, module in part.named_modules() if MARKER in vars(module)}
    if copies:
        named = {f"{prefix}{path}" if path else name: preset for path, preset in copies.items()}
        return {path: _copy_status(path, preset) for path, preset in named.items()}
    by_user = compiled_by_user(part)
    return {name: _other_status(name, "eager") if by_user is None else _other_status(name, AS_GIVEN, by_user)}


def _inside(name: str, part: torch.nn.Module, prefix: str) -> dict[str, ComponentStatus]:
    """Return the status of the components inside a module by their paths; a model in a wrapper has the name alone."""
    statuses: dict[str, ComponentStatus] = {}
    for path, module in part.named_modules():
        if path and (component := components.get(module)) is not None:
            bare = without_wrappers(part, path)
            known = f"{prefix}{bare}" if bare else name
            known = f"{prefix}{path}" if known in statuses else known
            statuses[known] = ComponentStatus.of(component, known)
    return statuses


def _copy_status(name: str, preset: str) -> ComponentStatus:
    """Return the status of a copy of a compiled module."""
    reason = (
        f"this is a copy of a module that was compiled with preset {preset}: deepcopy and pickling drop the compile"
    )
    cause = Cause(reason, "copy", hint="call hotloop.compile on the copy")
    return _other_status(name, "eager", cause, preset)


def _other_status(name: str, state: State, cause: Cause | None = None, requested: str = "none") -> ComponentStatus:
    """Return the status of a part that is no component: eager, a copy, or compiled by its user."""
    return ComponentStatus(
        name=name,
        requested=requested,
        inference=requested,
        running=AS_GIVEN if state == AS_GIVEN else "none",
        state=state,
        causes=() if cause is None else (cause,),
    )
