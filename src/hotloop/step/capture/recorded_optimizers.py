"""A loop's optimizers under capture: which run outside of recordings, and where their step counts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.step.capture.optimizers import recordable, return_step_counts, with_host_step_counts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.step.context import Context


class RecordedOptimizers:
    """The optimizers of a loop, some of whose step counts recordings move to the device.

    Attributes:
        outside: names of the optimizers that were left out of recordings.
        hooks: handles of the hooks that keep their checkpoints as eager writes them; to be removed at the end.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.outside: set[str] = set()
        optimizers = context.holdings.optimizers.values()
        self.hooks = [optimizer.register_state_dict_post_hook(with_host_step_counts) for optimizer in optimizers]

    def outside_of(self, stepped: Iterable[str]) -> set[str]:
        """Name the stepped optimizers that run outside of a recording, and log why."""
        names = self.outside & set(stepped)
        for name in stepped:
            why = recordable(self._context.holdings.optimizers[name], self._context.device)
            if why and name not in names:
                names.add(name)
                self._context.reports.say_once(f"{name} runs outside the captured step: {why}")
        return names

    def run_outside(self, name: str, why: str) -> None:
        """Leave an optimizer out of recordings from now on."""
        self.outside.add(name)
        self._context.reports.say_once(f"{name} runs outside the captured step from now on: {why}")

    def return_step_counts(self) -> None:
        """Move the step counts back to where eager keeps them."""
        if self._context.engine is not None:
            for optimizer in self._context.holdings.optimizers.values():
                return_step_counts(optimizer)
