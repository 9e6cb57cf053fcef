"""Planted failures: code that preset ``aot_eager`` compiles fails in one stage, so that what follows can be tested."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch

from hotloop._torch import backends
from hotloop._torch.traced import TracedGraph, compile_traced
from hotloop.compiling.apply import forget_roots
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

Stage = Literal["forward compile", "backward compile", "forward run", "backward run"]
STAGES: tuple[Stage, ...] = ("forward compile", "backward compile", "forward run", "backward run")
TELLS = "planted failure"
"""What the message of a planted failure says: what a status must tell of."""


class PlantedError(RuntimeError):
    """What a planted failure raises, unless it was given another exception."""


@dataclasses.dataclass
class Planted:
    """A failure that was planted; ``fired`` is how often it came so far."""

    stage: Stage
    after: int
    fired: int = 0
    reached: int = 0

    def reach(self) -> None:
        """Fail where it is time to.

        Raises:
            PlantedError: the stage was reached for the ``after + 1``-th time or more.
        """
        self.reached += 1
        if self.reached > self.after:
            self.fired += 1
            raise PlantedError(f"{TELLS} in {self.stage}")

    def compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one of dynamo's graphs as ``aot_eager`` does, with the failure in its place."""
        return compile_traced(graph, inputs, self._make)

    def _make(self, traced: TracedGraph) -> Callable[[list[Any]], Any]:
        phase, what = self.stage.split()
        here = traced.kind == phase
        if here and what == "compile":
            self.reach()

        def run(args: list[Any]) -> Any:
            if here and what == "run":
                self.reach()
            return traced.call(args)

        return run


@contextlib.contextmanager
def planted_failure(stage: Stage, *, after: int = 0) -> Iterator[Planted]:
    """Have code that preset ``aot_eager`` compiles fail in a stage while the block runs.

    Code compiled before is forgotten, before the block and after it (``torch.compiler.reset``).

    Args:
        stage: where: compiling or running, of a forward that has gradients or of its backward.
        after: how often the stage is passed without a failure before.

    Yields:
        the failure, which counts how often it came: a test in which it never did has tested nothing.

    Raises:
        ConfigError: there is no such stage.
    """
    if stage not in STAGES:
        raise ConfigError(f"planted_failure({stage!r}): expected one of {', '.join(STAGES)}")
    planted = Planted(stage, after)
    forget_compiled_code()
    try:
        with mock.patch.object(backends, "aot_eager", return_value=planted.compile):
            yield planted
    finally:
        forget_compiled_code()


def forget_compiled_code() -> None:
    """Forget all compiled code of the process, shared code of equal modules too: a test begins cold."""
    torch.compiler.reset()
    forget_roots()
