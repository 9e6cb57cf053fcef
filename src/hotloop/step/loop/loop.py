"""The hot loop: owns a program's training step, and runs it the fastest way that is right."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar

import torch

from hotloop.errors import ConfigError
from hotloop.report import write_html
from hotloop.step.calls.buckets import Buckets, Pad
from hotloop.step.capture.engines import engine_for
from hotloop.step.capture.optimizers import RecordedOptimizers
from hotloop.step.compiled import Compiled
from hotloop.step.context import Context, Progress
from hotloop.step.loop import arguments
from hotloop.step.loop.account import Account, LoopView
from hotloop.step.loop.clock import Timed
from hotloop.step.loop.reporter import Reporter
from hotloop.step.loop.runner import StepRunner
from hotloop.step.loop.stepping import Stepping
from hotloop.step.loop.transitions import Transitions
from hotloop.step.loop.unclosed import finish_when_gone, settled_if_not_made
from hotloop.step.naming import named, optimizers_of
from hotloop.step.policy.initial import policy_for
from hotloop.step.policy.policy import Ran
from hotloop.step.prove.schedule import SHARE
from hotloop.step.ranks import threads
from hotloop.step.ranks.peers import peers_of_this_run
from hotloop.step.state.holdings import Holdings, Parts
from hotloop.step.state.memory_limit import Room
from hotloop.step.state.program import WriteWatch
from hotloop.step.tiers import Tier, tier_of_setting

if TYPE_CHECKING:
    import types

    from hotloop.presets import Preset
    from hotloop.record import RunRecord
    from hotloop.step.loop.status import LoopStatus
    from hotloop.step.policy.policy import Policy

_log = logging.getLogger("hotloop")
_F = TypeVar("_F", bound=Callable[..., Any])
_NO_FUNCTION: Any = object()


_inside = threading.local()
"""Has ``a_step`` while a step of a loop runs in this thread: a step that is called in it is a part of it."""


class Loop:
    """Owns the training step of a program.

    ::

        loop = hotloop.Loop(model, optimizer)

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    A call runs the step's Python 0 times (a replay), once, or twice (a proof, a check by the sentinel). A few calls run
    it 3 to 9 times: if rounding is in question in a proof, or if the sentinel looks into a disagreement. You may keep
    what the step returns as long as you like. Where steps may be captured, a result carries no autograd graph once a
    backward has used that up. Gradients that you read after a step are valid until the next step.

    Args:
        model: a module, a sequence of them, or a mapping of names to them.
        optimizer: an optimizer, or a sequence or mapping of them; none where the step updates by hand.
        state: anything else that the step changes: GradScaler, EMA, a second model; None for nothing.
        run: ``"auto"``; a tier (``"eager+graph"``); or a preset, by name or a `hotloop.Preset` with options of your
            own, whose name may end in ``+graph``. A model that is compiled already is taken as given.
        total_steps: how many steps the run will take; without it, `auto` expects as many again as were done.
        runs: how many runs of about this length share compiled code, this one included: the folds or trials that are
            left. A compile may then cost what all of them save; a captured step serves one run. None is a single run,
            1 the last of several. A fraction counts too: 4.5 for trials that two processes share.
        buckets: for each argument to pad, by name, the sizes.
        workload: the name of a function that returns a `Workload`, ``"train.py:make"`` or ``"module:make"``. Background
            compiles call it in their own process. Without it, a model that cannot be pickled is compiled in this one.
        layout: ``"auto"`` tries convolutions channels last where that may pay. ``"channels_last"`` asks for it, and
            `auto` then tries no compiled tier. ``"as-given"`` keeps the layout.
        sentinel: the share of time for checks, which run a compiled or captured step eagerly too, now and then, and
            compare; 0 or None makes none.
        record: a folder for the run record, written as the run goes; without it the record stays in memory. Of several
            processes, each but the first writes into a subfolder, ``rank-1`` and so on.

    Raises:
        ConfigError: an argument does not fit.
    """

    def __init__(  # noqa: PLR0913 - the public settings
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Mapping[str, torch.optim.Optimizer]
        | None = None,
        *,
        state: Any = (),
        run: str | Preset = "auto",
        total_steps: int | None = None,
        runs: float | None = None,
        buckets: Mapping[str, Pad] | None = None,
        workload: str | None = None,
        layout: Literal["auto", "channels_last", "as-given"] = "auto",
        sentinel: float | None = SHARE,
        record: str | os.PathLike[str] | RunRecord | None = None,
    ) -> None:
        models, optimizers = named("model", model, torch.nn.Module), optimizers_of(optimizer)
        others, runs = arguments.check(run, total_steps, state, workload, record), arguments.check_runs(runs)
        self._sentinel_share = arguments.share_of(sentinel)
        holdings = Holdings(models, optimizers, others)
        device, compiled = arguments.device_of(holdings), Compiled(models)
        engine, self._buckets = engine_for(device), Buckets(buckets or {})
        self.not_watched: tuple[Any, ...] = ()
        """Objects that a step can reach and that change of themselves: a framework's; set before `step` decorates."""
        base, parts, progress = compiled.tier, Parts(holdings), Progress(compiled.tier, may_capture=False)
        self.closed = True  # until all is there
        with arguments.recording_in(record):
            self.account = Account(progress, base.name, record)
        finish_when_gone(self, self.account)
        self._runners: list[StepRunner] = []
        with settled_if_not_made(self.account):
            peers, beside = peers_of_this_run(), Timed[Ran](device)
            asked = tier_of_setting(run) is not None
            self.context = Context(
                holdings=holdings,
                parts=parts,
                device=device,
                engine=engine,
                compiled=compiled,
                base_tier=base,
                peers=peers,
                writes=WriteWatch(optimizers.values()),
                progress=progress,
                reports=Reporter(self.account, beside, asked=asked, alone=peers.alone),
                room=Room(engine),
                layout=arguments.check_layout(layout),
                total_steps=None if total_steps is None else int(total_steps),
                runs=runs,
                workload=workload,
            )
            arguments.warn_of_strangers(holdings)
            self._optimizers = RecordedOptimizers(self.context)
            policy = policy_for(self.context, run, self._sentinel_share)
            self.transitions = Transitions(self.context, policy, self._optimizers, self._runners)
            self.stepping = Stepping(self.context, self.transitions, self.account, beside)
            self.closed = False
            self.stepping.bypassed = not policy.chooses and policy.start == Tier("eager")
            if not self.bypassed:
                arguments.warn_of_another_loop(self, holdings)
                self.transitions.set_tier(policy.start, "asked for")
            self.account.begin(policy.asked, self.context.total_steps)

    # -- the public face -------------------------------------------------------------------------------------------

    def step(self, function: _F = _NO_FUNCTION) -> _F:
        """Decorate a training step; several may share a loop. Called within another one, it is a part of that.

        Raises:
            ConfigError: it is no function, or a generator or async function, whose call runs none of it.
        """
        if function is _NO_FUNCTION:
            raise ConfigError("loop.step(): expected a function: write @loop.step, without parentheses")
        if not callable(function):
            raise ConfigError(f"loop.step: expected a function, got {type(function).__name__}")
        arguments.refuse_suspended(function)
        prepare, pads = self._buckets.of(function), bool(self._buckets.declared)
        ignore, share = (self, self.account, *self.not_watched), self._sentinel_share
        runner = StepRunner(self.context, function, self._optimizers, ignore=ignore, sentinel_share=share)
        self._runners.append(runner)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = getattr(_inside, "a_step", False)
            if pads:  # the program's own, whatever runs it
                args, kwargs = prepare(args, kwargs)
            if inside:
                return function(*args, **kwargs)
            _inside.a_step = True
            try:
                return self._take(runner, function, args, kwargs)
            finally:
                _inside.a_step = False

        return run  # type: ignore[return-value]

    def _take(self, runner: StepRunner, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            if not self.stepping.bypassed:
                threads.begins(self.context)
                try:
                    return self.stepping.run(runner, args, kwargs)
                finally:
                    threads.ended(self.context)
            result = function(*args, **kwargs)
        except BaseException as error:
            self.account.raised(error)
            raise
        self.context.progress.steps += 1  # as in a tier: a step that raises is none
        return result

    def status(self, *, settle: bool = True) -> LoopStatus:
        """Say what tier runs, what it saves, and why.

        Args:
            settle: account for the latest steps first, whose times the device is asked for.
        """
        if settle:
            self.settle()
        return self.account.status(self._view())

    @property
    def record(self) -> RunRecord:
        """The run record, brought up to date; between two accesses what steps took is added to it now and then."""
        self.settle()
        self.account.settle(self._view())
        return self.account.record

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the run record so far as one self-contained HTML page.

        Raises:
            ConfigError: ``path`` is no name of a file.
        """
        if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
            raise ConfigError(f"loop.report: {path!r}: expected the name of the page's file, as 'run.html'")
        write_html(self.record.document, path)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimizer: steps done, and what was learnt about tiers."""
        return {
            "steps": self.steps,
            "outside": sorted(self._optimizers.outside),
            "account": self.account.state_dict(self.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Tiers are proven anew: another machine may run it.

        Raises:
            ConfigError: ``state`` is no state of a loop.
        """
        given = state if isinstance(state, Mapping) else {}
        if type(given.get("steps")) is not int or not isinstance(given.get("account", {}), Mapping):
            raise ConfigError("load_state_dict: expected what Loop.state_dict() gave")
        self.steps = int(state["steps"])
        self._optimizers.outside |= set(state.get("outside", ())) & set(self.context.holdings.optimizers)
        self.account.load_state_dict(state.get("account", {}))

    def close(self) -> None:
        """Free what the loop holds: recordings, hooks, compiled code. Steps run eager from then on."""
        if self.closed:
            return
        self.closed = self.stepping.bypassed = True
        context = self.context
        with contextlib.ExitStack() as last:  # each is done though another fails, as they do when the device is lost
            for hook in self._optimizers.hooks:
                last.callback(hook.remove)
            guarded = self.stepping.disable_on_error
            last.callback(guarded, context.writes.close)
            last.callback(context.peers.close)
            last.callback(context.compiled.remove)
            last.callback(guarded, self.transitions.forget_recordings)
            last.callback(guarded, lambda: self.account.close(self._view()))  # while what ran can still be told
            last.callback(self.stepping.settle_last)
            last.callback(guarded, self.policy.close)  # first: its child process must go in any case

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.failed(error)
        try:
            self.close()
        except Exception:  # noqa: BLE001 - what ends the block must reach the user, whatever else is lost with it
            _log.warning("the loop could not be closed in order", exc_info=True)

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"Loop(tier={self.tier.name!r}, steps={self.steps}{closed})"

    def __reduce__(self) -> Never:
        raise TypeError(
            "a hotloop.Loop is neither pickled nor copied: it holds recordings and hooks of this process; leave it out "
            "of what holds it (__getstate__), keep loop.state_dict(), and make a loop anew"
        )

    # -- what runs -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps done, those before a checkpoint included."""
        return self.context.progress.steps

    @steps.setter
    def steps(self, done: int) -> None:
        self.context.progress.steps = done

    @property
    def tier(self) -> Tier:
        """The tier that steps run in, or are on the way to."""
        return self.context.progress.tier

    @property
    def policy(self) -> Policy:
        """What decides which tier comes next."""
        return self.transitions.policy

    @property
    def bypassed(self) -> bool:
        """Whether steps run as the models were given, and nothing is done beside them."""
        return self.stepping.bypassed

    def last_ran(self) -> tuple[str, str]:
        """Return the last step's tier and what it did: ``run``, ``survey``, ``proof``, ``capture`` or ``undone``."""
        return self.stepping.last_ran()

    def failed(self, error: BaseException) -> None:
        """Note that the run ends with an exception: the record says so once the loop is closed."""
        self.account.failure = error

    def settle(self) -> None:
        """Account for the steps whose times have become known."""
        self.stepping.disable_on_error(self.stepping.settle)

    # -- what the steps have come to ---------------------------------------------------------------------------------

    def _view(self) -> LoopView:
        return LoopView(
            context=self.context,
            policy=self.policy,
            unproven=self._unproven(),
            shapes={runner.step.name: runner.shapes.census.to_dict() for runner in self._runners},
            sentinels=tuple(status for runner in self._runners if (status := runner.checks()) is not None),
            bypassed=self.bypassed,
            closed=self.closed,
        )

    def _unproven(self) -> str:
        """Say what the tier in force lacks before steps run in it; empty where it is proven, or needs no proof."""
        tier = self.tier
        if not (tier.other_kernels or tier.graph):
            return ""
        called = [runner for runner in self._runners if runner.shapes.census.steps]
        if not called:
            return "no step has run yet"
        lacks = {runner.step.name: what for runner in called if (what := runner.lacks(tier))}
        return "; ".join(what if len(called) == 1 else f"{name}: {what}" for name, what in lacks.items())
