"""What runs of a model, and why it is not what was asked for: its components found, each with its account."""

from __future__ import annotations

from typing import Any

import torch

from hotloop._torch.module import get_entry
from hotloop.compiling.apply import compiled_by_torch, components_of, entry_points
from hotloop.compiling.apply.targets import Target, without_wrappers
from hotloop.compiling.control.component import CompiledFunction, Entry
from hotloop.compiling.control.component_status import ComponentStatus, Status, status_of
from hotloop.compiling.control.given import AS_GIVEN, compiled_by_user, compiled_over
from hotloop.compiling.control.installed import MARKER, components
from hotloop.compiling.observe import Cause, collector


def status(model: Any) -> Status:
    """Say what was asked for and what runs, for each component of a model, mapping, pipeline or compiled callable.

    What its user compiled by torch's own means, and was not handed to hotloop, is ``as-given``.
    """
    collector.poll(force=True)
    if isinstance(model, CompiledFunction):
        return Status({model.component.name: status_of(model.component.name, model.component)})
    wrapped = isinstance(model, torch.nn.Module) and "" in compiled_by_torch(model)
    target = Target("module", {"model": model}) if wrapped else components_of(model)
    found: dict[str, ComponentStatus] = {}
    for name, part in target.components.items():
        if isinstance(part, CompiledFunction):
            found[name] = status_of(name, part.component)
        elif isinstance(part, torch.nn.Module):
            found.update(_module_status(name, part, f"{name}." if target.kind != "module" else ""))
        else:
            found[name] = _eager_status(name)
    hints = [_left_out_hint(target, found), *_taken_over_hints(target)]
    return Status(found, target.skipped, "\n".join(hint for hint in hints if hint))


def _taken_over_hints(target: Target) -> list[str]:
    """Say of what hotloop compiled what its user had compiled in it by torch's own means."""
    parts = {name: part for name, part in target.components.items() if isinstance(part, torch.nn.Module)}
    theirs = {name: compiled_over(part) for name, part in parts.items() if part in components}
    return [f"{name}: {one}" for name, one in theirs.items() if one]


def _left_out_hint(target: Target, found: dict[str, ComponentStatus]) -> str:
    left = [name for name, status in found.items() if status.requested == "none" and target.kind == "pipeline"]
    if not left or len(left) == len(found):
        return ""
    return f"eager: {', '.join(left)}; to compile them too, give preset a mapping, e.g. {{{left[0]!r}: 'default', ...}}"


def _module_status(name: str, part: torch.nn.Module, prefix: str) -> dict[str, ComponentStatus]:
    """Give a module's own component, or those compiled inside it, or why it is eager.

    Args:
        name: of the module among the components.
        part: the module.
        prefix: what goes before the path of a component inside it.
    """
    if "" in compiled_by_torch(part):  # around what hotloop compiled, which has the account
        inside = dict(part.named_children())["_orig_mod"]
        if any(module in components for module in inside.modules()):
            return _module_status(name, inside, prefix)
    if (own := components.get(part)) is not None:
        theirs = compiled_by_user(part)
        if theirs is not None and not any(isinstance(get_entry(point), Entry) for point in entry_points(part)):
            return {name: _as_given_status(name, theirs)}  # module.compile() came after hotloop.compile
        return {name: status_of(name, own), **(_inside(name, part, prefix) if own.left else {})}
    if inner := _inside(name, part, prefix):
        return inner
    copies = {path: module.__dict__[MARKER] for path, module in part.named_modules() if MARKER in module.__dict__}
    if copies:
        named = {f"{prefix}{path}" if path else name: marker for path, marker in copies.items()}
        return {path: _eager_status(path, marker) for path, marker in named.items()}
    theirs = compiled_by_user(part)
    return {name: _eager_status(name) if theirs is None else _as_given_status(name, theirs)}


def _inside(name: str, part: torch.nn.Module, prefix: str) -> dict[str, ComponentStatus]:
    """Give the components inside a module, each by its path; the model in a framework's wrapper by its name."""
    found: dict[str, ComponentStatus] = {}
    for path, module in part.named_modules():
        if path and (component := components.get(module)) is not None:
            bare = without_wrappers(part, path)
            known = f"{prefix}{bare}" if bare else name
            known = f"{prefix}{path}" if known in found else known
            found[known] = status_of(known, component)
    return found


def _as_given_status(name: str, why: Cause) -> ComponentStatus:
    """Give the status of a component that hotloop was asked nothing of, and that its user compiled."""
    return ComponentStatus(
        name=name, requested="none", inference="none", running=AS_GIVEN, state=AS_GIVEN, causes=(why,)
    )


def _eager_status(name: str, marker: str | None = None) -> ComponentStatus:
    causes: tuple[Cause, ...] = ()
    if marker is not None:
        reason = (
            f"this is a copy of a module that was compiled with preset {marker}: deepcopy and pickling drop the compile"
        )
        causes = (Cause(reason, "copy", None, None, "", "call hotloop.compile on the copy"),)
    requested = marker or "none"
    return ComponentStatus(
        name=name, requested=requested, inference=requested, running="none", state="eager", causes=causes
    )
