"""The steps of a loop one after the other: each runs in the tier that was decided, is timed, and accounted for."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop.errors import StepLostError
from hotloop.measure import flatten, unflatten
from hotloop.step.audit.findings import described
from hotloop.step.loop.clock import Timed
from hotloop.step.policy.policy import Ran
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.context import Context
    from hotloop.step.loop.account import Account
    from hotloop.step.loop.runner import StepRunner
    from hotloop.step.loop.transitions import Transitions

_log = logging.getLogger("hotloop")
_NOTHING = contextlib.nullcontext()
_UNTIMED = 7
"""Steps that run untimed after each timed one, while eager stays and nothing is tried."""


class Stepping:
    """The runner and clock of a loop's steps.

    Attributes:
        times: of steps.
        reference_times: of what a proof ran beside a step.
        bypassed: deciding has failed, so that steps run as the models were given and nothing is done beside them.
    """

    def __init__(
        self, context: Context, transitions: Transitions, account: Account, reference_times: Timed[Ran]
    ) -> None:
        self._context, self._transitions, self._account = context, transitions, account
        self.times: Timed[Ran] = Timed(context.device)
        self.reference_times = reference_times
        self.bypassed = False
        self._latest: StepRunner | None = None
        self._untimed = 0
        self._settled = False

    def run(self, runner: StepRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the coming step; return what the user's function returned.

        Where hotloop fails, the step has run, or runs now: steps go on as the models were given.

        Raises:
            Exception: the user's own.
            StepLostError: the step is lost, or another process has ended.
        """
        ran, before = runner.step.program.ran, self._context.progress.steps
        ran.begin()
        try:
            return self._run(runner, args, kwargs)
        except StepLostError:
            raise
        except Exception as error:
            if ran.is_users(error) or ran.state is None:
                raise
            self._disable(error)
            done = ran.state
        finally:
            ran.begin()
        # Out of the except clause, so that what eager raises does not carry our exception along.
        result = done[0] if done else runner.step.program.step(*args, **kwargs)
        self._context.progress.steps = before + 1
        return result

    def _run(self, runner: StepRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self._context
        self.disable_on_error(self._tell_policy)  # of a step that raised
        policy = self._transitions.policy
        function = runner.step.program.function
        if self._untimed and policy.chooses:
            self._untimed -= 1
            self._latest = None
            result = self._returned(runner.step.program.step(*args, **kwargs))
            context.progress.steps += 1
            self._account.untimed(context.base_tier.name)
            return result
        if policy.chooses:
            self.disable_on_error(lambda: self._transitions.apply(policy.before_step(function, args, kwargs)))
            policy = self._transitions.policy
        self._latest = runner
        tier, turn = context.progress.tier, policy.turn() if policy.chooses else None
        # Turns of a trial are of two kinds, and begin on an idle device: launches hide behind no earlier step.
        alone = turn is not None or (policy.chooses and policy.idle_start)
        if turn is not None:
            self.proved()  # the tier that is left stays in torch's cache, as a proof does
            if context.engine is not None:
                context.engine.look()  # what that takes belongs to no tier
        if tier.compiles:
            runner.code.look_before()
        with policy.watch_step() if policy.chooses else _NOTHING:
            result = self.times.run(
                lambda: runner.run(args, kwargs, tier),
                lambda: Ran(runner.step.ran, runner.step.doing, turn, alone=alone, call=runner.step.call),
                alone=alone,
            )
        context.holdings.keep_outside(result)
        self.disable_on_error(self._tell_policy)
        if tier.compiles:
            self.disable_on_error(runner.code.look_after)
        if tier.other_kernels:
            self.disable_on_error(runner.code.look_at_gradients, tier.base)
        context.progress.steps += 1
        if policy.chooses:
            self._transitions.policy.after_step(runner.step.doing)
        self.disable_on_error(self.settle)
        self.disable_on_error(self._look_at_memory, runner)
        if policy.chooses and self._transitions.policy.quiet:
            self._untimed = _UNTIMED
        return self._returned(result)

    def _tell_policy(self) -> None:
        """Tell the policy the verdicts of the step, and do what it decides."""
        for verdict in self._context.reports.take():
            self._transitions.apply(getattr(self._transitions.policy, verdict.name)(*verdict.arguments) or ())

    def proved(self) -> None:
        """Note that a proof or trial has left its caches: they are given back once no further one is under way."""
        self._context.room.proved = True

    def _look_at_memory(self, runner: StepRunner) -> None:
        """Note what first steps take; give the caches of proofs back, once after the last: taking anew is slow."""
        room, policy = self._context.room, self._transitions.policy
        if room.notes_steps:
            room.note_step(self._context.device)
        room.proved |= runner.step.doing in ("proof", "capture", "sentinel")
        if not room.proved or runner.step.doing != "run":
            return
        if not (policy.preparing or policy.turn() is not None or runner.capturing.proving):
            room.give_back(self._context.device)

    def _returned(self, result: Any) -> Any:
        return without_used_graph(result) if self._context.progress.may_capture else result

    def disable_on_error(self, do: Callable[..., None], *args: Any) -> None:
        """Do what belongs to deciding and accounting; where it fails, steps go on as the models were given."""
        try:
            do(*args)
        except StepLostError:  # another process has ended
            raise
        except Exception as error:  # noqa: BLE001 - none of it is worth the user's run
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        """Run steps as the models were given from now on, and say so: something of hotloop's has failed."""
        context, self.bypassed = self._context, True
        base = context.base_tier.name
        cause = "hotloop failed: %s. Steps run %s from now on; please report these lines to hotloop"
        _log.warning(cause, described(error), base, exc_info=error)
        decided = functools.partial(self._account.decided, f"hotloop failed: {described(error)}; steps run {base}", {})
        self.times, self.reference_times = Timed(context.device), Timed(context.device)
        close = context.peers.close  # else the others wait for this one's vote
        for leave in (decided, self._transitions.policy.stop, self._transitions.stay_as_given, close):
            try:
                leave()
            except Exception:  # noqa: BLE001 - as above
                _log.warning("what was begun could not be ended in order", exc_info=True)

    def settle(self) -> None:
        """Account for the steps whose times have become known."""
        if self._settled:
            return
        for beside, timing in self.reference_times.known():
            self._account.beside(beside.tier, timing, beside.call)
        for ran, timing in self.times.known():
            policy = self._transitions.policy
            self._account.step(ran.tier, ran.kind, timing, chosen=policy.chooses, call=ran.call)
            if policy.chooses:
                self._transitions.apply(policy.timed(ran, timing))

    def settle_last(self) -> None:
        """Wait for the last steps, whose times are known then; none is added to a record that is finished."""
        wait_for(self._context.device)
        self.disable_on_error(self.settle)
        self._settled = True

    def last_ran(self) -> tuple[str, str]:
        """Return the last step's tier and what it did: ``run``, ``survey``, ``proof``, ``capture`` or ``undone``."""
        if self.bypassed or self._latest is None:
            return self._context.base_tier.name, "run"
        return self._latest.step.ran, self._latest.step.doing


def without_used_graph(result: Any) -> Any:
    """Detach the tensors whose graph a backward has freed; others are the caller's to go backward through.

    A graph that is kept keeps the nodes that accumulate its parameters' gradients, which remember the stream that they
    were made on: a later step that is captured on another stream would fail. A replay's results have none either.
    """
    leaves, structure = flatten(result)
    used = [isinstance(one, torch.Tensor) and one.grad_fn is not None and was_freed(one) for one in leaves]
    if not any(used):
        return result
    return unflatten(structure, [one.detach() if freed else one for one, freed in zip(leaves, used, strict=True)])
