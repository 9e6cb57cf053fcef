"""The hot loop: owns a program's training step, and runs it the fastest way that is right."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

import torch

from hotloop import events as ev
from hotloop.compiling.observe import collector
from hotloop.errors import ConfigError
from hotloop.step.audit.summary import Surveyed
from hotloop.step.calls.buckets import Buckets, Pad
from hotloop.step.capture.engines import engine_for
from hotloop.step.capture.recorded_optimizers import RecordedOptimizers
from hotloop.step.compiled import Compiled
from hotloop.step.loop.account import Account
from hotloop.step.loop.arguments import (
    check,
    check_batches,
    check_runs,
    check_shapes,
    device_of,
    recording_in,
    refuse_suspended,
)
from hotloop.step.loop.lifetimes import Unheld, checked
from hotloop.step.loop.log import line_of
from hotloop.step.loop.runner import Runner
from hotloop.step.loop.stepping import Stepping
from hotloop.step.loop.transitions import Course
from hotloop.step.loop.warnings import tell_of_another, tell_of_strangers
from hotloop.step.naming import named, unwrapped
from hotloop.step.policy.auto import Auto
from hotloop.step.policy.initial import agree_with_peers, requested
from hotloop.step.policy.lookahead import choose_buckets, look_ahead
from hotloop.step.prove.sentinel import SHARE, share_of
from hotloop.step.ranks import threads
from hotloop.step.ranks.peers import peers_of_this_run
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.undo import WriteWatch
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    import types

    from hotloop.record import RunRecord
    from hotloop.step.loop.status import LoopStatus, SentinelStatus
    from hotloop.step.prove.outcomes import Outcome

_log = logging.getLogger("hotloop")
_F = TypeVar("_F", bound=Callable[..., Any])
_NO_FUNCTION: Any = object()


class _Inside(threading.local):
    """Whether a step of a loop runs in this thread: one that is called in it is a part of it, like any function."""

    a_step = False


_inside = _Inside()


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

    The Python of a step runs 0 times in a call (a replay), once, or twice (a proof, a check by the sentinel); 3 to 9
    times in the few calls of a proof that has to be held against the step in more bits, or in other roundings, and in
    those in which the sentinel looks into a disagreement. What it returns may be held as long as
    you like; where steps may be captured it carries no graph once a backward has used that up. Gradients read after
    a step are valid until the next.

    Args:
        model: a module, a sequence of them, or a mapping of names to them.
        optimizer: an optimizer, or a sequence or mapping of them.
        state: anything else that the step changes: GradScaler, EMA, a second model.
        run: ``"auto"``; a tier (``"eager+graph"``); or a preset. A model that is compiled already is taken as given.
        total_steps: how many steps the run will take; without it, `auto` expects as many as were done.
        runs: how many runs of about this length, this one included, will use what is compiled in it: the folds or the
            trials that are left. A compile may then cost what all of them save; a captured step serves one run. None is
            a run on its own, and 1 the last of several; a share counts too, as 4.5 of trials that two processes do.
        buckets: by argument name, how to pad it to one of a few sizes.
        batches: what the run's batches come from (a DataLoader, a list, or a function that gives an iterable): some are
            looked at before anything is compiled, to decide what to do about their shapes. Random streams and the
            loader's generators are put back; the data set is read in this process, before workers fork, and what it
            keeps to itself is not: generators of its own advance, and files that it opens at the first sample (HDF5,
            LMDB) are open in the workers as well. Leave ``batches`` out for such a data set.
        shapes: how many sizes of batches were chosen beforehand (pictures by aspect ratio): each of up to eight has
            code, and a recording, of its own, however seldom it comes. They are those of ``batches``.
        workload: ``module:function`` or ``file.py:function`` that makes the program anew, for the background compile.
        sentinel: the share of time that it may cost to run a compiled or captured step eagerly as well, now and then,
            and compare; 0 or None for none.
        record: a folder in which the run record is written as the run goes; without one it is kept in memory. Of
            several processes each but the first writes into a folder of its own in it, ``rank-1`` and so on.

    Raises:
        ConfigError: an argument does not fit.
    """

    def __init__(  # noqa: PLR0913 - the public settings
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
        *,
        state: Any = (),
        run: str = "auto",
        total_steps: int | None = None,
        runs: float | None = None,
        buckets: Mapping[str, Pad] | None = None,
        batches: Any = None,
        shapes: int | None = None,
        workload: str | None = None,
        sentinel: float | None = SHARE,
        record: str | os.PathLike[str] | RunRecord | None = None,
    ) -> None:
        models = named("model", model, torch.nn.Module)
        optimizers = {
            name: unwrapped(one) for name, one in named("optimizer", optimizer, torch.optim.Optimizer).items()
        }
        others = check(run, total_steps, state, workload, record)
        self.runs = check_runs(runs)
        self.declared = check_shapes(shapes, batches)
        self.sentinel = share_of(sentinel)
        self.holdings = Holdings(models, optimizers, others)
        self.device = device_of(self.holdings)
        self.total_steps, self.workload = None if total_steps is None else int(total_steps), workload
        self.compiled = Compiled(models)
        self.given = self.compiled.base
        self.engine = engine_for(self.device)
        self.buckets, self._batches = Buckets(buckets or {}), batches
        check_batches(batches)
        if self.buckets.without_sizes and batches is None:
            name = self.buckets.without_sizes[0]
            raise ConfigError(
                f"buckets[{name!r}] has no sizes: give to=(64, 128), or batches=loader to choose them from"
            )
        self.not_watched: tuple[Any, ...] = ()
        """Objects that a step can reach and that change of themselves: a framework's; set before `step` decorates."""
        self.steps = 0
        with recording_in(record):
            self.account = Account(self, record)
        self._runners: list[Runner] = []
        self._unheld = Unheld(self, self._runners)
        self._said: set[str] = set()
        self._parameters: list[torch.nn.Parameter] | None = None
        self._modules: list[torch.nn.Module] | None = None
        self.stepping, self.surveyed = Stepping(self), Surveyed(self.device)
        self.closed = False
        self.peers = peers_of_this_run()
        tell_of_strangers(self.holdings)
        asked = requested(self, run)
        self.auto = Auto(self) if asked is None else None
        self.asked = Tier(self.given) if asked is None else asked
        agree_with_peers(self)
        self.course = Course(self, Tier(self.given) if self.auto is not None else self.asked, self._runners)
        self.writes = WriteWatch(optimizers.values())
        self.recorded = RecordedOptimizers(self)
        self.plain = self.auto is None and self.goal == Tier("eager")
        if not self.plain:
            tell_of_another(self)
            self.course.aim(self.goal, "asked for")

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
        refuse_suspended(function)
        prepare = self.buckets.of(function)
        choose_buckets(self, prepare, self._batches)
        runner = Runner(self, function)
        self._runners.append(runner)
        if self._batches is not None and not self.plain:
            self.stepping.carefully(look_ahead, self, runner, prepare, self._batches)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._unheld and not _inside.a_step:
                self.stepping.carefully(self._unheld.let_go)
            args, kwargs = prepare(args, kwargs)  # padding is the program's own, whatever runs it
            if _inside.a_step:
                return function(*args, **kwargs)
            _inside.a_step = True
            try:
                if not self.plain:
                    threads.begins(self)
                    try:
                        return self.stepping.run(runner, args, kwargs)
                    finally:
                        threads.ended(self)
                result = function(*args, **kwargs)
                self.steps += 1  # as in a tier: one that raises is none
                return result
            finally:
                _inside.a_step = False

        self._unheld.follow(runner, run)
        return run  # type: ignore[return-value]

    def status(self) -> LoopStatus:
        """Say what tier runs, what it saves, and why."""
        self.settle()
        return self.account.status()

    @property
    def record(self) -> RunRecord:
        """The run record, brought up to date; between two accesses what steps took is added to it now and then."""
        self.settle()
        self.account.settle()
        return self.account.record

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the run record so far as one self-contained HTML page.

        Raises:
            ConfigError: ``path`` is no name of a file.
        """
        if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
            raise ConfigError(f"loop.report: {path!r}: expected the name of the page's file, as 'run.html'")
        self.settle()
        self.account.report(path)

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs beside model and optimizer: steps done, and what was learnt about tiers."""
        return {"steps": self.steps, "outside": sorted(self.recorded.outside), "account": self.account.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Tiers are proven anew: another machine may run it.

        Raises:
            ConfigError: it is no state of a loop.
        """
        given = state if isinstance(state, Mapping) else {}
        if type(given.get("steps")) is not int or not isinstance(given.get("account", {}), Mapping):
            raise ConfigError("load_state_dict: expected what Loop.state_dict() gave")
        self.steps = int(state["steps"])
        self.recorded.outside |= set(state.get("outside", ())) & set(self.holdings.optimizers)
        self.account.load_state_dict(state.get("account", {}))

    def close(self) -> None:
        """Give back what the loop holds: recordings, hooks, compiled code. Steps run eager from then on."""
        if self.closed:
            return
        self.closed = self.plain = True
        with contextlib.ExitStack() as last:  # each is done though another fails, as they do when the device is lost
            for hook in self.recorded.hooks:
                last.callback(hook.remove)
            last.callback(self.writes.close)
            if self.peers is not None:
                last.callback(self.peers.close)
            last.callback(self.compiled.remove)
            last.callback(self.course.forget_recordings)
            last.callback(self.account.close)  # before they are taken off, so that record and status tell what ran
            last.callback(self.stepping.settle_last)
            if self.auto is not None:
                last.callback(self.auto.close)  # first: its child must go in any case

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.account.failed(error)
        try:
            self.close()
        except Exception:  # noqa: BLE001 - what ends the block must reach the user, whatever else is lost with it
            _log.warning("the loop could not be closed in order", exc_info=True)

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"Loop(tier={self.goal.name!r}, steps={self.steps}{closed})"

    def __reduce__(self) -> Never:
        raise TypeError(
            "a hotloop.Loop is neither pickled nor copied: it holds recordings and hooks of this process; leave it out "
            "of what holds it (__getstate__), keep loop.state_dict(), and make a loop anew"
        )

    # -- what runs -------------------------------------------------------------------------------------------------

    @property
    def goal(self) -> Tier:
        """Give the tier that steps run in, or are on the way to."""
        return self.course.goal

    def last_ran(self) -> tuple[str, str]:
        """Give the last step's tier and what it did: ``run``, ``survey``, ``proof``, ``capture`` or ``undone``."""
        return self.stepping.last_ran()

    def settle(self) -> None:
        """Take note of the steps whose times have become known."""
        self.stepping.settle()

    @property
    def may_capture(self) -> bool:
        """Tell whether steps may be captured."""
        return self.engine is not None and (self.auto is not None or self.asked.graph)

    # -- what runners ask and tell ---------------------------------------------------------------------------------

    def shapes(self) -> dict[str, Any]:
        """Give the shapes that each step has seen, as far as they were looked at."""
        return {runner.name: runner.shapes.census.to_dict() for runner in self._runners}

    def unproven(self) -> str:
        """Say what the tier that is aimed at lacks before steps run in it; empty where it is proven, or needs none."""
        if not (self.goal.compiles or self.goal.graph):
            return ""
        called = [runner for runner in self._runners if runner.shapes.census.steps]
        if not called:
            return "no step has run yet"
        lacks = {runner.name: what for runner in called if (what := runner.lacks(self.goal))}
        if lacks and self._unheld.anew:
            return f"not proven yet: {self._unheld.anew}"
        return "; ".join(what if len(called) == 1 else f"{name}: {what}" for name, what in lacks.items())

    def declined_kinds(self) -> list[str]:
        """Give why kinds of calls are not captured, each reason once."""
        variants = [variant for runner in self._runners for variant in runner.variants.values()]
        return list(dict.fromkeys(str(one.declined) for one in variants if one.declined is not None))

    def sentinels(self) -> list[SentinelStatus]:
        """Give what the sentinels of the steps did, of those that made a check."""
        return self._unheld.sentinels + checked(self._runners)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Give the parameters of models and optimizers; looked up once, and again after a recording was dropped."""
        if self._parameters is None:
            self._parameters = list(self.holdings.parameters().values())
        return self._parameters

    def modules(self) -> list[torch.nn.Module]:
        """Give all modules whose mode matters to a step."""
        if self._modules is None:
            self._modules = [module for root in self.holdings.modules.values() for module in root.modules()]
        return self._modules

    def look_again(self) -> None:
        """Have parameters and modules looked up anew: there may be others."""
        self._parameters = self._modules = None

    def ignored(self, runner: Runner) -> tuple[Any, ...]:
        """Give the objects of ours, and of a framework around us, that a step may reach, whose state is none of it."""
        return self, runner, self.account, *self.not_watched

    def eager(self) -> contextlib.AbstractContextManager[None]:
        """Run the models as they were given while the block runs."""
        return self.compiled.aside()

    def runs_compiled(self) -> bool:
        """Tell whether compiled code is in force."""
        return self.compiled.base != "eager"

    def say_once(self, line: str, level: int = logging.INFO) -> None:
        """Put a line on the log, the first time."""
        if line not in self._said:
            self._said.add(line)
            _log.log(level, "%s", line)

    def emit(self, event: ev.Event) -> None:
        """Hand an event to the record, the watchers and the log."""
        if isinstance(event, ev.CaptureDropped):
            self.look_again()
        self.account.event(event)
        collector.emit(event)
        level, line = line_of(event, asked=self.auto is None)
        if line and line not in self._said:
            self._said.add(line)
            _log.log(level, "%s", line)

    def decided(self, reason: str, numbers: Mapping[str, Any]) -> None:
        """Write a decision down, and say it."""
        self.account.decided(reason, numbers)
        _log.info("step %d: %s", self.steps, reason)

    def proof_costs(self, seconds: float, outcome: Outcome | None = None) -> None:
        """Add to what proofs have cost."""
        self.account.proof(seconds, outcome)

    @property
    def calls(self) -> int:
        """Give how often the steps were called in a tier, or on the way to one."""
        return self._unheld.calls + sum(runner.calls for runner in self._runners)

    def replay_saves(self, seconds: float) -> None:
        """Take note of what a recording that is being proven saves a step, by its share of all calls."""
        if self.auto is not None:
            self.auto.replay_saves(seconds)
