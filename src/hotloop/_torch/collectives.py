"""The collectives of torch.distributed's process groups: how many have begun, and how long they may take."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
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


PATIENCE = dt.timedelta(hours=1)
"""How long collectives wait for a process that compiles."""
VOTES = "hotloop votes"
"""The description of groups that are never given more time: who is missing in a vote is noticed after minutes."""
_TIMED = ("ProcessGroupGloo", "ProcessGroupNCCL")
"""The backends whose timeout can be changed."""


class Patience:
    """Gives collectives that begin from now on an hour, while a holder asks for it; afterwards the user's timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[str] = set()
        self._before: dict[str, dt.timedelta] = {}
        """The timeouts that were raised, by backend; a name holds no group alive."""

    def hold(self, who: str) -> None:
        """Let collectives take an hour, in new groups too, until each holder has dropped it."""
        with self._lock:
            self._holders.add(who)
            for name, backend, timeout in _backends():
                if timeout < PATIENCE:
                    self._before[name] = timeout
                    backend.set_timeout(PATIENCE)

    def drop(self, who: str) -> None:
        """Drop a holder's request: after the last one's, the user's timeouts are back."""
        with self._lock:
            self._holders.discard(who)
            if self._holders or not self._before:
                return
            for name, backend, timeout in _backends():
                if name in self._before and timeout == PATIENCE:  # else the user has set it anew
                    backend.set_timeout(self._before[name])
            self._before.clear()

    @contextlib.contextmanager
    def held(self, who: str) -> Iterator[None]:
        """Hold the longer timeout while the block runs."""
        self.hold(who)
        try:
            yield
        finally:
            self.drop(who)


patience = Patience()


def _backends() -> Iterator[tuple[str, Any, dt.timedelta]]:
    """Yield the name, backend and timeout of everything whose timeout can be changed."""
    for group in groups() if distributed.is_available() and distributed.is_initialized() else ():
        if group.group_desc == VOTES:
            continue
        for device, backend, timeout in _timeouts(group):
            if type(backend).__name__ in _TIMED:
                yield f"{group.group_name} {device}", backend, timeout


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
