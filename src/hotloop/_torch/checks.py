"""Checks of libraries whose host read only decides whether to raise, and what runs in their place without the read.

A recording can hold no host read, so it is made without these checks; every eager run makes them. A row belongs into
the table only where the value that is read does nothing but raise. nn.Transformer's comparison of a mask with the
causal one is none: it chooses a kernel.

What torch.distributions and transformers check unless they are told not to is left out. A check that a program asks
for, by ``error_if_nonfinite=True``, is not: who asks for the error may count on it before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributions import Distribution

from hotloop._torch.ledger import private_or
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType


class Check(NamedTuple):
    """One check: where it is, what makes the function that runs in its place, and whether a program asks for it."""

    owner: Any
    name: str
    without: Callable[[Callable[..., Any]], Callable[..., Any]]
    on_request: bool = False


def _made_unchecked(real: Callable[..., Any]) -> Callable[..., Any]:
    def made(
        distribution: Any,
        batch_shape: Any = torch.Size(),  # noqa: B008 - Distribution's own default
        event_shape: Any = torch.Size(),  # noqa: B008
        validate_args: bool | None = None,
    ) -> None:
        real(distribution, batch_shape, event_shape, validate_args=False)
        # The object is left as its user asked for it: outside of the step it checks.
        del distribution._validate_args  # noqa: SLF001 - in the ledger
        if validate_args is not None:
            distribution._validate_args = validate_args  # noqa: SLF001

    return made


def _unchecked(_real: Callable[..., Any]) -> Callable[..., Any]:
    def unchecked(*_args: Any, **_kwargs: Any) -> None:
        pass

    return unchecked


def _norm_unchecked(real: Callable[..., Any]) -> Callable[..., Any]:
    def norm(tensors: Any, norm_type: Any = 2.0, _error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        return real(tensors, norm_type, False, foreach)

    return norm


def _checks() -> Iterator[Check]:
    """Yield the table, without the rows whose private name this torch lacks: what it reads there declines the step."""
    if hasattr(Distribution, "_validate_args"):
        yield Check(Distribution, "__init__", _made_unchecked)
    if hasattr(Distribution, "_validate_sample"):  # log_prob, cdf and icdf call it
        yield Check(Distribution, "_validate_sample", _unchecked)
    if private_or("torch.nn.utils.clip_grad:_get_total_norm", None) is not None:
        # clip_grad_norm_ calls it. Gradients become non-finite then, as without error_if_nonfinite.
        yield Check(torch.nn.utils.clip_grad, "_get_total_norm", _norm_unchecked, on_request=True)
    if private_or("torch:_check_tensor_all_with", None) is not None:
        # transformers' torch_compilable_check calls it, where its condition is a tensor.
        yield Check(torch, "_check_tensor_all_with", _unchecked)


CHECKS = tuple(_checks())
_CODES = {inspect.unwrap(vars(one.owner)[one.name]).__code__: one for one in CHECKS}


@functools.cache
def codes_of(setting: str) -> frozenset[CodeType]:
    """Return the code of the checks that a recording leaves out.

    Args:
        setting: ``checks`` of a loop: ``"auto"``, ``"skip"`` or ``"keep"``.
    """
    if setting == "keep":
        return frozenset()
    return frozenset(code for code, check in _CODES.items() if setting == "skip" or not check.on_request)


@contextlib.contextmanager
def checks_left_out() -> Iterator[None]:
    """Leave the checks out in this thread while the block runs."""
    with contextlib.ExitStack() as stack:
        for check in CHECKS:
            stack.enter_context(replaced(check.owner, check.name, check.without))
        yield
