"""Folds that run at the same time, in worker processes; what is known of the whole is written by this process alone."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from hotloop import errors
from hotloop.errors import ConfigError
from hotloop.train import gpus, mirror
from hotloop.train.child import Child, WorkerLostError
from hotloop.train.cluster import RemoteChild
from hotloop.train.display import figures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.train.cluster import Cluster
    from hotloop.train.kfold_state import State
    from hotloop.train.settings import Settings

ATTEMPTS = 2
"""How often a fold is begun at most, by one command, while its workers die."""
_END_ALL = ("ConfigError", "DataError", "MissingExtraError", "StepLostError")
"""What the user has to mend before any other fold can run, or a GPU that no other fold can use."""
_EVERY = 0.2
_LOOK_SECONDS, _MISSED = 5.0, 3
"""How often the cluster's head is looked at, and how often it may be missed."""


class FoldWorkers:
    """Shares folds out among workers.

    Args:
        whole: what each worker is told first.
        settings: of the cross-validation.
        state: what is known of it.
        say: prints a line.
        many: how many workers.
        cluster: that runs them; None is this machine.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what is run, where, and who hears of it
        self,
        whole: Mapping[str, Any],
        settings: Settings,
        state: State,
        say: Callable[[str], None],
        many: int,
        cluster: Cluster | None = None,
    ) -> None:
        self.whole, self.settings, self.state, self.say, self.many = whole, settings, state, say, many
        self.cluster = cluster
        self.heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.running: dict[int, Child | RemoteChild] = {}
        self.listening: list[threading.Thread] = []
        self.at: dict[int, int] = {}
        """The fold that each worker is at."""
        self.begun: collections.Counter[int] = collections.Counter()
        self.left: collections.deque[int] = collections.deque()
        self.stopping = False
        self.look_at, self.missed = 0.0, 0
        self.failure: Exception | None = None

    def run(self, left: Sequence[int], interrupted: Callable[[], bool]) -> bool:
        """Run folds, and say whether all have ended by themselves.

        Raises:
            ConfigError, DataError, MissingExtraError, StepLostError: a fold did, and no other fold can run.
        """
        self.left.extend(left)
        try:
            for number in range(1, self.many + 1):
                self.start(number)
            while self.running:
                with contextlib.suppress(queue.Empty):
                    self.hear(*self.heard.get(timeout=_EVERY))
                self.check_head()
                if interrupted() and not self.stopping:
                    self.stop()
        finally:
            for one in self.running.values():
                one.end()
            for thread in self.listening if self.cluster else ():
                thread.join()
        if self.failure:
            raise self.failure
        return not self.left and not self.at

    def check_head(self) -> None:
        """Look now and then whether the cluster's head is there.

        Raises:
            TrainingFailedError: it is lost, and its workers with it.
        """
        if self.cluster is None or time.monotonic() < self.look_at:
            return
        self.missed = 0 if self.cluster.answers() else self.missed + 1
        self.look_at = time.monotonic() + _LOOK_SECONDS
        if self.missed == _MISSED:
            self.end_without_head(self.cluster)

    def end_without_head(self, cluster: Cluster) -> NoReturn:
        """End the whole, since no worker can be started any more.

        Raises:
            TrainingFailedError: always.
        """
        for one in self.running.values():
            if isinstance(one, RemoteChild):
                one.leave()
        self.running.clear()  # nobody is there to end them; they end by themselves
        raise errors.TrainingFailedError(
            f"the head of the Ray cluster, {cluster.head}, is lost. Each fold is kept at its last checkpoint: start a "
            f"head (ray start --head), and go on by {self.whole['again']}"
        )

    def start(self, number: int) -> None:
        """Start a worker, with its share of the GPUs, and give it a fold."""
        log = self.state.folder / "workers" / f"{number}.log"
        module = "hotloop.train.fold_worker"
        one = (
            RemoteChild(self.cluster, module, log)
            if self.cluster
            else Child(module, log, gpus.environment(self.settings, self.many, number))
        )
        self.running[number] = one
        one.send(self.whole)
        thread = threading.Thread(target=self.listen, args=(number, one), name=f"worker {number}", daemon=True)
        thread.start()
        self.listening.append(thread)
        self.give(number)

    def listen(self, number: int, one: Child | RemoteChild) -> None:
        """Pass on what a worker tells, in a thread of its own; None is its end."""
        try:
            while (what := one.hear()) is not None:
                self.heard.put((number, what))
        except WorkerLostError:
            pass  # `ended` says how
        except ConfigError as error:
            note = {"status": "failed", "error": str(error)}
            self.heard.put((number, {"status": "failed", "note": note, "kind": "ConfigError"}))
        self.heard.put((number, None))

    def give(self, number: int) -> None:
        """Hand a worker the next fold, or say that there is none."""
        one = self.running[number]
        if not self.left or self.stopping:
            one.send(None)
            return
        # What is compiled is the process's own: the folds that are left are shared out among all of them.
        runs = 1 + (len(self.left) - 1) // self.many
        fold = self.at[number] = self.left.popleft()
        self.begun[fold] += 1
        self.say(f"Fold {fold} began (worker {number}, its output: {one.log})")
        self.state.note(fold, status="running", error=None)
        one.send({"fold": fold, "runs": runs, "chosen": self.state.fold(fold).get("chosen")})

    def hear(self, number: int, what: dict[str, Any] | None) -> None:
        """Record what a worker tells, or its end."""
        if what is None:
            self.ended(number)
        elif "chosen" in what:
            self.state.note(self.at[number], chosen=what["chosen"])
        else:
            self.over(number, what)

    def over(self, number: int, what: Mapping[str, Any]) -> None:
        """Record how a fold ended, and give its worker the next one."""
        fold = self.at[number]
        if self.cluster:
            self.fetch(fold)
        self.state.note(fold, **what["note"])
        told = figures(what["note"].get("best") or {}) or what["note"].get("error") or ""
        self.say(f"Fold {fold} {what['status']}: {told}".rstrip(": "))
        if what["status"] != "interrupted":
            del self.at[number]
            self.state.write_page()
        if what.get("kind") in _END_ALL and not self.failure:
            self.failure = getattr(errors, what["kind"])(what["note"]["error"])
        if self.failure or what.get("stop") or what["status"] == "interrupted":
            self.stop()
        if what.get("kind") != "StepLostError":
            self.give(number)

    def fetch(self, fold: int) -> None:
        """Take what a node has stored of a fold."""
        folder = self.state.folder
        stored = mirror.of(self.settings.run.storage, folder / f"fold-{fold}", folder)
        mirror.bring(stored, lambda line: self.say(f"Fold {fold} is not here: {line}"))

    def ended(self, number: int) -> None:
        """Record a worker's end; a fold that it was at goes on from its last checkpoint, in another one."""
        if self.cluster and not self.cluster.answers():  # first: Ray ends this process where it is asked for more
            self.end_without_head(self.cluster)
        how = self.running.pop(number).end()
        fold = self.at.get(number)
        if fold is None:
            return
        if self.stopping:
            self.state.note(fold, status="interrupted")
            return
        del self.at[number]
        said = f"worker {number} died ({how})"
        if self.begun[fold] < ATTEMPTS:
            self.say(f"Fold {fold}: {said}; it goes on from its last checkpoint")
            self.left.appendleft(fold)
        else:
            why = f"{said}, and so did the one before; {self.state.folder / 'workers'} may say why"
            self.say(f"Fold {fold} failed: {why}")
            self.state.note(fold, status="failed", error=why)
        if self.left:
            self.start(number)

    def stop(self) -> None:
        """Begin no fold any more, and stop each worker within its step, which is saved."""
        self.stopping = True
        for one in self.running.values():
            if isinstance(one, RemoteChild) and one.waits:  # the cluster has no room for it, perhaps for long
                one.leave()
            else:
                one.interrupt()
