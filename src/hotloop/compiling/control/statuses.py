"""Finds the components of a model, and returns what runs of each, and why it is not what was asked for."""

from __future__ import annotations

from typing import Any

import torch

from hotloop._torch.module import get_entry, is_compiled_function
from hotloop.compiling.apply.targets import Target, compiled_by_torch, components_of, entry_points, without_wrappers
from hotloop.compiling.control.component import CompiledFunction, Entry
from hotloop.compiling.control.component_status import ComponentStatus, Status
from hotloop.compiling.control.installed import components
from hotloop.compiling.control.precompiled import AS_GIVEN, compiled_by_user
from hotloop.compiling.observe import Cause, collector


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
            statuses |= _of_module(name, part, f"{name}." if target.kind != "module" else "")
        else:
            given = Cause("torch compiled it", AS_GIVEN) if is_compiled_function(part) else None
            statuses[name] = _of_no_component(name, given)
    left = [name for name, one in statuses.items() if one.requested == "none" and target.kind == "pipeline"]
    hint = ""
    if left and len(left) < len(statuses):
        example = f"{{{left[0]!r}: 'default', ...}}"
        hint = f"eager: {', '.join(left)}; to compile them too, give preset a mapping, e.g. {example}"
    return Status(statuses, target.skipped, hint)


def is_compiled(model: Any) -> bool:
    """Return whether a compile is in force on a model or a part of it: hotloop's, called yet or not, or torch's own.

    For code that asks for ``model._orig_mod`` or ``OptimizedModule``, the wrapper of ``torch.compile``. `compile` makes
    none: the model is itself. A model that runs eager, since its compile failed or was taken off, is not compiled. A
    function counts as well.

    Args:
        model: anything that `compile` or ``torch.compile`` takes or returns.
    """
    return any(one.state != "eager" for one in status(model).components.values())


def _of_module(name: str, part: torch.nn.Module, prefix: str) -> dict[str, ComponentStatus]:
    """Return the status of a module's own component, or of those compiled inside it, or why it is eager.

    Args:
        name: of the module among the components.
        part: the module.
        prefix: what goes before the path of a component inside it.
    """
    by_user, own = compiled_by_user(part), components.get(part)
    if own is not None:
        if by_user is not None and not any(isinstance(get_entry(point), Entry) for point in entry_points(part)):
            return {name: _of_no_component(name, by_user)}  # module.compile() came after hotloop.compile
        if not own.left:
            return {name: ComponentStatus.of(own, name)}
    statuses = {} if own is None else {name: ComponentStatus.of(own, name)}
    for path, module in part.named_modules():
        if path and (component := components.get(module)) is not None:
            bare = without_wrappers(part, path)  # a model in a wrapper has the name alone
            known = f"{prefix}{bare}" if bare else name
            known = f"{prefix}{path}" if known in statuses else known
            statuses[known] = ComponentStatus.of(component, known)
    return statuses or {name: _of_no_component(name, by_user)}


def _of_no_component(name: str, given: Cause | None) -> ComponentStatus:
    """Return the status of a part that hotloop did not compile: eager, or compiled by its user."""
    return ComponentStatus(
        name=name,
        requested="none",
        inference="none",
        running="none" if given is None else AS_GIVEN,
        state="eager" if given is None else AS_GIVEN,
        causes=() if given is None else (given,),
    )
