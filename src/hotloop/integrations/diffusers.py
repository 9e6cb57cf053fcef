"""diffusers: a training program's parts under the names that a pipeline gives them, and models that are offloaded.

::

    from hotloop.integrations.diffusers import Parts, compile

    compile(Parts(unet=unet, text_encoder=text_encoder, vae=vae))  # the denoiser alone, unless preset names others
    compile(pipeline, {"unet": "default", "vae": "default"})

`hotloop.compile` takes pipelines as they are; this module adds what training needs beside one. LoRA adapters may be
added, switched and merged at any time, and gradient checkpointing may be turned on: each change is compiled anew once,
and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.apply import components_of, hooked
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import leave_eager
from hotloop.compiling.observe import explain
from hotloop.config import component_config
from hotloop.errors import ConfigError
from hotloop.integrations.setting_names import check_names
from hotloop.presets import expected

if TYPE_CHECKING:
    from hotloop.presets import Preset


class Parts:
    """The parts of a diffusion program that is no pipeline: trained modules, and frozen ones beside them.

    Args:
        parts: modules (and whatever else a pipeline would hold) by a pipeline's names: ``unet`` or ``transformer``,
            ``text_encoder``, ``vae``, ...

    Raises:
        ConfigError: there is no module among them.
    """

    def __init__(self, **parts: Any) -> None:
        if not any(isinstance(part, torch.nn.Module) for part in parts.values()):
            raise ConfigError(f"Parts({', '.join(parts)}): expected modules by name, e.g. unet=unet, vae=vae")
        self.components = parts


def compile(  # noqa: A001 - the name of hotloop.compile
    pipeline: Any, preset: str | Preset | Mapping[str, str | Preset] = "default", **settings: Any
) -> Any:
    """Compile a pipeline's denoiser in place, or the parts that ``preset`` names.

    A part that is moved between host and device as it is called (``enable_model_cpu_offload``, group offloading) stays
    eager, and the status says so.

    Args:
        pipeline: a diffusers pipeline, or `Parts`.
        preset: as `hotloop.compile` takes it.
        settings: as `hotloop.compile` takes them.

    Returns:
        ``pipeline``.

    Raises:
        ConfigError: a setting does not fit; ``pipeline`` has no ``components``; one preset was given and there is no
            denoiser (``unet`` or ``transformer``), or ``torch.compile`` wrapped it.
    """
    check_names("compile", settings, own=("preset",))
    if preset == "auto":
        raise ConfigError(
            "compile(preset='auto'): expected a preset, such as 'default': only a loop, which owns the step, can "
            "measure and decide: hotloop.Loop(pipeline.unet, optimizer)"
        )
    target = components_of(pipeline)
    if target.kind != "pipeline":
        raise ConfigError(
            f"{type(pipeline).__name__} is no pipeline: hand over a pipeline, or Parts(unet=model); a "
            "model alone is compiled by hotloop.compile"
        )
    names = tuple(preset) if isinstance(preset, Mapping) else target.denoisers()
    target.refuse_wrapped([name for name in names if name in target.components])
    presets = dict(preset) if isinstance(preset, Mapping) else dict.fromkeys(names, preset)
    inference = settings.get("inference")
    for name in inference if isinstance(inference, Mapping) else ():
        if name not in target.components:
            problem = f"inference={{{name!r}: ...}}: there is no such component"
            raise ConfigError(f"{problem}: {expected(name, target.components)}")

    for name in names:
        part = target.components.get(name)
        if part is None or not hooked(part):
            continue
        off = inference.get(name) if isinstance(inference, Mapping) else inference
        config = component_config(presets.pop(name), **{**settings, "inference": off})
        reason = f"{type(part).__name__} is offloaded, and is left as it is: it runs eager"
        leave_eager(name, part, config, explain.no_effect("offloaded", name, reason))
    if presets:
        compile_in_place(pipeline, presets, **settings)
    return pipeline
