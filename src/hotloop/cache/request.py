"""Requests to the background child: the calls of components in a step, or a factory, and this process's settings."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import TYPE_CHECKING, Any, Self

import torch

from hotloop._torch.module import is_scripted
from hotloop.cache.ambient import Modes, process_settings
from hotloop.cache.portable import BackgroundUnavailableError, Packer, Tensors, outline

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

MAX_CALLS = 16
"""Calls that a recording keeps; a step that calls its components more often repeats itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a component: its pickled arguments ``(args, kwargs)``, and the modes it ran in."""

    component: str
    arguments: bytes
    modes: Modes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The order to a `BackgroundCompile`. Made by `Recorder.request` or `Request.of_factory`.

    Args:
        settings: the keyword arguments of `hotloop.compile`.
        modules: the pickled structure of each component, by name.
        calls: what the child runs, in order.
        tensors: the tensors of modules and calls, without contents.
        factory: ``module:function`` or ``file.py:function``, which returns a workload; then there are no calls.
        process: the settings of this process.
        peak_bytes: device memory that a step needs here, as measured; None takes torch's own peak, which a proof may
            have raised.
    """

    settings: Mapping[str, Any]
    modules: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    tensors: Tensors = dataclasses.field(default_factory=Tensors)
    factory: str = ""
    process: Mapping[str, Any] = dataclasses.field(default_factory=process_settings)
    peak_bytes: int | None = None

    @classmethod
    def of_factory(cls, factory: str, settings: Mapping[str, Any], *, peak_bytes: int | None = None) -> Self:
        """Make a request for a step of the workload that a factory makes, its model compiled.

        Raises:
            BackgroundUnavailableError: the name has no colon, or is one of this program's ``__main__``.
        """
        module, _, function = factory.rpartition(":")
        if not module or not function or module == "__main__":
            raise BackgroundUnavailableError(
                f"workload {factory!r}: expected module:function or file.py:function, importable without running "
                "this program again"
            )
        return cls(settings=settings, factory=factory, peak_bytes=peak_bytes)

    def dumps(self) -> bytes:
        """Return the request as bytes, which only a child of this process may load.

        Raises:
            BackgroundUnavailableError: a setting cannot be pickled.
        """
        file = io.BytesIO()
        torch.save([storage.value for storage in self.tensors.storages], file)
        bare = [dataclasses.replace(storage, value=None) for storage in self.tensors.storages]
        stripped = dataclasses.replace(self, tensors=Tensors(self.tensors.specs, bare))
        try:
            return pickle.dumps((stripped, file.getvalue()), protocol=5)
        except Exception as error:
            raise BackgroundUnavailableError(f"the settings cannot be pickled: {error}") from error

    @staticmethod
    def loads(text: bytes) -> Request:
        """Load the bytes of `dumps`; never call it on other bytes, since a pickle runs code."""
        request, values = pickle.loads(text)  # noqa: S301 - made by the parent process, over a file without a name
        assert isinstance(request, Request)
        known = torch.load(io.BytesIO(values), weights_only=True)
        storages = [
            dataclasses.replace(storage, value=value)
            for storage, value in zip(request.tensors.storages, known, strict=True)
        ]
        return dataclasses.replace(request, tensors=Tensors(request.tensors.specs, storages))


class Recorder:
    """A recorder of the eager calls of components while its block runs. It does not change what they do.

    Use it around a step (or several steps, where shapes differ from step to step): equal calls count once. Each call
    costs the pickling of its arguments, the first call that of the module's structure as well; tensors of up to 64 KiB
    are copied to the host. A call of another method than the module's own ``__call__`` is not seen.

    Args:
        components: the modules that are to be compiled, by name.
    """

    def __init__(self, components: Mapping[str, torch.nn.Module]) -> None:
        self._names = tuple(components)
        self._components = dict(components)
        self._packer = Packer()
        self._modules: dict[str, bytes] = {}
        self._calls: list[Call] = []
        self._seen: set[Any] = set()
        self._handles: dict[str, Any] = {}
        self.reason = ""
        """Why a background compile is not possible; empty where it is possible."""
        self.peak_bytes: int | None = None
        """Device memory that steps had needed by the end of the recorded step; None where there is no GPU."""

    def __enter__(self) -> Self:
        for name in self._components:
            self._listen(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.remove()
        # The peak is read now, before anything is proven. A proof holds several copies of the state, perhaps steps in
        # more bits, and torch's peak stays that high: a second copy of a plain step would then seem not to fit.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.peak_bytes = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        # Neither models nor batch must stay in memory as long as somebody holds the recorder.
        self._handles.clear()
        self._components.clear()
        self._packer.release()

    def request(self, settings: Mapping[str, Any], *, peak_bytes: int | None = None) -> Request:
        """Return the request for the recorded calls.

        Args:
            settings: the keyword arguments of `hotloop.compile`, as they will be at the swap: ``preset``, ``regions``,
                ``dynamic``, ...
            peak_bytes: see `Request`; None takes the peak at the end of the recorded step.

        Raises:
            BackgroundUnavailableError: a call could not be recorded, or none was made.
        """
        if self.reason:
            raise BackgroundUnavailableError(self.reason)
        if missing := [name for name in self._names if name not in self._modules]:
            raise BackgroundUnavailableError(f"component {', '.join(missing)} was not called in the recorded step")
        return Request(
            settings=settings,
            modules=self._modules,
            calls=tuple(self._calls),
            tensors=self._packer.tensors,
            peak_bytes=self.peak_bytes if peak_bytes is None else peak_bytes,
        )

    def _listen(self, name: str) -> None:
        def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.reason and len(self._calls) < MAX_CALLS:
                self._record(name, module, (args, kwargs))

        if is_scripted(component := self._components[name]):
            self.reason = f"component {name} was scripted by torch.jit, whose calls cannot be recorded"
        else:
            self._handles[name] = component.register_forward_pre_hook(record, with_kwargs=True)

    def _record(self, name: str, module: torch.nn.Module, arguments: Any) -> None:
        """Record a call; an error becomes `reason`, and never troubles the user's step."""
        try:
            if name not in self._modules:
                self._handles[name].remove()  # the child must not see our own hook
                try:
                    self._modules[name] = self._packer.pack(module, f"component {name} ({type(module).__name__})")
                finally:
                    self._listen(name)
            what, modes = f"the arguments of component {name}", Modes.of(module)
            signature = (name, repr(modes), outline(arguments, what))
            if signature not in self._seen:
                self._seen.add(signature)
                packed = self._packer.pack(arguments, what)
                self._calls.append(Call(component=name, arguments=packed, modes=modes))
        except BackgroundUnavailableError as error:
            self.reason = str(error)
        except Exception as error:  # noqa: BLE001 - from a class's own attributes, the device's memory
            self.reason = f"a call of component {name} cannot be recorded: {type(error).__name__}: {error}"
