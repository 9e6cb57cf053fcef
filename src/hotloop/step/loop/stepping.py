"""The steps of a loop one after the other: each runs in the tier that was decided, is timed, and accounted for."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop.step.audit.returned import without_used_graph
from hotloop.step.policy.timed import Ran, Timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")
_UNTIMED = 7
"""Steps that run untimed after each timed one, while eager stays and nothing is tried."""
_NOTHING = contextlib.nullcontext()


class Stepping:
    """Runs and times the steps of a loop.

    Attributes:
        times: of steps; ``reference_times``: of what a proof ran beside one.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.times: Timed[Ran] = Timed(loop.device)
        self.reference_times: Timed[str] = Timed(loop.device)
        self._latest: Runner | None = None
        self._untimed = 0
        self._settled = False

    def run(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the coming step; gives what the user's function returned."""
        if self._untimed and self._loop.auto is not None:
            self._untimed -= 1
            self._latest = None
            result = self._returned(runner.step(*args, **kwargs))
            self._loop.steps += 1
            self._loop.account.untimed(self._loop.given)
            return result
        if self._loop.auto is not None:
            self.carefully(self._loop.auto.at_step_boundary, runner.step, args, kwargs)
        self._latest = runner
        tier, trial = self._loop.goal, self._loop.auto.now() if self._loop.auto is not None else None
        # Turns of a trial are of two kinds, and begin on an idle device: launches hide behind no earlier step.
        alone = trial is not None or (self._loop.auto is not None and self._loop.auto.looks_at_launches)
        runner.code.look_before()
        with self._loop.auto.noting_calls() if self._loop.auto is not None else _NOTHING:
            result = self.times.run(
                lambda: runner.run(args, kwargs, tier),
                lambda: Ran(runner.ran, runner.kind, trial, alone=alone),
                alone=alone,
            )
        self.carefully(runner.code.look_after)
        self._loop.steps += 1
        if self._loop.auto is not None:
            self._loop.auto.took(runner.kind)
        self.carefully(self.settle)
        if self._loop.auto is not None and self._loop.auto.quiet:
            self._untimed = _UNTIMED
        return self._returned(result)

    def _returned(self, result: Any) -> Any:
        return without_used_graph(result) if self._loop.may_capture else result

    def carefully(self, do: Callable[..., None], *args: Any) -> None:
        """Do what belongs to deciding and accounting; where it fails, steps go on as the model was given."""
        try:
            do(*args)
        except Exception:  # noqa: BLE001 - none of it is worth the user's run
            _log.warning("deciding how steps run failed, so they run %s from now on", self._loop.given, exc_info=True)
            if self._loop.auto is not None:
                self._loop.auto.background.stop()
            self._loop.auto = None
            self._loop.course.stay_as_given()
            self.times, self.reference_times = Timed(self._loop.device), Timed(self._loop.device)
            self._loop.plain = True

    def settle(self) -> None:
        """Take note of the steps whose times have become known."""
        if self._settled:
            return
        for tier, timing in self.reference_times.known():
            self._loop.account.beside(tier, timing)
        for ran, timing in self.times.known():
            self._loop.account.step(ran.tier, ran.kind, timing)
            if self._loop.auto is not None:
                self._loop.auto.timed(ran, timing)

    def settle_last(self) -> None:
        """Wait for the last steps, whose times are known then; none is added to a record that is finished."""
        if self._loop.device.type == "cuda":
            torch.cuda.synchronize(self._loop.device)
        self.settle()
        self._settled = True

    def last_ran(self) -> tuple[str, str]:
        """Give the last step's tier and what it did: ``run``, ``survey``, ``proof``, ``capture`` or ``undone``."""
        if self._loop.plain or self._latest is None:
            return self._loop.given, "run"
        return self._latest.ran, self._latest.kind

    def beside(self, tier: Tier, run: Callable[[], Any]) -> Any:
        """Run the reference of a proof, and take its time for what a step in its tier takes."""
        return self.reference_times.run(run, lambda: tier.name)
