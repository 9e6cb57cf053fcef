"""Planted failures: code that preset ``aot_eager`` compiles fails in one stage, so that the reaction can be tested."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
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
MESSAGE = "planted failure"
"""The text in the message of every planted failure, which a status must repeat."""


class PlantedError(RuntimeError):
    """The exception of a planted failure."""


@dataclasses.dataclass
class Planted:
    """A failure that was planted.

    Args:
        stage: the stage that fails.
        after: how often the stage is passed before it fails.
        fired: how often it has failed so far.
        reached: how often the stage was reached so far.
    """

    stage: Stage
    after: int
    fired: int = 0
    reached: int = 0

    def reach(self) -> None:
        """Count that the stage was reached, and fail if it is time to.

        Raises:
            PlantedError: the stage was reached for the ``after + 1``-th time or more.
        """
        self.reached += 1
        if self.reached > self.after:
            self.fired += 1
            raise PlantedError(f"{MESSAGE} in {self.stage}")

    def compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph of dynamo's as ``aot_eager`` does, with the failure in its place."""
        return compile_traced(graph, inputs, self._make)

    def _make(self, traced: TracedGraph) -> Callable[[list[Any]], Any]:
        phase, action = self.stage.split()
        here = traced.kind == phase
        if here and action == "compile":
            self.reach()

        def run(args: list[Any]) -> Any:
            if here and action == "run":
                self.reach()
            return traced.call(args)

        return run


@contextlib.contextmanager
def planted_failure(stage: Stage, *, after: int = 0) -> Iterator[Planted]:
    """Make code that preset ``aot_eager`` compiles fail in a stage while the block runs.

    Code that was compiled earlier is forgotten, before the block and after it (``torch.compiler.reset``).

    Args:
        stage: compiling or running, of a forward that has gradients or of its backward.
        after: how often the stage is passed before it fails.

    Yields:
        the failure, which counts how often it fired: a test in which it never did has tested nothing.

    Raises:
        ConfigError: there is no such stage.
    """
    stages = typing.get_args(Stage)
    if stage not in stages:
        raise ConfigError(f"planted_failure({stage!r}): expected one of {', '.join(stages)}")
    planted = Planted(stage, after)
    forget_compiled_code()
    try:
        with mock.patch.object(backends, "aot_eager", return_value=planted.compile):
            yield planted
    finally:
        forget_compiled_code()


def forget_compiled_code() -> None:
    """Forget all compiled code of the process, also code that equal modules share: a test begins cold."""
    torch.compiler.reset()
    forget_roots()
