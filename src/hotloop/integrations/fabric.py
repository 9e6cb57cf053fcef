"""Lightning Fabric: set a model up with a compile in place, and own the step around ``fabric.backward``.

``hotloop.compile(model)`` before or after ``fabric.setup`` and ``hotloop.Loop(model, optimizer)`` on its result work
without this module. It adds what they cannot know: how to compile over the strategy's wrapper, what a model was
compiled with before, and the GradScaler of 16-mixed precision, which a step changes too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import compiled_by_user, validate
from hotloop.errors import ConfigError, missing_extra
from hotloop.integrations.setting_names import OF_LOOP, check_names
from hotloop.integrations.several import FLAT, first_speaks, level_of
from hotloop.step import Loop
from hotloop.step.tiers import tier_of_setting

try:
    import lightning.fabric
    from lightning.fabric.strategies.fsdp import FSDPStrategy
except ImportError as error:
    raise missing_extra("hotloop.integrations.fabric", "lightning", error) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.presets import Preset


def setup(  # noqa: PLR0913 - Fabric's own settings, and ours
    fabric: lightning.fabric.Fabric,
    module: torch.nn.Module,
    *optimizers: torch.optim.Optimizer,
    preset: str | Preset | None = "default",
    reapply: bool | None = None,
    scheduler: Any = None,
    move_to_device: bool = True,
    **settings: Any,
) -> Any:
    """Set a model and its optimizers up by ``fabric.setup``, and compile the model in place.

    Names and ``state_dict`` stay as in eager, whichever place is chosen.

    Args:
        fabric: the launched Fabric.
        module: the model. If the user compiled it by ``torch.compile`` or ``module.compile()``, whole or in parts, it
            is left as it is, with a warning and a reason in its status. ``reapply`` is then Fabric's own
            ``_reapply_compile``, which concerns a model that is wrapped whole.
        optimizers: as for ``fabric.setup``.
        preset: as for `hotloop.compile`; None compiles nothing, where a `loop` will decide.
        reapply: False compiles the model inside the strategy's wrapper (DDP, FSDP), True the wrapper with the model in
            it; None compiles inside: neither was faster on two GPUs (docs/how-to/fabric.md).
        scheduler: as for ``fabric.setup``.
        move_to_device: as for ``fabric.setup``.
        settings: further settings of `hotloop.compile`.

    Returns:
        What ``fabric.setup`` returns.

    Raises:
        ConfigError: a setting does not fit.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"fabric.setup({type(fabric).__name__}, {type(module).__name__}, ...): expected the Fabric first, then the "
            "model: setup(fabric, model, optimizer)"
        )
    check_names("fabric.setup", settings, own=("preset", "reapply", "scheduler", "move_to_device"))
    more = {} if scheduler is None else {"scheduler": scheduler}
    if (given := compiled_by_user(module)) is not None:
        ignored = "" if preset is None else f"preset={preset!r} is not applied: "
        logging.getLogger("hotloop").warning(
            "fabric.setup: %sthe model runs as it was given: %s (%s)", ignored, given.reason, given.hint
        )
        again = True if reapply is None else reapply
        return fabric.setup(module, *optimizers, move_to_device=move_to_device, _reapply_compile=again, **more)
    if preset is not None:
        validate(preset, device=fabric.device.type, **settings)  # refused before Fabric has set anything up
    result = fabric.setup(module, *optimizers, move_to_device=move_to_device, **more)
    if preset is not None:
        model: Any = result[0] if optimizers else result
        compile_in_place(dict(model.named_children())["_forward_module"] if reapply else model, preset, **settings)
    return result


def loop(
    fabric: lightning.fabric.Fabric,
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
    *,
    state: Any = (),
    **settings: Any,
) -> Loop:
    """Make a `hotloop.Loop` for a step around ``fabric.backward``.

    ::

        model, optimizer = fabric.setup(model, optimizer)
        loop = hotloop.integrations.fabric.loop(fabric, model, optimizer)

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

    Args:
        fabric: the Fabric that set the model up. The GradScaler of its precision, if any, joins the step's state.
        model: as ``fabric.setup`` returned it.
        optimizer: as ``fabric.setup`` returned it.
        state: as for `hotloop.Loop`.
        settings: further settings of `hotloop.Loop`.

    Raises:
        ConfigError: an argument does not fit, a setting does not exist, or the model was not set up.
    """
    if not hasattr(fabric, "strategy"):
        raise ConfigError(
            f"fabric.loop({type(fabric).__name__}, ...): expected the Fabric first, then what its setup() returned: "
            "loop(fabric, model, optimizer)"
        )
    check_names("fabric.loop", settings, OF_LOOP)
    models = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model]
    for part in models:
        if not lightning.fabric.is_wrapped(part):
            raise ConfigError(
                f"fabric.loop: model {type(part).__name__} was not set up: hand over what fabric.setup() returned"
            )
    tier = tier_of_setting(settings.get("run", "auto"))
    if tier is not None and tier.graph and isinstance(fabric.strategy, FSDPStrategy):
        logging.getLogger("hotloop").log(
            level_of(logging.WARNING),
            "fabric.loop(run=%r): %s: %s; hotloop.compile(model) compiles it in place",
            settings["run"], type(fabric.strategy).__name__, FLAT,
        )  # fmt: skip
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    others = tuple(state) if isinstance(state, list | tuple) else (state,)
    with first_speaks():
        return Loop(model, optimizer, state=others if scaler is None else (*others, scaler), **settings)
