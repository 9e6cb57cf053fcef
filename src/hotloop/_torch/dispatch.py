"""Observes every operation that torch runs in a block, also the operations of compiled code and of backward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import never_trace, set_tracer
from hotloop._torch.graphs import is_standard_library, is_user_file
from hotloop._torch.ledger import private, private_or
from hotloop._torch.settings import patched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KINDS = 4096
"""Kinds of operations whose names and schemas are cached: a step has a hundred kinds, and ten thousand calls."""

_TORCH = os.path.dirname(torch.__file__)  # noqa: PTH120
AROUND_OPERATIONS = (os.path.join(_TORCH, "_ops.py"), os.path.join(_TORCH, "_library", ""))  # noqa: PTH118
"""Files and folders of torch whose functions run around each operation that is observed."""


def observing(
    handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``handle(operation, args, kwargs)`` runs each operation and returns its result.

    Compiled code runs in it as it does outside: the mode counts as one of torch's own modes, which dynamo ignores.

    An operator of higher order (``torch.cond``) comes as an operation, and so does each operation in the functions that
    it calls.

    Raises:
        CapabilityMissingError: this torch has no dispatch modes.
    """
    observer = _observer_of(private("torch.utils._python_dispatch:TorchDispatchMode"))()
    observer.handle = handle  # not in the class: a class waits for Python's collector, and would keep all that was seen
    context: contextlib.AbstractContextManager[Any] = observer
    return context


@functools.lru_cache(1)
def _observer_of(mode_class: Any) -> Any:
    """Return the class of modes that hand each operation to their ``handle``."""

    class Observer(mode_class):  # type: ignore[misc]  # the class is torch's, found at run time
        supports_higher_order_operators = True  # else torch raises at the first of them, and the program ends

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

    def dispatch(mode: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set_tracer(None)
        try:
            if types and any(_is_made_of_others(kind) for kind in types):
                return NotImplemented  # its own operations on the tensors that it holds come next, and collectives
            if _shapes_alone():
                return operation(*args, **(kwargs or {}))
            # record_function's marks are no work, nor is the class that waits for a collective where it is used.
            if operation.namespace == "profiler" or name_of(operation) == "_c10d_functional._wrap_tensor_autograd":
                return operation(*args, **(kwargs or {}))
            if is_higher_order(operation):
                args = tuple(_observed(value, mode) for value in args)
            return mode.handle(operation, args, kwargs or {})
        finally:
            set_tracer(before)

    # A method in the body of the class torch would wrap in four functions of its own, which run, and are heard by an
    # audit, at each operation.
    never_trace(dispatch)
    Observer.__torch_dispatch__ = dispatch
    return Observer


def _is_made_of_others(kind: type) -> bool:
    """Return whether a class runs its operations on the tensors that it holds: a DTensor, a quantized weight."""
    return kind.__module__.startswith("torch.distributed.") or hasattr(kind, "__tensor_flatten__")


def _shapes_alone() -> bool:
    """Return whether torch looks for the shape of a result that is spread over processes, on fake tensors."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    fake = private("torch._C:_TorchDispatchModeKey").FAKE
    return private("torch._C:_get_dispatch_mode")(fake) is not None


def _observed(value: Any, mode: Any) -> Any:
    """Return an argument of an operator of higher order; a function that the operator calls is observed as well.

    torch takes the mode away while the operator runs. An operation among the arguments stays: the operator asks for
    its schema.
    """
    if isinstance(value, torch.Tensor) or not callable(value) or hasattr(value, "_schema"):
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return value(*args, **kwargs)

    return call


def is_higher_order(operation: Any) -> bool:
    """Return whether an operation is one that calls functions, such as ``torch.cond``: it has no schema."""
    return bool(operation.namespace == "higher_order")


@functools.lru_cache(_KINDS)
def name_of(operation: Any) -> str:
    """Return ``namespace.name`` of an operation, without its overload."""
    return f"higher_order.{operation.name()}" if is_higher_order(operation) else str(operation.overloadpacket)


@functools.lru_cache(_KINDS)
def argument_names(operation: Any) -> tuple[str, ...]:
    """Return the names of an operation's arguments, in order."""
    return () if is_higher_order(operation) else tuple(one.name for one in operation._schema.arguments)  # noqa: SLF001 - in the ledger


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of an operation, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes into, by its schema; of cuDNN's RNNs also the state of their dropout.

    torch keeps that state for each device, hands it to every such call, and offers no other way to reach it.
    """
    for index, name in _written_places(operation):
        yield from tensors_in(kwargs.get(name, args[index] if index < len(args) else None))
    if drops_in_rnn(operation, args, kwargs):
        yield from tensors_in(argument_of(operation, args, kwargs, "dropout_state"))


@functools.lru_cache(_KINDS)
def _written_places(operation: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of each argument that an operation writes into."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(() if is_higher_order(operation) else operation._schema.arguments)  # noqa: SLF001 - in the ledger
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.lru_cache(_KINDS)
def is_random(operation: Any) -> bool:
    """Return whether an operation draws random numbers for some arguments (see `draws_random`)."""
    if is_higher_order(operation):  # checkpoints in compiled code: such an operator runs another one that draws
        return "rng_state" in name_of(operation)
    return torch.Tag.nondeterministic_seeded in operation.tags


@contextlib.contextmanager
def drawing_apart() -> Iterator[None]:
    """Let torch merge no random draws in the block: six noise layers draw six noises.

    torch merges equal operations, and its list of those that draw lacks many: ``randn_like``, ``normal_functional``,
    ``exponential``, custom ones. Dynamo compiles in one thread at a time, so no other compile meets the change.
    """
    if private_or("torch._functorch.compile_utils:rand_ops", None) is None:
        yield
        return
    with patched("torch._functorch:compile_utils", rand_ops=_NeverMerged()):
        yield


class _NeverMerged:
    """All operations that may draw random numbers, in place of torch's list of some of them."""

    def __contains__(self, operation: Any) -> bool:
        overloads = [getattr(operation, name) for name in getattr(operation, "overloads", tuple)()]
        # An operator of higher order has no schema that says whether what it runs draws.
        higher_order = getattr(operation, "namespace", "") == "higher_order"
        return higher_order or any(is_random(overload) for overload in overloads)


def draws_random(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operation draws random numbers: attention or an RNN that drops nothing draws none."""
    if not is_random(operation) or (
        name_of(operation) == "aten.native_dropout" and argument_of(operation, args, kwargs, "train") is False
    ):
        return False
    names = argument_names(operation)
    share = next((name for name in ("dropout_p", "dropout") if name in names), None)
    return share is None or bool(argument_of(operation, args, kwargs, share))


def drops_in_rnn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is cuDNN's RNN with dropout between its layers."""
    return name_of(operation) == "aten._cudnn_rnn" and draws_random(operation, args, kwargs)


def argument_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument of a call by name; None where it was left out."""
    place = argument_names(operation).index(name)
    return kwargs.get(name, args[place] if place < len(args) else None)


def draws_elsewhere(kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws from a generator of the program's, and not from torch's own streams."""
    generator = kwargs.get("generator")
    return isinstance(generator, torch.Generator) and not is_torchs(generator)


def is_torchs(generator: torch.Generator) -> bool:
    """Return whether a generator is one of torch's own: of the host, or of a GPU."""
    streams: tuple[Any, ...] = (torch.default_generator, *torch.cuda.default_generators)
    return any(generator._cdata == stream._cdata for stream in streams)  # type: ignore[attr-defined]  # noqa: SLF001 - in the ledger


def user_place() -> tuple[str, int] | None:
    """Return file and line of the innermost running frame of the user's code; Python's own (contextlib) is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename) and not is_standard_library(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Return file and line of the innermost frame of the user's code that an exception passed through."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            place = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return place
