"""The other processes of a run: what they agree on before they change how steps run, and how they end together.

Every process makes the same collectives in the same order, or all of them wait for ever. So whatever makes a process
run a step twice (a proof), or wait long before its next collective (a compile), is agreed in a step that all take part
in; and a step that has begun a collective is never repeated by one process alone.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import itertools
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hotloop._torch.collectives import VOTES, collectives_begun, groups, store, timeout_of
from hotloop._torch.wrappers import has_rebuilt
from hotloop.errors import ConfigError, StepLostError, describe
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.state.trial_run import Alone as AloneReady

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn.parallel import DistributedDataParallel

    from hotloop.step.state.trial_run import Ready
    from hotloop.step.tiers import Tier

VOTE_SECONDS = 300.0
"""How long a vote waits, at most, for a process that is out of batches, or at something else."""
_LOST = "hotloop/lost"
_UNANSWERED = "hotloop/unanswered"
_VOTES = "hotloop/votes"
_TOLD = "hotloop/told"
_SLOW = "Timed out waiting"
"""What gloo says of a collective that nobody else began in time."""
_ENDS = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted", _SLOW)
"""What a collective raises when another process has gone."""
_ANOTHER = "another process has no memory for its copies, cannot capture the step, or fails in it"
_meetings = itertools.count()
"""Numbers the meetings: all processes meet equally often, so a number is the same in all of them."""
_LOOK_SECONDS = 2.0
NUMBERS = 18
"""Numbers of a vote: each has as many, so that two votes that should never meet are told apart, and not aborted."""
MOST = 2**62
"""The greatest number of a vote."""
_PARTS = 10**9
"""Parts of one that a figure is voted on in: seconds are voted on in nanoseconds."""
AS_MANY = (
    "call the decorated steps equally often in all processes, and leave a step that one of them makes alone (an "
    "evaluation) undecorated; give each process as many batches: a step that reduces gradients waits for the others; "
    "where a process waits for another's long work, have it wait at a barrier"
)
"""The remedy where a process takes no part in votes."""
_OUTCOME = "="
"""Before the numbers of a vote that all have taken part in."""
_APART = "the processes are at different places of a step: "
_OTHER_STEPS = "the processes have not called the same decorated steps as often as each other"


class About(enum.IntEnum):
    """What a vote is about. All but those in `_BETWEEN` are taken within a step."""

    CALL = 0
    """What to do with the coming call."""
    COPIES = 1
    """Whether the copies were made that a run needs."""
    RECORDED = 2
    """Whether the step was recorded, of which nothing was executed yet."""
    RAN = 3
    """Whether a run went to its end, which is to be undone."""
    OUTCOME = 4
    """What an agreed step has come to."""
    FIGURES = 5
    """What `auto` decides by."""
    TURN = 6
    """What a turn of a trial of `auto` took."""
    SETTINGS = 7
    """What the loop was asked for."""


SETTLE = 11
"""Calls of a step under DDP before it is captured, as torch's notes on CUDA graphs ask: a wrapper times its first ten
by events, and rebuilds its buckets after the first. In several processes those that reduce gradients count."""
_BETWEEN = (About.CALL, About.FIGURES, About.TURN, About.SETTINGS)
"""Votes before a call: nothing of the step has run."""


class Alone:
    """The only process of a run: what it would do is done."""

    alone, rank, size = True, 0, 1
    unanswered, elsewhere = "", False
    calls = 0
    usual: int | None = None

    def __init__(self) -> None:
        self.ready: Ready = AloneReady()
        self.reduced: collections.Counter[str] = collections.Counter()

    def called(self, step: str, *, reduces: bool) -> None:
        """Count nothing: nobody else does."""

    def lowest(self, _about: About, *numbers: int) -> tuple[int, ...] | None:
        """Return the numbers as they are."""
        return numbers

    def slowest(self, _about: About, *figures: float | None) -> tuple[float | None, ...] | None:
        """Return the figures as they are."""
        return figures

    def rebuilds(self, _wrappers: Iterable[DistributedDataParallel], *, reduces: bool) -> bool:  # noqa: ARG002
        """Return False: nobody waits while a wrapper rebuilds its buckets."""
        return False

    def begun(self) -> int:
        """Return 0: collectives of one process wait for nobody."""
        return 0

    def run_begins(self, usual: int | None = None) -> None:
        """Note nothing."""

    def made(self) -> int:
        """Return 0, as `begun`."""
        return 0

    def made_all(self) -> bool:
        """Return True, as `begun`."""
        return True

    def tell(self, why: str) -> None:
        """Tell nobody."""

    def told(self) -> str:
        """Return that nobody has told anything."""
        return ""

    def lost(self, error: Exception, where: str, *, ours: bool) -> Exception:  # noqa: ARG002
        """Return the error itself."""
        return error

    def close(self) -> None:
        """Leave nothing."""


class Together:
    """What `state.trial_run.Alone` decides for one process, decided by all: each vote is taken by all, in one order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def copies(self, error: Exception | None) -> None:
        """Begin a run in all processes, or in none; ``error`` is what kept this one from making its copies.

        Raises:
            CandidateFailedError: no process begins.
        """
        self._all(About.COPIES, error)
        self._peers.run_begins(self._peers.usual)

    def recorded(self, error: Exception | None) -> None:
        """Execute what was recorded in all processes, or in none; ``error`` is what kept this one from recording it.

        Raises:
            CandidateFailedError: no process executes it.
        """
        self._all(About.RECORDED, error)

    def ran(self, error: Exception | None) -> None:
        """Go on after a run, or have all undo theirs; ``error`` is what this process's run has raised.

        Raises:
            CandidateFailedError: all undo it. Or, with ``began``, this process did not come to the collectives that the
                others wait in, so that nobody can go on.
        """
        if error is not None and not self._peers.made_all():
            raise CandidateFailedError from error
        self._all(About.RAN, error)

    def _all(self, about: About, error: Exception | None) -> None:
        found = self._peers.lowest(about, error is None)
        if found is None or not found[0]:
            self._peers.elsewhere = error is None
            raise CandidateFailedError(began=False) from (error or RuntimeError(self._peers.unanswered or _ANOTHER))


class Peers:
    """The processes of this run, this one among them.

    Attributes:
        calls: how many calls of all steps of the loop were agreed on, those that raised included.
        unanswered: why there are no votes any more, where a process did not take part in one.
        reduced: by step, how many calls began with a wrapper that reduces gradients, since its buckets were laid out.
        elsewhere: the last run that all have undone failed in another process.
        usual: the collectives that a run of the coming call makes, as an earlier one did; None where it is not known.
        ready: has all processes go on with a run, or none.
    """

    alone = False

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._group: Any = None
        self._meeting = self._votes = 0
        self.calls, self._by_step = 0, collections.Counter[str]()
        self.unanswered = ""
        self.reduced: collections.Counter[str] = collections.Counter()
        self.usual: int | None = None
        self.elsewhere = False
        self.ready: Ready = Together(self)
        self._at_start = 0
        self._broken = ""
        """Why the next vote is not answered: this process gave up waiting in one that the others went through."""

    def meet(self, asked_for: Tier, run: str = "", sentinel: float = 0.0) -> None:
        """Make the group that votes are taken in: all processes have to, at the same place, or those that do wait.

        Args:
            asked_for: the tier.
            run: the setting that was asked for; the tier's name where it is left out.
            sentinel: the share of time that checks of recordings may cost.

        Raises:
            ConfigError: another process does not, or its loop was asked for something else.
        """
        run = run or asked_for.name
        # On the CPU whatever the run's backend is, and with a patience of its own: it carries one number now and then.
        # With half of the user's own: a process that is out of batches may wait for the others in a collective of the
        # run (DDP's Join does), and has to be there still when they go on without votes.
        theirs = timeout_of(distributed.group.WORLD)
        seconds = min(VOTE_SECONDS, theirs.total_seconds() / 2 if theirs is not None else VOTE_SECONDS)
        self._meeting = next(_meetings)
        try:
            timeout = dt.timedelta(seconds=seconds)
            self._group = distributed.new_group(backend="gloo", timeout=timeout, group_desc=VOTES)
        except RuntimeError as error:
            raise ConfigError(
                f"run {run!r}: not all of the {self.size} processes have made a loop within "
                f"{seconds:g} s, or one of them with run='eager', which meets nobody. Make it in all of them, at the "
                f"same place, with the same run=; or with run='eager' in this one ({describe(error)})"
            ) from error
        self._compare_settings(run, sentinel if asked_for.graph else 0.0)

    def _compare_settings(self, run: str, sentinel: float) -> None:
        """Check that the loops of all processes were asked for the same: else they part in their first votes."""
        for setting, value, number in (
            ("run", run, zlib.crc32(run.encode())),
            ("sentinel", sentinel, round(sentinel * _PARTS)),
        ):
            found = self.lowest(About.SETTINGS, number, -number)
            if found is not None and found[0] != -found[1]:
                raise ConfigError(
                    f"{setting} {value!r} in rank {self.rank}: a loop of another process has another value; give the "
                    f"loops of all {self.size} processes the same {setting}="
                )

    def called(self, step: str, *, reduces: bool) -> None:
        """Count a call of a decorated step, which begins now; one that raises is one too."""
        self.calls += 1
        self._by_step[step] += 1
        self.reduced[step] += reduces

    def lowest(self, about: About, *numbers: int) -> tuple[int, ...] | None:
        """Return the lowest of each number over all processes; each has to ask for the same, in the same call.

        Where a process takes no part in time, the outcome is None in all others, and `unanswered` says why. It is None
        in all before a call, too, where they have called other steps: NCCL makes none of them wait for the others'
        collectives, so that a step that is run twice would reduce its gradients with those of another one. A process
        may give up waiting just as the last one votes, so that others have an outcome. What the first process writes
        into the store counts for all.

        Raises:
            StepLostError: a process has ended meanwhile; or it takes no part though this one is within a step, or in
                another vote than this one: they have parted, and no vote brings them together.
        """
        if self.unanswered:
            return None
        self._votes += 1
        steps = zlib.crc32(repr(sorted(self._by_step.items())).encode())
        tag = int(about), -int(about), self.calls, -self.calls, steps, -steps
        own = torch.tensor([*tag, *numbers, *[0] * (NUMBERS - len(tag) - len(numbers))], dtype=torch.int64)
        settled = self._settled(self._reduced(own))
        if not settled.startswith(_OUTCOME):
            self.unanswered = settled
            if about not in _BETWEEN:
                raise StepLostError(
                    f"{settled}, within a step: all processes end; start again from the last checkpoint"
                )
            return None
        found = [*map(int, settled.removeprefix(_OUTCOME).split(","))]
        same_steps = found[4] == -found[5]
        if (found[0], found[2]) != (-found[1], -found[3]) or (not same_steps and about not in _BETWEEN):
            places = f"call {found[2]} to {-found[3]}, vote {About(found[0]).name} to {About(-found[1]).name}"
            raise StepLostError(
                f"{_APART}{places}. Call the decorated steps equally often in all of them, and let what one of them "
                "raises end it: all processes end; start again from the last checkpoint"
            )
        if not same_steps:
            self.unanswered = _OTHER_STEPS
            return None
        return tuple(found[len(tag) : len(tag) + len(numbers)])

    def slowest(self, about: About, *figures: float | None) -> tuple[float | None, ...] | None:
        """Return the greatest of each figure over all processes; None for a figure that one of them does not have.

        Where a process takes no part, the outcome is None in all others, as `lowest` says.
        """
        numbers = (-MOST if figure is None else max(-MOST + 1, -round(figure * _PARTS)) for figure in figures)
        found = self.lowest(about, *numbers)
        return found and tuple(None if number == -MOST else -number / _PARTS for number in found)

    def rebuilds(self, wrappers: Iterable[DistributedDataParallel], *, reduces: bool) -> bool:
        """Return whether a wrapper may rebuild its buckets in this call, which copies a list to the device.

        It does so once: in its first forward after gradients were reduced, in whatever step and whether or not that
        call reduces. A wrapper that has not after `SETTLE` calls that reduce is not in use.
        """
        earlier = self.reduced.total() - reduces
        return 1 <= earlier <= SETTLE and not all(map(has_rebuilt, wrappers))

    def _reduced(self, numbers: torch.Tensor) -> str:
        """Reduce the numbers over all processes; return them, or why that was not possible."""
        if self._broken:
            return self._broken
        try:
            distributed.all_reduce(numbers, distributed.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            why = self._not_answered(error)
            if not why:
                raise StepLostError(self._ended(error)) from error
            self._broken = why
            return why
        return _OUTCOME + ",".join(map(str, numbers.tolist()))

    def _settled(self, ours: str) -> str:
        """Return the outcome of a vote that counts in all processes: what the first of them has written down."""
        key = f"{_VOTES}/{self._meeting}"
        try:
            found = store().compare_set(f"{key}/{self._votes}", "", ours)
            if ours.startswith(_OUTCOME) and self.rank == 0:  # all have begun this vote, so nobody reads the one before
                store().delete_key(f"{key}/{self._votes - 1}")
        except RuntimeError as error:
            raise StepLostError(self._ended(error)) from error
        return str(found.decode())

    def _not_answered(self, error: Exception) -> str:
        """Say why a vote was not answered in time, here or in a process that left before; empty where it was not so."""
        if _SLOW in str(error):
            waited = timeout_of(self._group)
            seconds = waited.total_seconds() if waited is not None else VOTE_SECONDS
            why = f"rank {self.rank} waited {seconds:g} s for another process to reach the same step"
            with contextlib.suppress(Exception):  # the others then find it out by waiting themselves
                store().set(self._unanswered, why)
            return why
        with contextlib.suppress(Exception):  # nobody waited: a process has ended
            store().wait([self._unanswered], dt.timedelta(seconds=_LOOK_SECONDS))
            return str(store().get(self._unanswered).decode())
        return ""

    def begun(self) -> int:
        """Count the collectives of the run that this process has begun so far."""
        return collectives_begun([group for group in groups() if group is not self._group])

    def tell(self, why: str) -> None:
        """Write down for the others why this process leaves something, before the vote in which all of them do."""
        with contextlib.suppress(RuntimeError):  # the vote finds out that a process has ended
            store().set(self._told, f"rank {self.rank}: {why}")

    def told(self) -> str:
        """Return what a process has told last; empty where none has."""
        with contextlib.suppress(RuntimeError):  # the next vote finds out that a process has ended
            if store().check([self._told]):
                return str(store().get(self._told).decode())
        return ""

    def run_begins(self, usual: int | None = None) -> None:
        """Begin to count the collectives of a run, of which an earlier one made ``usual``."""
        self.usual, self._at_start = usual, self.begun()

    def made(self) -> int:
        """Count the collectives that this process has begun in the run."""
        return self.begun() - self._at_start

    def made_all(self) -> bool:
        """Return whether a run has begun as many collectives as such a run does: then nobody waits in one of them."""
        return self.usual is None or self.made() >= self.usual

    @property
    def _unanswered(self) -> str:
        return f"{_UNANSWERED}/{self._meeting}"

    @property
    def _told(self) -> str:
        return f"{_TOLD}/{self._meeting}"

    @property
    def _lost(self) -> str:
        """Where a process of this meeting says why it ends; another loop, later, has a meeting of its own."""
        return f"{_LOST}/{self._meeting}"

    def lost(self, error: Exception, where: str, *, ours: bool) -> Exception:
        """Return the exception to raise for a step that failed after a collective: no process may repeat it alone.

        Args:
            error: what the step raised.
            where: tier and step.
            ours: compiled code of this process failed; else it is the user's own error, or another process's end.
        """
        if ours:
            why = f"rank {self.rank}: {describe(error.__cause__ or error)} {where}"
            with contextlib.suppress(Exception):  # the others then say no more than that a process has ended
                store().set(self._lost, why)
            return StepLostError(
                f"{why}, after the step's first collective: the other processes are in it, and it cannot be repeated. "
                "All of them end; start again from the last checkpoint, with run='eager'"
            )
        chain = [str(cause) for cause in (error, error.__cause__, error.__context__) if cause is not None]
        another_ended = any(words in text for text in chain for words in _ENDS)
        return StepLostError(self._ended(error)) if another_ended else error

    def _ended(self, error: Exception) -> str:
        told = ""
        with contextlib.suppress(Exception):  # it was kept by a process that has ended itself
            store().wait([self._lost], dt.timedelta(seconds=_LOOK_SECONDS))
            told = store().get(self._lost).decode()
        told = told or f"another process has ended or does not answer ({describe(error)})"
        return f"{told}: all processes end; start again from the last checkpoint"

    def close(self) -> None:
        """Leave the group that votes were taken in; a call that is under way takes none any more."""
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized():
            with contextlib.suppress(Exception):  # one that votes later then goes on eager; else it takes it for an end
                if not self.unanswered:
                    store().set(self._unanswered, f"rank {self.rank} has closed its loop")
            if group in groups():  # else the program has left all groups, and may have begun others
                distributed.destroy_process_group(group)


def peers_of_this_run() -> Alone | Peers:
    """Return the processes of this run."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:  # noqa: PLR2004
        return Alone()
    return Peers()
