"""What a step uses that its loop was not given: optimizers, and models that are sharded."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hotloop._torch.sharded import Sharded, is_sharded
from hotloop._torch.thread_patch import called_here
from hotloop.step.obstacle import Obstacle
from hotloop.step.ranks import threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from hotloop.step.audit.findings import AuditFindings, Look

_NAME_MODEL = "give it to the loop: Loop([model, other], optimizer)"
_NAME_IT = "name it, and its model: Loop([model, other], [optimizer, its_optimizer])"


@contextlib.contextmanager
def noting_strangers(
    given: Iterable[torch.optim.Optimizer],
    sharded: Sharded,
    optimizers: list[torch.optim.Optimizer],
    models: list[torch.nn.Module],
    look: Look,
) -> Iterator[None]:
    """Note what is used in the block and was not given to the loop. What other threads train is another training's.

    Args:
        given: the loop's optimizers.
        sharded: its sharded models.
        optimizers: others that step: their settings would be frozen.
        models: other sharded models that are called.
        look: hears of what fails of ours.
    """
    known = {id(one) for one in given}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) not in known:
            optimizers.append(optimizer)

    def elsewhere(*_: Any) -> None:
        threads.seen()

    def called(module: torch.nn.Module, _arguments: Any) -> None:
        if is_sharded(module) and not sharded.knows(module):
            models.append(module)

    with called_here(functools.partial(look.ours, note), elsewhere) as hook:
        before = functools.partial(look.ours, called)
        handles = [register_optimizer_step_pre_hook(hook), register_module_forward_pre_hook(before)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def forget_whole(seen: AuditFindings, others: list[torch.nn.Module]) -> None:
    """Forget the whole parameters of sharded models that the loop was not given.

    They are temporary: to copy memory that was given back would end the process.
    """
    if not others:
        return
    temporary = Sharded(others).is_temporary
    memory = [(one, one.untyped_storage()) for one in seen.written_found]
    seen.written_found = [one for one, its in memory if its.nbytes() and not temporary(its.data_ptr())]


def of_strangers(
    optimizers: list[torch.optim.Optimizer], models: list[torch.nn.Module], given: Iterable[torch.optim.Optimizer]
) -> list[Obstacle]:
    """Return what keeps a step from being recorded that uses optimizers or sharded models of which no loop knows.

    Args:
        optimizers: the optimizers that stepped.
        models: the models that were called.
        given: the loop's own optimizers.
    """
    steps = "an optimizer that the loop does not know steps"
    calls = "the step calls a sharded model that the loop was not given"
    known = list(given)
    return [
        *(Obstacle(f"{steps}: {type(one).__name__}", _name_it(one, known), not_repeatable=True) for one in optimizers),
        *(Obstacle(f"{calls}: {name}", _NAME_MODEL) for name in dict.fromkeys(type(one).__name__ for one in models)),
    ]


def _name_it(optimizer: torch.optim.Optimizer, given: list[torch.optim.Optimizer]) -> str:
    """Return how to name an optimizer: one that another keeps inside (SAM) has no model of its own."""
    steps = _parameters(optimizer)
    outer = next((one for one in given if steps <= _parameters(one)), None)
    if outer is None:
        return _NAME_IT
    held = next((name for name, value in vars(outer).items() if value is optimizer), "")
    steps_the_same = f"{type(outer).__name__} steps the same parameters: name both"
    if not held:
        return f"{steps_the_same}, and give the {type(optimizer).__name__} that it steps beside it in Loop's list"
    return f"{steps_the_same}, Loop(model, [optimizer, optimizer.{held}])"


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
