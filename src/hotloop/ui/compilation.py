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
    "times eager steps, prepares what is expected to pay, proves it against eager, and keeps it if it is faster",
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
    sets: str
    performance: str
    overhead: str
    memory: str
    best_for: str
    measured: str
    missing: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A component of the recipe, as the form has it."""

    name: str
    on: bool
    training: str
    inference: str


def modes(missing: Mapping[str, str]) -> list[Mode]:
    """Return all modes, those that a person would try first at the top."""
    found = [Mode(_AUTO[0], _AUTO[0], *_AUTO[1:], measured="", missing="")]
    for name, one in PRESETS.items():
        rows = [row.speedup for row in measured.rows(name)]
        spread = f"{min(rows):.2f}x to {max(rows):.2f}x" if rows else ""
        words = (one.sets, one.performance, one.overhead, one.memory, one.best_for)
        found.append(Mode(name, label(name), *words, measured=spread, missing=missing.get(name, "")))
    return sorted(found, key=lambda mode: mode.name != "none")


def label(mode: str) -> str:
    """Return a mode's name as the form spells it."""
    return _SPELLED.get(mode, mode)


def not_here(device: str) -> dict[str, dict[str, str]]:
    """Return the choices of settings that a machine's device cannot run, each with the reason."""
    return {"compile.layout": {"channels_last": "auto tries it on a GPU only"}} if device in ("cpu", "mps") else {}


def mode_of(values: Mapping[str, Any]) -> str:
    """Return the mode that settings stand for."""
    asked = values["training"]["optimization"]["use_torch_compile"]
    return "auto" if asked == "auto" else str(values["compile"]["preset"]) if asked else "none"


def parts(values: Mapping[str, Any], components: list[str]) -> list[Part]:
    """Return the components of a recipe as its settings have them."""
    own = values["compile"]["components"]
    kept = {name: one for name, one in own.items() if isinstance(one, dict)}
    return [
        Part(
            name,
            one.get("training") != "none",
            AS_ABOVE if one.get("training") in (None, "none") else one["training"],
            one.get("inference") or AS_ABOVE,
        )
        for name in dict.fromkeys([*components, *own])
        for one in [kept.get(name, {})]
    ]


def read(form: Mapping[str, str], values: Mapping[str, Any], components: list[str]) -> dict[str, Any]:
    """Return the settings that a person chose here and that differ from the given ones, by their dotted names."""
    mode = form.get("mode", mode_of(values))
    chosen: dict[str, Any] = {COMPILE: {"none": False, "auto": "auto"}.get(mode, True)}
    if chosen[COMPILE] is True:
        chosen["compile.preset"] = mode
    chosen["compile.inference"] = form.get("inference", values["compile"]["inference"])
    for part in parts(values, components):
        key = f"part.{part.name}"
        if f"{key}.mode" not in form:
            continue
        own = form[f"{key}.mode"]
        training = "none" if f"{key}.on" not in form else None if own == AS_ABOVE else own
        inference = form.get(f"{key}.inference", part.inference)
        chosen[f"compile.components.{part.name}.training"] = training
        chosen[f"compile.components.{part.name}.inference"] = None if inference == AS_ABOVE else inference
    return {name: value for name, value in chosen.items() if at(values, name) != value}


def at(values: Mapping[str, Any], name: str) -> Any:
    """Return what has a dotted name; None where there is nothing."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
