"""Checks of libraries that read a value on the host only to raise: recordings and audits leave them out.

torch.distributions checks its arguments and samples, unless the program sets ``validate_args`` itself; transformers
checks conditions that are tensors.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private_or
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _unchecked(_real: Callable[..., Any]) -> Callable[..., None]:
    return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def checks_left_out() -> Iterator[None]:
    """Leave the checks out while the block runs."""
    with contextlib.ExitStack() as stack:
        if private_or("torch:_check_tensor_all_with", None) is not None:
            stack.enter_context(replaced(torch, "_check_tensor_all_with", _unchecked))
        known: Any = sys.modules.get("torch.distributions")  # not there: no program has made one
        if known is not None:
            stack.callback(known.Distribution.set_default_validate_args, known.Distribution._validate_args)  # noqa: SLF001 - in the ledger
            known.Distribution.set_default_validate_args(False)
        yield
