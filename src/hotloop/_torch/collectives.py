"""What torch.distributed keeps to itself of its process groups: collectives begun, and how long they may take."""

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

_DEVICES = ("cpu", "cuda")


def groups() -> list[Any]:
    """Give the process groups that this process is a member of."""
    world = private("torch.distributed.distributed_c10d:_world")
    return list(world.pg_map)


def collectives_begun(among: list[Any]) -> int:
    """Count the collectives that this process has begun so far in some groups; 0.2 µs a group."""
    return sum(int(group._get_sequence_number_for_group()) for group in among)  # noqa: SLF001 - in the ledger


PATIENCE_SECONDS = 1800.0
"""How long collectives wait for a process that compiles: the time of a long compile."""
_PATIENCE = dt.timedelta(seconds=PATIENCE_SECONDS)


class Patience:
    """How long the collectives of this process may take: as the user says, or longer while somebody needs that.

    A timeout counts for the collectives that begin while it is set. So it is noted how many had begun in each group
    when it grew: those up to there are not patient, and all later ones are. As all processes make the same collectives
    in a group, that number means the same one in each.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: set[str] = set()
        self._held: dict[str, tuple[Any, dt.timedelta, int]] = {}
        """By name, each group's backend, what its timeout was, and how many collectives had begun when it grew."""

    def needed(self) -> bool:
        """Tell whether a compile may take longer than a collective; groups whose timeout is fixed do not count."""
        return bool(self._holders) or any(one < _PATIENCE for _, _, one in _backends())

    def held_by(self, who: str) -> bool:
        """Tell whether somebody has asked for it who has not given it up."""
        return who in self._holders

    def hold(self, who: str, *, settle: float = 0.0) -> None:
        """Let collectives that begin from now on take longer, until everybody who asked for it has given it up.

        Args:
            who: asks for it.
            settle: seconds until the collectives are counted, where another thread may just begin one.
        """
        with self._lock:
            self._holders.add(who)
            fresh = [one for one in _backends() if self._held.get(one[0], (None,))[0] is not one[1]]
            for _, backend, timeout in fresh:
                if timeout < _PATIENCE:
                    backend._set_default_timeout(_PATIENCE)  # noqa: SLF001 - in the ledger
            if fresh and settle:
                time.sleep(settle)
            for name, backend, timeout in fresh:
                # One whose timeout was as long as that has always been patient.
                self._held[name] = backend, timeout, collectives_begun([backend]) if timeout < _PATIENCE else 0

    def drop(self, who: str) -> None:
        """Give it up: once nobody needs it, collectives take as long as the user says again."""
        with self._lock:
            self._holders.discard(who)
            if self._holders:
                return
            alive = {name: (backend, timeout) for name, backend, timeout in _backends()}
            for name, (backend, timeout, _) in self._held.items():
                if alive.get(name) == (backend, _PATIENCE):  # else the group is another, or somebody has set it anew
                    backend._set_default_timeout(timeout)  # noqa: SLF001 - in the ledger
            self._held.clear()

    @contextlib.contextmanager
    def held(self, who: str) -> Iterator[None]:
        """Hold it while the block runs."""
        self.hold(who)
        try:
            yield
        finally:
            self.drop(who)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Give, by the name of each group, after how many collectives it became patient, and how many have begun."""
        with self._lock:
            return {name: (patient, collectives_begun([one])) for name, (one, _, patient) in self._held.items()}


patience = Patience()
AGREED = "a loop"
"""Holds it in steps that all processes of a loop take together: each of them may compile there."""


def _backends() -> list[tuple[str, Any, dt.timedelta]]:
    """Give what the groups' collectives run on, by names that are the same in all processes, and their timeouts."""
    found = []
    for group in groups() if distributed.is_initialized() else ():
        for device in _DEVICES:
            backend = _backend(group, device)
            timeout = _timeout(backend)
            if timeout is not None and type(backend).__name__ in _CHANGEABLE:
                found.append((f"{group.group_name} {device}", backend, timeout))
    return found


_CHANGEABLE = ("ProcessGroupGloo", "ProcessGroupNCCL")
"""Backends whose timeout can be changed."""


def _backend(group: Any, device: str) -> Any:
    """Give what a group's collectives of a kind of device run on, or None."""
    try:
        return group._get_backend(torch.device(device))  # noqa: SLF001 - in the ledger
    except RuntimeError:
        return None


def _timeout(backend: Any) -> dt.timedelta | None:
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, dt.timedelta) else None


def timeout_of(group: Any) -> dt.timedelta | None:
    """Give how long a group's collectives may take; None where it does not say."""
    found = (_timeout(_backend(group, device)) for device in _DEVICES)
    return next((one for one in found if one is not None), None)


def store() -> Any:
    """Give the key-value store that the processes met at."""
    return private("torch.distributed.distributed_c10d:_get_default_store")()
