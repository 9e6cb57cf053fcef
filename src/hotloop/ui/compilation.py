"""Advanced options, Compilation: a mode, and a switch with a mode of its own for each component, as settings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop import measured
from hotloop.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPILE = "training.optimization.use_torch_compile"
OWN = (COMPILE, "compile.preset", "compile.inference", "compile.components")
"""The settings that have a place here, and none among the other fields."""
_AUTO = (
    "auto",
    "what is measured in this run", "little: it stays eager where nothing pays", "as what it chooses",
    "whoever does not know yet: most runs",
)  # fmt: skip
_SPELLED = {"none": "NONE", "default": "DEFAULT", "inductor": "INDUCTOR", "triton": "TRITON", "aot_eager": "AOT_EAGER"}
AS_ABOVE = "as above"
ONLY = {"text_encoder_2": "SDXL only"}
"""Components that only some models of their recipe have."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A row of the table of modes; ``missing`` says why this machine cannot run it."""

    name: str
    label: str
    performance: str
    overhead: str
    memory: str
    best_for: str
    measured: str
    missing: str


def modes(missing: Mapping[str, str]) -> list[Mode]:
    """Return all modes, those that a person would try first at the top."""
    found = [Mode(_AUTO[0], _AUTO[0], *_AUTO[1:], measured="", missing="")]
    for name, one in PRESETS.items():
        rows = [row.speedup for row in measured.rows(name)]
        spread = f"{min(rows):.2f}x to {max(rows):.2f}x" if rows else ""
        words = (one.performance, one.overhead, one.memory, one.best_for)
        found.append(Mode(name, _SPELLED.get(name, name), *words, measured=spread, missing=missing.get(name, "")))
    return sorted(found, key=lambda mode: mode.name != "none")


def mode_of(values: Mapping[str, Any]) -> str:
    """Return the mode that settings stand for."""
    asked = values["training"]["optimization"]["use_torch_compile"]
    return "auto" if asked == "auto" else str(values["compile"]["preset"]) if asked else "none"


def form_of(values: Mapping[str, Any], components: list[str]) -> dict[str, str]:
    """Return the fields of the form that stand for settings; a component that is off has no field ``on``."""
    found = {"mode": mode_of(values), "inference": str(values["compile"]["inference"])}
    own = values["compile"]["components"]
    for name in dict.fromkeys([*components, *own]):
        one = own.get(name)
        lanes = one if isinstance(one, dict) else {}
        training, key = lanes.get("training"), f"part.{name}"
        found[f"{key}.mode"] = AS_ABOVE if training in (None, "none") else training
        found[f"{key}.inference"] = lanes.get("inference") or AS_ABOVE
        if training != "none":
            found[f"{key}.on"] = "on"
    return found


def read(form: Mapping[str, str], values: Mapping[str, Any], components: list[str]) -> dict[str, Any]:
    """Return the settings that a person chose here and that differ from the given ones, by their dotted names."""
    usual = form_of(values, components)
    mode = form.get("mode", usual["mode"])
    chosen: dict[str, Any] = {COMPILE: {"none": False, "auto": "auto"}.get(mode, True)}
    if chosen[COMPILE] is True:
        chosen["compile.preset"] = mode
    chosen["compile.inference"] = form.get("inference", usual["inference"])
    for name in dict.fromkeys([*components, *values["compile"]["components"]]):
        key = f"part.{name}"
        if f"{key}.mode" not in form:
            continue
        own = {AS_ABOVE: None}.get(form[f"{key}.mode"], form[f"{key}.mode"])
        inference = form.get(f"{key}.inference", usual[f"{key}.inference"])
        chosen[f"compile.components.{name}.training"] = own if f"{key}.on" in form else "none"
        chosen[f"compile.components.{name}.inference"] = None if inference == AS_ABOVE else inference
    return {name: value for name, value in chosen.items() if at(values, name) != value}


def at(values: Mapping[str, Any], name: str) -> Any:
    """Return what has a dotted name; None where there is nothing."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
