"""The collectives of torch.distributed's process groups: how many have begun, and how long they may take."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hotloop._torch.ledger import private

if TYPE_CHECKING:
    from collections.abc import Iterator


def groups() -> list[Any]:
    """List the process groups that this process is a member of."""
    world = private("torch.distributed.distributed_c10d:_world")
    return list(world.pg_map)


def collectives_begun(among: list[Any]) -> int:
    """Count the collectives that this process has begun so far in some groups; takes 0.2 µs per group."""
    return sum(int(group._get_sequence_number_for_group()) for group in among)  # noqa: SLF001 - in the ledger


def wait_for_collective(operation: Any, result: Any) -> None:
    """Wait until a collective is done, by what torch's operation returned: tensors and the work, or something else.

    A functional collective returns its tensor alone, for which torch knows the work.
    """
    if isinstance(result, torch.Tensor) and getattr(operation, "namespace", "") == "_c10d_functional":
        private("torch.distributed._functional_collectives:wait_tensor")(result)
    work = result[-1] if isinstance(result, tuple) and result else None
    if isinstance(work, torch.ScriptObject):
        distributed.Work.unbox(work).wait()


PATIENCE_SECONDS = 1800.0
"""How long collectives wait for a process that compiles: the duration of a long compile."""


class Patience:
    """The timeout of this process's collectives: the user's, or a longer timeout while a holder asks for it.

    A timeout counts for the collectives that begin while it is set. So the number of collectives that had begun in each
    group is recorded when its timeout grows: all later collectives are patient. As all processes make the same
    collectives in a group, the number means the same collective in each.
    """

    TIMEOUT = dt.timedelta(seconds=PATIENCE_SECONDS)

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: set[str] = set()
        self._held: dict[str, tuple[Any, dt.timedelta, int]] = {}
        """By name: each group's backend, its timeout before, and how many collectives had begun when it grew."""

    def needed(self) -> bool:
        """Return whether a compile may take longer than a collective; groups whose timeout is fixed do not count."""
        return bool(self._holders) or any(timeout < self.TIMEOUT for _, _, timeout in self._backends())

    def held_by(self, who: str) -> bool:
        """Return whether a holder asked for the longer timeout and has not dropped it."""
        return who in self._holders

    def hold(self, who: str, *, settle: float = 0.0) -> None:
        """Let collectives that begin from now on take longer, until every holder has dropped it.

        Args:
            who: the holder's name.
            settle: seconds until the collectives are counted, where another thread may be about to begin a collective.
        """
        with self._lock:
            self._holders.add(who)
            fresh = [found for found in self._backends() if self._held.get(found[0], (None,))[0] is not found[1]]
            for _, backend, timeout in fresh:
                if timeout < self.TIMEOUT:
                    backend.set_timeout(self.TIMEOUT)
            if fresh and settle:
                time.sleep(settle)
            for name, backend, timeout in fresh:
                # A group whose timeout was as long before has always been patient.
                self._held[name] = backend, timeout, collectives_begun([backend]) if timeout < self.TIMEOUT else 0

    def drop(self, who: str) -> None:
        """Drop a holder's request: after the last holder's, the user's timeouts are back."""
        with self._lock:
            self._holders.discard(who)
            if self._holders:
                return
            alive = {name: (backend, timeout) for name, backend, timeout in self._backends()}
            for name, (backend, timeout, _) in self._held.items():
                if alive.get(name) == (backend, self.TIMEOUT):  # else it is another group, or the user has set it anew
                    backend.set_timeout(timeout)
            self._held.clear()

    @contextlib.contextmanager
    def held(self, who: str) -> Iterator[None]:
        """Hold the longer timeout while the block runs."""
        self.hold(who)
        try:
            yield
        finally:
            self.drop(who)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return, by group name, after how many collectives it became patient, and how many have begun."""
        with self._lock:
            return {name: (since, collectives_begun([backend])) for name, (backend, _, since) in self._held.items()}

    @staticmethod
    def _backends() -> list[tuple[str, Any, dt.timedelta]]:
        """List the backends whose timeout can be changed, with names that are equal in all processes, and timeouts."""
        found = []
        for group in groups() if distributed.is_initialized() else ():
            for device, backend, timeout in _timeouts(group):
                if type(backend).__name__ in ("ProcessGroupGloo", "ProcessGroupNCCL"):
                    found.append((f"{group.group_name} {device}", backend, timeout))
        return found


patience = Patience()
AGREED = "a loop"
"""The holder in steps that all processes of a loop take together: each of them may compile there."""


def _timeouts(group: Any) -> Iterator[tuple[str, Any, dt.timedelta]]:
    """Yield the backend of a group for each kind of device, with its timeout."""
    backend_for = getattr(group, "get_backend", None) or group._get_backend  # noqa: SLF001 - public since torch 2.14
    for device in ("cpu", "cuda"):
        try:
            backend = backend_for(torch.device(device))
        except RuntimeError:  # the group has no backend for such a device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, dt.timedelta):
            yield device, backend, timeout


def timeout_of(group: Any) -> dt.timedelta | None:
    """Return how long a group's collectives may take; None where it does not say."""
    return next((timeout for _, _, timeout in _timeouts(group)), None)


def store() -> Any:
    """Return the key-value store at which the processes met."""
    return private("torch.distributed.distributed_c10d:_get_default_store")()
