"""What torch.distributed keeps to itself of its process groups: collectives begun, and how long they may take."""

from __future__ import annotations

import contextlib
import datetime as dt
import warnings
from typing import TYPE_CHECKING, Any

import torch

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


@contextlib.contextmanager
def patient(among: list[Any], seconds: float) -> Iterator[None]:
    """Let collectives that begin in the block take so long before their group gives up; all members must do so."""
    change = private("torch.distributed.distributed_c10d:_set_pg_timeout")
    before = [(group, timeout) for group in among if (timeout := timeout_of(group)) is not None]
    longer = dt.timedelta(seconds=seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group, timeout in before:
            if timeout < longer:
                change(longer, group)
        try:
            yield
        finally:
            for group, timeout in before:
                change(timeout, group)


def timeout_of(group: Any) -> dt.timedelta | None:
    """Give how long a group's collectives may take; None where it does not say."""
    for name in _DEVICES:
        try:
            options = group._get_backend(torch.device(name)).options  # noqa: SLF001 - in the ledger
        except (RuntimeError, AttributeError):
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, dt.timedelta):
            return timeout
    return None


def store() -> Any:
    """Give the key-value store that the processes met at."""
    return private("torch.distributed.distributed_c10d:_get_default_store")()
