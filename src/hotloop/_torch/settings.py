"""Changes torch's private settings for a while, and only settings that exist."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.versions import check

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRITON = "torch._inductor.config:triton"
_TRACING_LOG = "torch._dynamo.convert_frame"


@contextlib.contextmanager
def patched(path: str, **values: Any) -> Iterator[None]:
    """Set ``values`` on the settings module behind a ledger path while the block runs, and restore them after it.

    Raises:
        KeyError: a setting does not exist in this torch, which would otherwise be a silent no-op.
    """
    module = private(path)
    unknown = [name for name in values if not hasattr(module, name)]
    if unknown:
        raise KeyError(f"{path} has no setting {', '.join(unknown)} in this torch")
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextlib.contextmanager
def backward_with_forward() -> Iterator[None]:
    """Compile the backward graph together with the forward in the block, before any gradient has moved."""
    with patched("torch._functorch:config", force_non_lazy_backward_lowering=True):
        yield


@contextlib.contextmanager
def caching_apart(tag: str) -> Iterator[None]:
    """Compile with entries of torch's caches that carry a tag, so that compiles without the tag do not find them."""
    path = "torch.compiler:config"
    with patched(path, cache_key_tag=f"{private(path).cache_key_tag}, {tag}"):
        yield


@contextlib.contextmanager
def kept_graph() -> Iterator[None]:
    """Run a compiled backward with ``retain_graph=True``, which torch refuses where it may write over saved tensors.

    torch asks for the setting at run time, not for how the backward was compiled.
    """
    if not hasattr(private("torch._functorch:config"), "donated_buffer"):
        yield
        return
    with (
        patched("torch._functorch:config", donated_buffer=False),
        _in_backward("torch._functorch:config", "donated_buffer", False),
    ):
        yield


@contextlib.contextmanager
def outside_cudagraphs() -> Iterator[None]:
    """Run a compiled backward by its kernels, not by the CUDA graph that it was recorded in.

    The setting names the sizes that are captured, and is read at each call. Inputs are then not aligned, as they would
    be on the way into a graph.
    """
    with (
        patched(_TRITON, cudagraph_capture_sizes=()),
        _in_backward(_TRITON, "cudagraph_capture_sizes", ()),
    ):
        yield


def captures() -> bool:
    """Return whether CUDA graphs are used now: see `outside_cudagraphs`."""
    return private(_TRITON).cudagraph_capture_sizes is None


@contextlib.contextmanager
def _in_backward(path: str, name: str, value: Any) -> Iterator[None]:
    """Set a setting where a backward reads it: since torch 2.12 in a copy of its caller's context."""
    try:
        stashed = private("torch._C:_get_obj_in_tls")("context")
    except (CapabilityMissingError, RuntimeError):  # torch 2.11 has no such copy
        stashed = None
    if stashed is None:
        yield
        return
    module = private(path)
    before = stashed.run(getattr, module, name)
    stashed.run(setattr, module, name, value)
    try:
        yield
    finally:
        stashed.run(setattr, module, name, before)


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keep dynamo's warnings off the log while the block runs; its caller gets them as events."""
    import torch  # noqa: F401, PLC0415 - its import puts handlers on the log

    logger: logging.Logger | None = logging.getLogger(_TRACING_LOG)
    room = _TRACING_LOG.rpartition(".")[0]
    handlers: list[logging.Handler] = []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent

    def passes(record: logging.LogRecord) -> bool:
        return not record.name.startswith(room) or record.levelno != logging.WARNING

    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)


class CompileWindow:
    """The settings of one compile: opened by torch's start callback, closed when the component's call returns.

    The settings must outlive torch's end callback, since dynamo reads ``suppress_errors`` after it. They must not be
    set on every call, since that costs 1.5 µs. Since torch 2.12 dynamo's settings belong to a thread, and callbacks and
    call run in the thread that compiles. In torch 2.11 they belong to the process: there the first window to open saves
    the values that the last window to close restores.
    """

    _lock = threading.RLock()
    _open_now: ClassVar[list[CompileWindow]] = []
    _of_process: ClassVar[dict[str, Any]] = {}

    def __init__(self, *, suppress: bool, guard_requires_grad: bool) -> None:
        self._config = private("torch._dynamo:config")
        # torch leaves empty hook dictionaries unguarded: a hook added later would silently never run. With guards a
        # call of 64 modules costs 12 µs more.
        values: dict[str, Any] = {"skip_nnmodule_hook_guards": False}
        # A trace leaves weak references to parameters, which torch then refuses to swap; for backends that are not its
        # own it clears them only where this asks for it.
        values["invalidate_compile_context_weakrefs"] = True
        # torch refuses the two together; a user who set the other flag asked to be stopped.
        if suppress and not self._config.fail_on_recompile_limit_hit:
            values["suppress_errors"] = True
        if guard_requires_grad:
            values["skip_tensor_guards_with_matching_dict_tags"] = False
        self._values = {name: value for name, value in values.items() if hasattr(self._config, name)}
        self._before: dict[str, Any] | None = None
        self._shared = check() < (2, 12)
        self._quiet = _Quiet() if suppress else None

    def open(self) -> None:
        """Set the settings, once."""
        if self._before is not None:
            return
        with self._lock:
            self._before = {name: getattr(self._config, name) for name in self._values}
            if self._shared:
                self._of_process.update({k: v for k, v in self._before.items() if k not in self._of_process})
                self._open_now.append(self)
            self._set(self._values)
        if self._quiet is not None:
            logging.getLogger(_TRACING_LOG).addFilter(self._quiet)

    def close(self) -> None:
        """Restore the settings that `open` found."""
        if self._before is None:
            return
        with self._lock:
            before, self._before = self._before, None
            if not self._shared:
                self._set(before)
            else:
                self._open_now.remove(self)
                if not self._open_now:
                    self._set(self._of_process)
                    self._of_process.clear()
        if self._quiet is not None:
            logging.getLogger(_TRACING_LOG).removeFilter(self._quiet)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._config, name, value)


class _Quiet(logging.Filter):
    """Filter that keeps dynamo's tracebacks off the log, for failures in this thread that hotloop reports in a line."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread or record.levelno != logging.WARNING
