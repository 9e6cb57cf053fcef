"""The hot loop: owns a program's training step, and runs it the fastest way that is right."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from hotloop import events as ev
from hotloop.apply import sharded_flat
from hotloop.errors import ConfigError
from hotloop.observe import collector
from hotloop.step.account import Account
from hotloop.step.ahead import choose_buckets, look_ahead
from hotloop.step.asked import (
    check,
    check_batches,
    check_runs,
    check_shapes,
    device_of,
    named,
    recording_in,
    refuse_suspended,
    strange_optimizers,
    unwrapped,
)
from hotloop.step.auto import Auto
from hotloop.step.buckets import Buckets, Pad
from hotloop.step.compiled import Compiled
from hotloop.step.engines import engine_for
from hotloop.step.holdings import Holdings
from hotloop.step.optimizers import recordable, return_step_counts, with_host_step_counts
from hotloop.step.peers import peers_of_this_run
from hotloop.step.proof import STEPS as PROOF_STEPS
from hotloop.step.results import without_used_graph
from hotloop.step.runner import Runner
from hotloop.step.sentinel import SHARE, share_of
from hotloop.step.telling import line_of
from hotloop.step.tiers import Tier, parse
from hotloop.step.timed import Ran, Timed
from hotloop.step.undo import WriteWatch
from hotloop.step.variant import compute_dtype

if TYPE_CHECKING:
    import types

    from hotloop.measure.limits import ComputeDtype
    from hotloop.record import RunRecord
    from hotloop.step.outcomes import Outcome
    from hotloop.step.sentinel import SentinelStatus
    from hotloop.step.status import LoopStatus
    from hotloop.step.survey import Obstacle, Survey

_log = logging.getLogger("hotloop")
_UNTIMED = 7
"""Steps that run untimed after each timed one, while eager stays and nothing is tried."""
_NOTHING = contextlib.nullcontext()
_F = TypeVar("_F", bound=Callable[..., Any])


_owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Loop]] = weakref.WeakKeyDictionary()
"""The latest loop of each optimizer."""


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
            a run on its own, and 1 the last of several.
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
        self.total_steps, self.workload = total_steps, workload
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
        self.outside: set[str] = set()
        self.draws_random = False
        self.not_watched: tuple[Any, ...] = ()
        """Objects that a step can reach and that change of themselves: a framework's; set before `step` decorates."""
        self.steps = 0
        with recording_in(record):
            self.account = Account(self, record)
        self._runners: list[Runner] = []
        self._latest: Runner | None = None
        self._said: set[str] = set()
        self._parameters: list[torch.nn.Parameter] | None = None
        self._modules: list[torch.nn.Module] | None = None
        self.times: Timed[Ran] = Timed(self.device)
        self.reference_times: Timed[str] = Timed(self.device)
        self._surveys = self._untimed = 0
        self._matrix_dtypes: set[torch.dtype] = set()
        self._closed = self._settled = False
        self.auto: Auto | None = None
        self.peers = peers_of_this_run()
        for name in strange_optimizers(self.holdings):
            _log.warning(
                "%s (%s): none of its parameters is one of %s: give the optimizer that was made of model.parameters(), "
                "or what has them as state=",
                name, type(optimizers[name]).__name__,
                ", ".join(f"{each} ({type(one).__name__})" for each, one in self.holdings.modules.items()),
            )  # fmt: skip
        self.asked = self._requested(run)
        self._agree_with_peers()
        self.goal = Tier(self.given) if self.auto is not None else self.asked
        self.writes = WriteWatch(optimizers.values())
        self._hooks = [one.register_state_dict_post_hook(with_host_step_counts) for one in optimizers.values()]
        self.plain = self.auto is None and self.goal == Tier("eager")
        if not self.plain:
            self._tell_of_another()
            self.aim(self.goal, "asked for")

    def _requested(self, run: str) -> Tier:
        if self.compiled.given:
            self.account.decided(f"the model runs as it was given: {self.compiled.why_given}", {})
            _log.warning("run=%r: the model runs as it was given: %s", run, self.compiled.why_given)
        by_itself = run.strip().lower() == "auto"
        tier = Tier(self.given) if by_itself else parse(run)
        if os.environ.get("HOTLOOP_DISABLE", "").strip().lower() not in ("", "0", "false", "no"):
            self.decided(f"HOTLOOP_DISABLE={os.environ['HOTLOOP_DISABLE']} is set: steps run eager", {})
            return Tier("eager")
        if by_itself:
            self.auto = Auto(self)
            return tier
        if self.compiled.given and tier.base != "as-given":
            tier = Tier("as-given", tier.graph)
        elif tier.base == "as-given" and not self.compiled.given:
            tier = Tier("eager", tier.graph)
        if tier.graph and self.engine is None:
            raise ConfigError(
                f"run {run!r}: whole steps can be captured on a GPU only, and the model is on {self.device}; "
                f"without a graph: run={tier.without_graph().name!r}"
            )
        if tier.graph and tier.makes_kernels and self.engine is not None and not self.engine.kernels:
            raise ConfigError(
                f"run {run!r}: captured_step_emulation() replays torch's operations, and not the kernels that Inductor "
                "makes: of compiled code run='aot_eager+graph' can be captured under it, on a GPU all of it"
            )
        return tier

    def _tell_of_another(self) -> None:
        """Warn where another open loop owns one of the optimizers: what one steps, the other finds changed."""
        for name, optimizer in self.holdings.optimizers.items():
            before = _owners.get(optimizer, lambda: None)()
            if before is not None and not before.plain:
                _log.warning(
                    "%s (%s) is owned by two loops, %r and %r, of which each takes the other's steps for changes from "
                    "outside: decorate both steps with one loop, or close() the first",
                    name, type(optimizer).__name__, before, self,
                )  # fmt: skip
            _owners[optimizer] = weakref.ref(self)

    def _agree_with_peers(self) -> None:
        """In several processes a tier is agreed: what they could not agree on is left out, and said."""
        if self.peers is None:
            return
        several = f"torch.distributed runs {self.peers.size} processes"
        self.sentinel = 0.0  # it runs a step twice whenever one process thinks it time
        if self.auto is not None:
            self.decided(f"run='auto': {several}, each with times of its own: steps run {self.given}; name a tier", {})
            self.auto, self.asked = None, Tier(self.given)
        flat = any(sharded_flat(one) for one in self.holdings.modules.values())
        if self.asked.compiles and (flat or any(hasattr(one, "placements") for one in self.parameters())):
            how = "FSDP1" if flat else "FSDP2"
            why = f"parameters are sharded ({how}), and a proof cannot exchange them: hotloop.compile the model instead"
            self.decided(f"{self.asked.name}: {why}", {})
            self.asked = Tier(self.given)
        if self.asked.graph:
            self.decided(f"{self.asked.name}: {several}: steps with collectives are not captured", {})
            self.asked = self.asked.without_graph()
        if self.asked.compiles:  # else nothing is agreed, and one process may have a loop alone
            self.peers.meet()

    # -- the public face -------------------------------------------------------------------------------------------

    def step(self, function: _F) -> _F:
        """Decorate a training step; several may share a loop. Called within another one, it is a part of that.

        Raises:
            ConfigError: it is no function, or a generator or async function, whose call runs none of it.
        """
        if not callable(function):
            raise ConfigError(f"loop.step: expected a function, got {type(function).__name__}")
        refuse_suspended(function)
        prepare = self.buckets.of(function)
        choose_buckets(self, prepare, self._batches)
        runner = Runner(self, function)
        self._runners.append(runner)
        if self._batches is not None and not self.plain:
            self._carefully(look_ahead, self, runner, prepare, self._batches)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(args, kwargs)  # padding is the program's own, whatever runs it
            if self.plain:
                self.steps += 1
                return function(*args, **kwargs)
            if _inside.a_step:
                return function(*args, **kwargs)
            _inside.a_step = True
            try:
                return self._run(runner, args, kwargs)
            finally:
                _inside.a_step = False

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
        """Write the run record so far as one self-contained HTML page."""
        self.settle()
        self.account.report(path)

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs beside model and optimizer: steps done, and what was learnt about tiers."""
        return {"steps": self.steps, "outside": sorted(self.outside), "account": self.account.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Tiers are proven anew: another machine may run it.

        Raises:
            ConfigError: it is no state of a loop.
        """
        given = state if isinstance(state, Mapping) else {}
        if type(given.get("steps")) is not int or not isinstance(given.get("account", {}), Mapping):
            raise ConfigError("load_state_dict: expected what Loop.state_dict() gave")
        self.steps = int(state["steps"])
        self.outside |= set(state.get("outside", ())) & set(self.holdings.optimizers)
        self.account.load_state_dict(state.get("account", {}))

    def close(self) -> None:
        """Give back what the loop holds: recordings, hooks, compiled code. Steps run eager from then on."""
        if self._closed:
            return
        self._closed = self.plain = True
        with contextlib.ExitStack() as last:  # each is done though another fails, as they do when the device is lost
            for hook in self._hooks:
                last.callback(hook.remove)
            last.callback(self.writes.close)
            if self.peers is not None:
                last.callback(self.peers.close)
            last.callback(self.compiled.take_off)
            last.callback(self._forget_recordings)
            last.callback(self.account.close)  # before they are taken off, so that record and status tell what ran
            last.callback(self._settle_last)
            if self.auto is not None:
                last.callback(self.auto.close)  # first: its child must go in any case

    def _settle_last(self) -> None:
        """Wait for the last steps, whose times are known then; none is added to a record that is finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.settle()
        self._settled = True

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
        return f"Loop(tier={self.goal.name!r}, steps={self.steps})"

    # -- one step --------------------------------------------------------------------------------------------------

    def _run(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._untimed and self.auto is not None:
            self._untimed -= 1
            self.steps += 1
            self._latest = None
            self.account.untimed(self.given)
            return self._returned(runner.step(*args, **kwargs))
        if self.auto is not None:
            self._carefully(self.auto.at_step_boundary, runner.step, args, kwargs)
        self._latest = runner
        tier, trial = self.goal, self.auto.now() if self.auto is not None else None
        # Turns of a trial are of two kinds, and begin on an idle device: launches hide behind no earlier step.
        alone = trial is not None or (self.auto is not None and self.auto.looks_at_launches)
        with self.auto.noting_calls() if self.auto is not None else _NOTHING:
            result = self.times.run(
                lambda: runner.run(args, kwargs, tier),
                lambda: Ran(runner.ran, runner.kind, trial, alone=alone),
                alone=alone,
            )
        self.steps += 1
        if self.auto is not None:
            self.auto.took(runner.kind)
        self._carefully(self.settle)
        if self.auto is not None and self.auto.quiet:
            self._untimed = _UNTIMED
        return self._returned(result)

    def _returned(self, result: Any) -> Any:
        return without_used_graph(result) if self.may_capture else result

    @property
    def may_capture(self) -> bool:
        """Tell whether steps may be captured."""
        return self.engine is not None and (self.auto is not None or self.asked.graph)

    def _carefully(self, do: Callable[..., None], *args: Any) -> None:
        """Do what belongs to deciding and accounting; where it fails, steps go on as the model was given."""
        try:
            do(*args)
        except Exception:  # noqa: BLE001 - none of it is worth the user's run
            _log.warning("deciding how steps run failed, so they run %s from now on", self.given, exc_info=True)
            if self.auto is not None:
                self.auto.background.stop()
            self.auto = None
            self.goal = Tier(self.given)
            self.compiled.take_off()
            for runner in self._runners:
                runner.forget_recordings()
            self.times, self.reference_times = Timed(self.device), Timed(self.device)
            self.plain = True

    def settle(self) -> None:
        """Take note of the steps whose times have become known."""
        if self._settled:
            return
        for tier, timing in self.reference_times.known():
            self.account.beside(tier, timing)
        for ran, timing in self.times.known():
            self.account.step(ran.tier, ran.kind, timing)
            if self.auto is not None:
                self.auto.timed(ran, timing)

    def last_ran(self) -> tuple[str, str]:
        """Give the last step's tier and what it did: ``run``, ``survey``, ``proof``, ``capture`` or ``undone``."""
        if self.plain or self._latest is None:
            return self.given, "run"
        return self._latest.ran, self._latest.kind

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
        return "; ".join(what if len(called) == 1 else f"{name}: {what}" for name, what in lacks.items())

    def sentinels(self) -> list[SentinelStatus]:
        """Give what the sentinels of the steps did, of those that made a check."""
        found = [runner.sentinel.status for runner in self._runners if runner.sentinel is not None]
        return [one for one in found if one.checks]

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

    def compute_dtype(self) -> ComputeDtype:
        """Name the narrowest dtype that matrix products were seen in, which sets how much rounding is honest."""
        return compute_dtype(self._matrix_dtypes, self.device)

    def surveyed(self, seen: Survey) -> None:
        """Take note of what a survey saw that concerns all steps."""
        self._surveys += 1
        self.draws_random |= seen.random_operations > 0
        self._matrix_dtypes |= seen.matrix_dtypes

    def outside_of(self, stepped: Iterable[str]) -> set[str]:
        """Name those of the optimizers that step which run outside of a recording, and say why."""
        found = self.outside & set(stepped)
        for name in stepped:
            why = recordable(self.holdings.optimizers[name], self.device)
            if why and name not in found:
                found.add(name)
                self.say_once(f"{name} runs outside the captured step: {why}")
        return found

    def run_outside(self, name: str, why: str) -> None:
        """Leave an optimizer out of recordings from now on."""
        self.outside.add(name)
        self.say_once(f"{name} runs outside the captured step from now on: {why}")

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

    def beside(self, tier: Tier, run: Callable[[], Any]) -> Any:
        """Run the reference of a proof, and take its time for what a step in its tier takes."""
        return self.reference_times.run(run, lambda: tier.name)

    def proof_costs(self, seconds: float, outcome: Outcome | None = None) -> None:
        """Add to what proofs have cost."""
        self.account.proof(seconds, outcome)

    @property
    def calls(self) -> int:
        """Give how often the steps were called in a tier, or on the way to one."""
        return sum(runner.calls for runner in self._runners)

    def replay_saves(self, seconds: float) -> None:
        """Take note of what a recording that is being proven saves a step, by its share of all calls."""
        if self.auto is not None:
            self.auto.replay_saves(seconds)

    def accepted(self, runner: Runner, outcome: Outcome) -> None:
        """A recording was proven."""
        self._proven(self.goal, runner, outcome)

    def base_accepted(self, tier: Tier, runner: Runner, outcome: Outcome) -> None:
        """Compiled code was proven."""
        self._proven(tier.without_graph(), runner, outcome)

    def _proven(self, tier: Tier, runner: Runner, outcome: Outcome) -> None:
        self.emit(
            ev.TierProven(
                step=self.steps,
                function=runner.name,
                tier=tier.name,
                steps=PROOF_STEPS,
                worst=outcome.worst,
                seconds=self.account.proof_seconds,
                copied_bytes=outcome.nbytes,
                on_host=outcome.on_host,
            )
        )
        if self.auto is not None:
            self.auto.proven(tier)

    def declined(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        """A kind of call cannot be captured; others may."""
        self._tell_declined(tier, obstacle, runner)
        if any(variant.declined is None for variant in runner.variants.values() if variant.calls > 1):
            return
        if self.auto is not None:
            self.auto.declined(tier, str(obstacle))

    def failed(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        """A tier's code failed or was wrong: from the next step on, another one runs."""
        self._tell_declined(tier, obstacle, runner)
        if self.auto is not None:
            self.auto.declined(tier, str(obstacle))
        else:
            below = Tier(self.given, graph=self.goal.graph) if tier.compiles else tier.without_graph()
            self.aim(below, str(obstacle))

    def _tell_declined(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        event = ev.TierDeclined(
            step=self.steps,
            function=runner.name,
            tier=tier.name,
            reason=obstacle.reason,
            hint=obstacle.hint,
            file=obstacle.file,
            line=obstacle.line,
            source=obstacle.source,
        )
        self.emit(event)

    # -- tiers -----------------------------------------------------------------------------------------------------

    def aim(self, tier: Tier, reason: str) -> None:
        """From the next step on, run in a tier, or on the way to it."""
        before = self.goal
        self.turn(tier)
        if before.graph and not tier.graph:
            self._return_step_counts()
        if before != tier:
            self.emit(ev.TierChanged(step=self.steps, from_tier=before.name, to_tier=tier.name, reason=reason))

    def turn(self, tier: Tier) -> None:
        """Run the next step in a tier, as part of a trial: no more is changed than that."""
        self.goal = tier
        if self._surveys or not tier.compiles:  # a survey tells whether to compile at all
            self.put_on(tier)

    def put_on(self, tier: Tier) -> None:
        """Have the code of a tier in force; what has to be compiled is so in the steps that follow."""
        self.compiled.put_on(tier)

    def release(self, tier: Tier) -> None:
        """Give back what the recordings of a tier hold: a whole step's memory each."""
        for runner in self._runners:
            runner.release(tier.base)
        if not self.goal.graph:
            self._return_step_counts()

    def _forget_recordings(self) -> None:
        for runner in self._runners:
            runner.forget_recordings()
        self._return_step_counts()

    def _return_step_counts(self) -> None:
        if self.engine is not None:
            for optimizer in self.holdings.optimizers.values():
                return_step_counts(optimizer)
