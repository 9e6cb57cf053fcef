"""What of the Python state that a step has read changes: inside the step, and between two of its calls."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hotloop._torch.hooks import Accumulators, module_hooks
from hotloop._torch.sharded import Sharded
from hotloop.errors import describe
from hotloop.measure import flatten
from hotloop.measure.tree import containers
from hotloop.step.guard.compare import Watch, differences, objects_in, unwatchable
from hotloop.step.guard.fingerprint import Same
from hotloop.step.guard.recorder import Recorder
from hotloop.step.obstacle import DRAW_FROM_TORCH, RUNS, Obstacle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.step.guard.read_set import ReadSet
    from hotloop.step.state.program import Program

SCHEDULE_OUTSIDE = "call scheduler.step() outside the step"
_IN_PLACE = "write into the tensor that is there (.copy_(), .mul_(), .lerp_()), which a replay does too"
_EVALUATE_OUTSIDE = (
    "evaluate outside of the step: fully_shard keeps the root's whole parameters after a forward that no backward "
    "follows; a teacher's, it frees with fully_shard(teacher, reshard_after_forward=True)"
)
_PARAMETRIZE = (
    f"{_IN_PLACE}; in place of torch.nn.utils.weight_norm and spectral_norm take those of "
    "torch.nn.utils.parametrizations"
)
_AS_ARGUMENT = "pass it as a tensor argument; or, if the step need not read it, keep it elsewhere"
COUNT_OUTSIDE = f"call what counts outside the step (an average: ema.step(...)), or count in a tensor: {RUNS}"
RETURN_IT = f"return what has to be noted, and note it outside the step: {RUNS}"
_OUT_OF_REACH = "keep what raises there where the step does not reach it, and hand the step what it needs as a tensor"
_KEEP_LESS = "keep it where the step does not reach it, and hand the step what it needs of it as a tensor"
UNHEARD = Obstacle(
    "what the step reads in Python cannot be heard: a profiler has the place (sys.setprofile)",
    "end the profiler, or begin it once the step is captured",
    not_repeatable=True,
)


class Changes:
    """Everything that the runs of one step were heard to read, and how it changes.

    Args:
        program: the step, and what it changes.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._accumulators = program, Accumulators()
        self._reads: ReadSet | None = None
        self._watch: Watch | None = None
        self.heard: Watch | None = None
        """Looks at what the last run was heard to read; `found` is what it was when it ended."""
        self.found: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] | None = None
        self._objects: list[Any] = []
        self._containers: set[int] = set()
        """The ids of the arguments' containers in the coming call: what these hold is in the call's key."""
        self._moving: dict[str, int] = {}
        self._blind = ""
        """Why the last look failed; empty where it did not."""

    def look_again(self) -> None:
        """Something changed between two steps: what is read from now on is compared with itself."""
        self._before = None

    def recorder(self, *, compiled: bool) -> Recorder:
        """Return what hears the coming run.

        Args:
            compiled: the models were given as compiled code, which takes in functions that nobody hears then.
        """
        program = self._program
        made = Recorder(program.function, program.holdings, program.ignore, self._objects, self._accumulators)
        made.know(self._containers)
        if compiled:
            made.assume()
        return made

    def outside(self, call: tuple[Any, ...]) -> list[Obstacle]:
        """Note what the step reads in Python and somebody changed since the last look; twice is too often.

        Args:
            call: the arguments of the coming call, where objects among them are looked into.
        """
        objects, self._containers = objects_in(flatten(call)[0]), {id(one) for one in containers(call)}
        if list(map(id, objects)) != list(map(id, self._objects)):
            self._before = self._watch = self._reads = None  # another kind of call: what it reads is not this one's
        self._objects = objects
        before, self._before = self._before, self._now()
        if self._blind:
            return [self._unseen(not_repeatable=True)]
        obstacles = self._too_much(self._before)
        for name in differences(before, self._before, freed=False) if before else ():
            self._moving[name] = self._moving.get(name, 0) + 1
            if self._moving[name] > 1:
                obstacles.append(Obstacle(f"the step reads {name}, which changes from step to step", _AS_ARGUMENT))
        return obstacles

    def inside(self, recorder: Recorder | None = None) -> list[Obstacle]:
        """Return what Python state the step that has just run changed.

        Args:
            recorder: what heard the run; without one, what earlier runs have read is compared with what it was when
                `outside` was asked.
        """
        before, self._blind = self._before or {}, ""
        if recorder is None:
            self._before = after = self._now()
            if self._blind:
                return [self._unseen(not_repeatable=bool(before))]
            return self._changed(before, after) if before else []
        self.heard, reads = None, recorder.finish()
        failed = reads.failed
        if failed is None:
            try:
                self.heard = Watch(reads)
                # What earlier runs have read is in a read set of its own: the one that was heard is a recording's.
                self._reads = self._reads.joined(reads) if self._reads is not None else reads
                self._watch = self.heard if self._reads is reads else Watch(self._reads)
            except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
                failed = error
        if failed is not None or self.heard is None or self._watch is None:
            self._blind = describe(failed) if failed is not None else ""
            return [self._unseen(not_repeatable=True)]
        self._before, self.found = self._watch.found, self.heard.found
        return [*self._too_much(self.found), *self._changed(self.heard.as_first_read(), self.found)]

    def note(self, read: Watch | None) -> Mapping[str, Any]:
        """Remember the present state as that before the next step; return the present values of an audit's reads."""
        self._before = self._now()
        return read.now() if read is not None else {}

    @staticmethod
    def stand(read: Watch | None, found: Mapping[str, Any]) -> bool:
        """Return whether the values that an audit has read are unchanged."""
        with contextlib.suppress(Exception):  # an object of the user's that cannot be looked at
            return read is not None and not differences(found, read.now())
        return False

    def strangers(self) -> bool:
        """Add parameters and buffers that the step reads, and that the loop was not given, to the holdings.

        A proof then undoes what it does to them.

        Returns:
            Whether any were added.
        """
        holdings, watch = self._program.holdings, self._watch
        if watch is None:
            return False
        named = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        held = {id(one) for tensors in named for one in tensors.values()}
        fresh = {name: one for name, one in watch.strangers.items() if id(one) not in held}
        buffers = [one for one in watch.buffers if id(one) not in held]
        holdings.strangers |= fresh
        holdings.found += buffers
        return bool(fresh or buffers)

    def _now(self) -> Mapping[str, Any]:
        if self._watch is None:
            return {}
        try:
            found = self._watch.now()
        except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
            self._blind = describe(error)
            return {}
        self._blind = ""
        return found

    @staticmethod
    def _too_much(found: Mapping[str, Any]) -> list[Obstacle]:
        names = unwatchable(found)[:1]
        return [Obstacle(f"there is too much Python state to watch: {name}", _KEEP_LESS) for name in names]

    def _unseen(self, *, not_repeatable: bool) -> Obstacle:
        reason = f"what the step reads in Python cannot be looked at ({self._blind})"
        return Obstacle(reason, _OUT_OF_REACH, not_repeatable=not_repeatable)

    def _changed(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Obstacle]:
        modules = self._program.holdings.modules.items()
        buffers = {f"{root}.{path}" for root, module in modules for path, _ in module.named_buffers()}
        found = []
        # Python frees an object that the step no longer reads when it likes, so within a step too.
        for name in differences(before, after, freed=False)[:3]:
            now = after.get(name)
            kind = now[0] if isinstance(now, tuple) and now and isinstance(now[0], str) else ""
            hint = {"schedule": SCHEDULE_OUTSIDE, "random": DRAW_FROM_TORCH}.get(kind, RETURN_IT)
            hint = COUNT_OUTSIDE if _counts(before.get(name), now) else hint
            if isinstance(now, Same) and now.is_tensor:
                hint = self._other_tensors()
            # A buffer that the step puts in place of another goes back with the rest of the module's.
            obstacle = Obstacle(f"the step changes Python state: {name}", hint, not_repeatable=name not in buffers)
            found.append(obstacle)
        return found

    def _other_tensors(self) -> str:
        """Say what to do about a tensor in the place of another: who may have put it there."""
        if not Sharded(self._program.holdings.modules.values()).at_rest():
            return _EVALUATE_OUTSIDE
        return _PARAMETRIZE if self._reparametrized() else _IN_PLACE

    def _reparametrized(self) -> bool:
        """Return whether a hook puts a tensor in the place of a parameter at each call of its module."""
        modules = (part for root in self._program.holdings.modules.values() for part in root.modules())
        hooks = (hook for part in modules for table in module_hooks(part) for hook in table.values())
        return any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks)


def _counts(before: Any, now: Any) -> bool:
    """Return whether a whole number has grown by one."""
    whole = all(isinstance(one, tuple) and one[:1] == ("int",) for one in (before, now))
    return whole and bool(now[1] - before[1] == 1)
