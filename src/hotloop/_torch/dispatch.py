"""Sees every operation that torch runs in a block, those of compiled code and of backward included."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.graphs import is_standard_library, is_user_file
from hotloop._torch.ledger import private

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator

_HOST_READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")
_SIZES_FROM_DATA = (
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten._coalesce",
)
_DROPOUT = "dropout_p"
"""What attention calls the part of its weights that it drops."""
_SELECTS = ("aten.nonzero", "aten.masked_select")

_KINDS = 4096
"""Kinds of operations whose names and schemas are remembered: a step has a hundred of them, ten thousand times."""


def observing(
    handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Give a context in which ``handle(operation, args, kwargs)`` runs each operation and gives its result.

    Compiled code runs in it as it does outside: the mode counts as one of torch's own, which dynamo does not mind.

    Raises:
        CapabilityMissingError: this torch has no dispatch modes.
    """
    mode_class = private("torch.utils._python_dispatch:TorchDispatchMode")

    class Observer(mode_class):  # type: ignore[misc, valid-type]  # the class is torch's, found at run time
        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation.namespace == "profiler":  # record_function's marks are no work
                return operation(*args, **(kwargs or {}))
            return handle(operation, args, kwargs or {})

    context: contextlib.AbstractContextManager[Any] = Observer()
    return context


@functools.lru_cache(_KINDS)
def name_of(operation: Any) -> str:
    """Give ``namespace.name`` of an operation, without its overload."""
    return str(operation.overloadpacket)


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Give the tensors in arguments or results of an operation, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Give the arguments that an operation writes into, by its schema."""
    for index, name in _written_places(operation):
        yield from tensors_in(kwargs.get(name, args[index] if index < len(args) else None))


@functools.lru_cache(_KINDS)
def _written_places(operation: Any) -> tuple[tuple[int, str], ...]:
    """Give place and name of each argument that an operation writes into."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(operation._schema.arguments)  # noqa: SLF001 - in the ledger
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.lru_cache(_KINDS)
def is_random(operation: Any) -> bool:
    """Tell whether an operation draws random numbers, or would if its arguments asked for it (`draws_random`)."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def draws_random(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of an operation draws random numbers: attention that is told to drop nothing draws none."""
    if not is_random(operation):
        return False
    names = [argument.name for argument in operation._schema.arguments]  # noqa: SLF001 - in the ledger
    if _DROPOUT not in names:
        return True
    place = names.index(_DROPOUT)
    return bool(kwargs.get(_DROPOUT, args[place] if place < len(args) else 0.0) != 0.0)


def draws_elsewhere(kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation draws from a generator that was made for it, and not from torch's own streams."""
    generator = kwargs.get("generator")
    return isinstance(generator, torch.Generator) and not is_torchs(generator)


def is_torchs(generator: torch.Generator) -> bool:
    """Tell whether a generator is one of torch's own: of the host, or of a GPU."""
    streams: tuple[Any, ...] = (torch.default_generator, *torch.cuda.default_generators)
    return any(generator._cdata == one._cdata for one in streams)  # type: ignore[attr-defined]  # noqa: SLF001 - in the ledger


def host_read(operation: Any, args: tuple[Any, ...]) -> str:
    """Say in the user's terms why Python waits for the result of an operation; empty where it does not."""
    name = name_of(operation)
    if name in _HOST_READS:
        return "a value is read on the host: .item(), float(), print, or a branch on a tensor"
    masked = name in ("aten.index", "aten.index_put") and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_in(*args[1:2])
    )
    if name in _SIZES_FROM_DATA or (masked and name == "aten.index"):
        selects = name in _SELECTS or masked
        instead = " (torch.where, or a weight of 0 for what is left out, keeps the size)" if selects else ""
        return f"the size of a result depends on the data: {name.removeprefix('aten.')}{instead}"
    return ""


def user_place() -> tuple[str, int] | None:
    """Give file and line of the innermost running frame of the user's own code, not of Python's own (contextlib)."""
    found = inspect.currentframe()
    while found is not None:
        if is_user_file(found.f_code.co_filename) and not is_standard_library(found.f_code.co_filename):
            return found.f_code.co_filename, found.f_lineno
        found = found.f_back
    return None


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Give file and line of the innermost frame of the user's own code that an exception passed through."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            place = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return place
