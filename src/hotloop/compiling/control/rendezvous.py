"""In one of several processes: a compile begins once the others are known to wait for it.

A process that compiles is late for its next collective, and the others give it up after their groups' timeout. So it
asks them first, through the store that they met at, and not by a collective. A thread of each process then lets the
collectives that begin from then on take long, and answers how many had begun until then. If this process has begun all
of those too, nobody waits for it impatiently, and it compiles. Otherwise the call runs eager, and a later one compiles.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import math
import os
import threading
import time
import weakref
from typing import Any

from torch import distributed

from hotloop._torch.collectives import AGREED, patience, store
from hotloop.compiling.observe import collector
from hotloop.errors import describe

_log = logging.getLogger("hotloop")


class Rendezvous:
    """The processes of a run, as this one asks them and answers them.

    Args:
        world: the group of all processes.
    """

    _BEHIND_SECONDS = 1.0
    """How long a process that wants to compile waits for others that are on their way to the same place."""
    _KEPT_SECONDS = 2.0
    """How long the others stay patient after the last compile: the next graph of the same step follows."""
    _WITHDRAWN_SECONDS = 60.0
    """How long they stay patient for a process that could not compile at once: until it wants the same code again."""
    _AGAIN_SECONDS = 0.02
    _LEAVE_SECONDS = 5.0
    """How long a process that ends waits for a thread; a thread that answers ends within a few milliseconds."""

    def __init__(self, world: Any) -> None:
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        # The store's server lives in the process that holds this object, and would end with the group, before `close`.
        self._held: Any = store()
        self._store, self._inbox = self._held.clone(), self._held.clone()  # a wait keeps its connection to itself
        # A store outlives a group that is destroyed and made again: each group has messages of its own.
        generation = self._store.add(f"hotloop/waits/generation/{self._rank}", 1)
        self._prefix = f"hotloop/waits/{generation}"
        self._lock = threading.Lock()
        self._granted = self._compiles = self._asked = False
        self._until = 0.0
        """When this process withdraws its question, by `time.monotonic`."""
        self._round = 0
        self._silent = 0
        """Rounds in a row that not all processes answered in time; each waits half as long as the one before."""
        self._waited = self._ended = self._closed = False
        self._failed = ""
        """Why this process answers nobody any more, though the run goes on."""
        self._process = os.getpid()
        self._store.set(f"{self._prefix}/here/{self._rank}", "1")
        self._store.add(f"{self._prefix}/here", 1)
        self._thread = threading.Thread(target=self._answer, name="hotloop-waits", daemon=True)
        self._thread.start()
        weakref.finalize(world, self.close)  # as the group is destroyed, or else as the interpreter ends

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork (a data loader's worker, say): the connections are its parent's alone."""
        return os.getpid() != self._process

    def leave(self) -> str:
        """Ask for leave to compile; return an empty string, or why this process may not compile yet."""
        if self._failed:
            return f"this process {self._failed}"
        if self._ended:  # as the run does
            return ""
        with self._lock:
            if self._granted:
                self._compiles = True
                return ""
            self._until = math.inf  # the question stands while it is being asked
        why = self._ask()
        with self._lock:
            self._granted = self._compiles = not why
            self._until = time.monotonic() + self._WITHDRAWN_SECONDS
        return why

    def _ask(self) -> str:
        deadline = time.monotonic() + self._BEHIND_SECONDS
        while True:
            try:
                why, hopeless = self._ask_once()
            except RuntimeError:
                return ""  # the store has ended, with the process that holds it: nobody waits any more
            if not why or hopeless or time.monotonic() > deadline:
                return why
            time.sleep(self._AGAIN_SECONDS)

    def compiled(self) -> None:
        """Note that the compile is over; mostly it is not the last of its step."""
        with self._lock:
            if self._compiles:
                self._compiles = False
                self._until = time.monotonic() + self._KEPT_SECONDS

    def _ask_once(self) -> tuple[str, bool]:
        """Ask all processes once; return why this process may not compile, and whether asking again is of no use."""
        everyone = range(self._size)
        if self._store.add(f"{self._prefix}/here", 0) < self._size:
            absent = next((rank for rank in everyone if not self._has("here", rank)), self._rank)
            hopeless, self._waited = self._waited, True  # a process that is late is waited for once
            return f"rank {absent} does not answer (hotloop.compile runs in some processes only)", hopeless
        if failed := self._who_failed():
            return failed, True
        left = self._store.add(f"{self._prefix}/gone", 0)
        asked = [rank for rank in everyone if not left or not self._has("gone", rank)]
        self._round += 1
        self._asked = True
        for rank in asked:
            self._send(rank, "ask")
        keys = {rank: self._answer_key(self._rank, self._round, rank) for rank in asked}
        if not self._came(list(keys.values()), self._BEHIND_SECONDS / 2**self._silent):
            self._silent += 1
            return self._who_failed() or "another process did not answer in time", True
        self._silent = 0
        answers = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
        for key in keys.values():
            self._store.delete_key(key)
        return judge(answers, self._rank)

    def _came(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys, by looking every 2 ms: torch logs a warning where a wait of the store times out."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _who_failed(self) -> str:
        """Name a process that answers nobody any more, and why; empty where all do."""
        if not self._store.add(f"{self._prefix}/failed", 0):
            return ""
        rank = next(rank for rank in range(self._size) if self._has("failed", rank))
        return f"rank {rank} {self._store.get(f'{self._prefix}/failed/{rank}').decode()}"

    def _has(self, what: str, rank: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/{what}/{rank}"]))

    def _send(self, rank: int, what: str) -> None:
        """Put a message into a process's inbox; this process has one too."""
        number = self._store.add(f"{self._prefix}/sent/{rank}", 1)
        self._store.set(f"{self._prefix}/inbox/{rank}/{number}", json.dumps([what, self._rank, self._round]))

    def _answer_key(self, asker: int, number: int, rank: int) -> str:
        return f"{self._prefix}/answer/{asker}/{number}/{rank}"

    # -- answering, in a thread of its own -------------------------------------------------------------------------

    def _answer(self) -> None:
        number = 1
        try:
            while not self._ended:
                key = f"{self._prefix}/inbox/{self._rank}/{number}"
                if self._asked and not self._inbox.check([key]):
                    self._withdraw()
                    time.sleep(self._AGAIN_SECONDS)
                    continue
                self._inbox.wait([key], dt.timedelta(days=1))
                what, asker, asked = json.loads(self._inbox.get(key))
                self._inbox.delete_key(key)
                number += 1
                self._heard(what, asker, asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for this thread
            self._fail(error)
        finally:
            self._ended = True

    def _fail(self, error: Exception) -> None:
        """Notify the others that this process answers nobody any more; where the store has ended, the run is over."""
        why = f"cannot be asked any more: {describe(error)}"
        try:
            self._inbox.set(f"{self._prefix}/failed/{self._rank}", why)
            self._inbox.add(f"{self._prefix}/failed", 1)  # the store answers an add, so the message has arrived
        except RuntimeError:
            _log.debug("the processes of this run cannot be asked any more", exc_info=True)
            return
        self._failed = why
        _log.warning(
            "rank %d %s. While collectives have a timeout, what is not compiled yet stays eager in all processes",
            self._rank,
            why,
            exc_info=error,
        )

    def _heard(self, what: str, asker: int, asked: int) -> None:
        """Handle a message: ``ask``, ``done`` or ``end``, from a rank, and the number of its round."""
        if what == "ask":
            patience.hold(f"rank {asker}", settle=0.01)
            self._inbox.set(self._answer_key(asker, asked, self._rank), json.dumps(patience.counts()))
        elif what == "done":
            patience.drop(f"rank {asker}")
        else:
            self._inbox.set(f"{self._prefix}/gone/{self._rank}", "1")
            self._inbox.add(f"{self._prefix}/gone", 1)
            self._ended = True

    def _withdraw(self) -> None:
        """Notify the others that this process no longer wants to compile, once its question has expired."""
        with self._lock:
            if not self._asked or self._compiles or time.monotonic() < self._until:
                return
            self._asked = self._granted = False
            for rank in range(self._size):
                number = self._inbox.add(f"{self._prefix}/sent/{rank}", 1)
                self._inbox.set(f"{self._prefix}/inbox/{rank}/{number}", json.dumps(["done", self._rank, 0]))

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, before the store ends: each would complain of a connection that was closed."""
        if self._closed or self.inherited:
            return
        self._closed = True
        for rank in range(self._size):  # a later group has the same names, and timeouts of its own
            patience.drop(f"rank {rank}")
        with contextlib.suppress(RuntimeError):  # the store has ended before
            if not self._ended:
                self._send(self._rank, "end")
        # Also where the store has ended: a thread that the interpreter's end meets in torch's code aborts the process.
        if threading.current_thread() is not self._thread:  # the garbage collector may run this in that thread
            self._thread.join(self._LEAVE_SECONDS)
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:  # it mostly holds the store
                others = [rank for rank in range(1, self._size) if self._has("here", rank)]
                for rank in others:
                    self._send(rank, "end")
                self._came([f"{self._prefix}/gone/{rank}" for rank in others], self._LEAVE_SECONDS)
        self._held = None


def judge(answers: dict[int, dict[str, tuple[int, int]]], rank: int) -> tuple[str, bool]:
    """Return who would wait impatiently while a process compiles, and whether that lasts until it has gone on.

    Args:
        answers: of each rank, by group, after how many collectives it became patient, and how many it has begun.
        rank: the process that wants to compile.

    Returns:
        why the process may not compile, or an empty string; and whether waiting is of no use, as it is this process
        that the other waits for.
    """
    waits = [
        (waiting, behind)
        for waiting, groups in answers.items()
        for group, (patient, _) in groups.items()
        for behind, counts in answers.items()
        if behind != waiting and group in counts and counts[group][1] < patient
    ]
    for_us = [waiting for waiting, behind in waits if behind == rank]
    if for_us:
        return f"rank {for_us[0]} has begun more collectives than this process, and may wait for it", True
    return (f"rank {waits[0][1]} has begun fewer collectives than others", False) if waits else ("", False)


class _Current:
    """The rendezvous of the process group that exists now; None without one, and in a single process."""

    def __init__(self) -> None:
        self._world: weakref.ref[Any] | None = None
        self.rendezvous: Rendezvous | None = None

    def follow(self) -> None:
        """Notice a new or ended process group, and answer its processes; otherwise it costs a comparison."""
        world = distributed.GroupMember.WORLD if distributed.is_available() else None
        if world is (None if self._world is None else self._world()):
            return
        if self.rendezvous is not None:
            self.rendezvous.close()
        self._world, self.rendezvous = None if world is None else weakref.ref(world), None
        if world is None or distributed.get_world_size() == 1:
            return
        if not hasattr(store(), "clone"):
            _log.warning(
                "other processes are not asked before a compile: the store of this torch has one connection only"
            )
            return
        try:
            self.rendezvous = Rendezvous(world)
        except RuntimeError as error:
            _log.warning("other processes are not asked before a compile, as their store cannot be shared: %s", error)

    def leave(self) -> str:
        """Return an empty string where this process may compile now, else why it has to wait."""
        self.follow()
        if self.rendezvous is None or self.rendezvous.inherited:
            return ""
        if patience.held_by(AGREED) or not patience.needed():
            return ""
        return self.rendezvous.leave()

    def compiled(self) -> None:
        """Notify the rendezvous that a compile is over."""
        if self.rendezvous is not None and not self.rendezvous.inherited:
            self.rendezvous.compiled()


current = _Current()
collector.ask, collector.tell = current.leave, current.compiled
