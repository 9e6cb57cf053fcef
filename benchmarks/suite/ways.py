"""The ways to run a step, as a user of torch, a user of hotloop, and a diffusion trainer write it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

import hotloop

if TYPE_CHECKING:
    from collections.abc import Callable

COMPILED = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


@dataclasses.dataclass
class Running:
    """A program that runs in a way: ``run`` takes a batch; ``loop`` is hotloop's, if it owns the step."""

    run: Callable[..., Any]
    loop: hotloop.Loop | None = None
    asked: str = ""

    def close(self):
        """Release what the way holds."""
        if self.loop is not None:
            self.loop.close()


def start(program, way, *, told=None):
    """Set a program up for a way, as its user would before the first step.

    Args:
        program: freshly built.
        way: ``eager``; ``eager+buckets``; a mode of torch.compile; a tier; ``auto``; ``preset:NAME``;
            ``components:unet`` or ``components:all``.
        told: the number of steps that `auto` is told.
    """
    if way == "eager":
        return Running(program.step)
    if way == "eager+buckets":
        return Running(lambda *batch: program.step(*program.padded(*batch)))
    if way in COMPILED:
        return compiled(program, way)
    kind, _, name = way.partition(":")
    if kind == "preset":
        return preset(program, name)
    if kind == "components":
        hotloop.compile({"unet": program.model} if name == "unet" else dict(program.components), "default")
        return Running(program.step)
    loop = hotloop.Loop(program.model, program.optimizer, run=way, total_steps=told, buckets=program.buckets)
    return Running(loop.step(program.step), loop, way)


def compiled(program, mode):
    """Apply ``torch.compile`` in place, as in its documentation; its CUDA graphs need a mark for each step."""
    program.model.compile(**({} if mode == "default" else {"mode": mode}))
    if mode != "reduce-overhead":
        return Running(program.step)

    def step(*batch):
        torch.compiler.cudagraph_mark_step_begin()
        return program.step(*batch)

    return Running(step)


def preset(program, name):
    """Compile the UNet with a preset, as a diffusion trainer's setting does."""
    hotloop.compile(program.model, name)
    marks = name == "triton"  # its CUDA graphs need a mark for each step as well

    def step(*batch):
        torch.compiler.cudagraph_mark_step_begin()
        return program.step(*batch)

    return Running(step if marks else program.step)


def emulated(order):
    """Emulate captured steps if a row asks for it: correct, and as slow as eager."""
    if not order.emulated:
        return contextlib.nullcontext()
    from hotloop.testing import captured_step_emulation

    return captured_step_emulation()
