"""The parameters and modules of a program, as a list each: every call of a step asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hotloop.step.state.holdings import Holdings


class Parts:
    """Parameters of models and optimizers, and all modules; looked up once, and anew after `look_again`."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._parameters: list[torch.nn.Parameter] | None = None
        self._modules: list[torch.nn.Module] | None = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of models and optimizers."""
        if self._parameters is None:
            self._parameters = list(self._holdings.parameters().values())
        return self._parameters

    def modules(self) -> list[torch.nn.Module]:
        """Return all modules, whose mode (training or not) matters to a step."""
        if self._modules is None:
            self._modules = [module for root in self._holdings.modules.values() for module in root.modules()]
        return self._modules

    def look_again(self) -> None:
        """Look parameters and modules up anew: there may be others."""
        self._parameters = self._modules = None
