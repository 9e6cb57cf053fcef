"""An exponential moving average of what is trained: it often samples and generalises better than the last step does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class Average:
    """Averages of a model's trained parameters; it begins with them as they are.

    Args:
        model: whose parameters; they stay where they are.
        decay: how much of the average an update keeps, in 0 to 1; about ``1 / (1 - decay)`` steps are averaged.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model = model
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self.tensors = [one.detach().clone() for one in self._parameters]
        of = {id(one): average for one, average in zip(self._parameters, self.tensors, strict=True)}
        # A tied parameter has several names, and a checkpoint's weights have each of them.
        every = model.named_parameters(remove_duplicate=False)
        self._named = {name: of[id(one)] for name, one in every if one.requires_grad}
        self._blend = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters in, as they are after a step. Nothing in it waits for the device."""
        self._blend(self.tensors, [one.detach() for one in self._parameters], 0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the model while the block runs; memory stays where it is, which recordings know."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self.tensors, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
        for one in self._model.modules():
            reshard: Any = getattr(one, "reshard", None)
            if reshard is not None:  # FSDP2: what a forward without gradients has gathered, the next one would use
                reshard()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of their parameters."""
        return dict(self._named)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the averages of a checkpoint.

        Raises:
            KeyError: they are of other parameters.
        """
        for name, average in self._named.items():
            average.copy_(state[name])
