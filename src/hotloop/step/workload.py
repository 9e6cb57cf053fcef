"""The one form of a user's program that verify, bench, doctor, the recipes and the background compile all take."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from hotloop.errors import ConfigError
from hotloop.step.naming import existing, named, optimizers_of
from hotloop.step.state.holdings import Holdings

if TYPE_CHECKING:
    import types


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training program, created anew by each call of a factory, which ``file.py:make`` or ``module:make`` names.

    Args:
        model: an ``nn.Module``, a sequence of modules, or a mapping of names to modules; the names are then the names
            of the components (``compile.components.lens``).
        optimizer: an optimizer, or a sequence or mapping of optimizers; None where the step updates by hand.
        step: the training step, as written for `hotloop.Loop.step`; takes one batch.
        batches: an iterable of batches, or a function that returns one. A tuple or list is passed as several arguments.
        loss: returns the loss of a batch without training on it; only comparisons of losses need it.
        metrics: returns a mapping of names to numbers, of the model as it is.
        state: other objects that the step changes.
        infer: a function that your program calls without gradients between the steps: sampling, an evaluation, an
            allocator. It takes one batch, as the step does. Only the harness needs it.
        before: a function that runs right before each step, outside of it. It takes a batch and returns the batch for
            the step. It is for work that cannot be captured, since it depends on data or changes Python's state: an
            allocator that chooses what the step sees, a schedule of the learning rate.

    Raises:
        ConfigError: ``step`` cannot be called, or ``batches`` is neither iterable nor a function.
    """

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    loss: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    state: Any = ()
    infer: Callable[..., Any] | None = None
    before: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise ConfigError(
                f"Workload step {_shown(self.step)}: expected a function of one batch; the order is "
                "Workload(model, optimizer, step, batches)"
            )
        for name, function in (("infer", self.infer), ("before", self.before)):
            if function is not None and not callable(function):
                raise ConfigError(f"Workload {name} {_shown(function)}: expected a function of one batch, or None")
        if not callable(self.batches) and not isinstance(self.batches, Iterable):
            raise ConfigError(
                f"Workload batches {_shown(self.batches)}: expected an iterable, or a function that gives one"
            )

    def models(self) -> dict[str, torch.nn.Module]:
        """Return the models by name, as a loop names them: ``model``, ``model[0]`` and so on, or their own names.

        Raises:
            ConfigError: a model is no ``nn.Module``.
        """
        return named("model", self.model, torch.nn.Module)

    def holdings(self) -> Holdings:
        """Return everything that a step may change.

        Raises:
            ConfigError: a model is no ``nn.Module``, or an optimizer no ``torch.optim.Optimizer``.
        """
        state = () if self.state is None else self.state
        others = tuple(state) if isinstance(state, list | tuple) else (state,)
        return Holdings(self.models(), optimizers_of(self.optimizer), others)

    def read(self) -> Iterator[Any]:
        """Yield the batches of one pass, as they are read."""
        # Not `yield from`, which would close the program's own generator with this one.
        for batch in self.batches() if callable(self.batches) else self.batches:  # noqa: UP028
            yield batch

    def ready(self, batch: Any) -> Any:
        """Return a batch as its step takes it: as it was read, or as ``before`` returns it.

        Raises:
            ConfigError: ``before`` returns None, or does not take the batch.
        """
        if self.before is None:
            return batch
        ready = call("before", self.before, batch)
        if ready is None and batch is not None:
            raise ConfigError("Workload before gave None: expected what the step takes; return the batch")
        return ready

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of one pass, each made ready when it is asked for.

        Raises:
            ConfigError: as `ready`, or the step does not take the first batch.
        """
        for place, batch in enumerate(self.read()):
            ready = self.ready(batch)
            if not place:
                check_takes("step", self.step, ready)
            yield ready

    def endless(self) -> Iterator[Any]:
        """Yield batches for as long as they are asked for, from the first again after the last.

        Raises:
            ConfigError: there is no batch, at the start or in a later pass (an iterator that is used up).
        """
        rounds = 0
        while True:
            empty = True
            for batch in self.epoch():
                empty = False
                yield batch
            if empty:
                again = ""
                if rounds or isinstance(self.batches, Iterator):
                    again = " a second time: give a list, a DataLoader, or a function that makes an iterable"
                raise ConfigError(f"Workload batches: expected at least one batch, found none{again}")
            rounds += 1

    def run(self, batch: Any) -> Any:
        """Run the step on one batch."""
        return self.step(*arguments(batch))


def _shown(value: Any) -> str:
    """Return a wrong value for an error; a long one, which may be a whole data set, by its type alone."""
    text = repr(value) if value is None or isinstance(value, str | int | float) else ""
    longest = 60  # characters
    return text if 0 < len(text) <= longest else f"of type {type(value).__name__}"


def arguments(batch: Any) -> tuple[Any, ...]:
    """Return a batch as the arguments of a step: a tuple or list is several arguments, anything else is one."""
    several = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    return tuple(batch) if several else (batch,)


def call(name: str, function: Callable[..., Any], batch: Any, run: Callable[..., Any] | None = None) -> Any:
    """Call a Workload's function of this name with a batch; ``run`` is the function as a loop runs it.

    Raises:
        ConfigError: the function does not take so many arguments.
    """
    try:
        return (run or function)(*arguments(batch))
    except TypeError:
        check_takes(name, function, batch)
        raise


def check_takes(name: str, function: Callable[..., Any], batch: Any) -> None:
    """Check that a Workload's function of this name takes a batch, by its signature.

    Raises:
        ConfigError: it does not take so many arguments.
    """
    given = arguments(batch)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        names = {1: "batch", 2: "x, y"}.get(len(given), "*batch")
        raise ConfigError(
            f"Workload {name}: {error} in {name}{signature}. A batch that is a tuple or list is passed as several "
            f"arguments, any other as one: expected def {name}({names}) for a {type(batch).__name__}"
            + (f" of {len(given)}" if isinstance(batch, list | tuple) else "")
        ) from error


def load_factory(name: str) -> Callable[[], Workload]:
    """Return the function that ``file.py:function`` or ``module:function`` names; its file is run as by an import.

    Raises:
        ConfigError: the name, the file or the function does not exist, or the function needs arguments.
        Exception: an exception that the file itself raises when it is imported.
    """
    found = load_function(name)
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # nothing is known of its arguments
        parameters = []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [one.name for one in parameters if one.default is one.empty and one.kind not in optional]:
        raise ConfigError(
            f"program {name!r}: {name.rpartition(':')[2]}() needs {', '.join(needed)}: expected a function that is "
            "called without arguments; give them defaults, or name a function that passes them"
        )
    return lambda: checked(name, found())


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` or ``module:function`` names, whatever arguments it takes.

    Raises:
        ConfigError: the name, the file or the function does not exist.
        Exception: an exception that the file itself raises when it is imported.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"program {name!r}: expected FILE.py:function or module:function")
    module = _load_module(place, name)
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        made = [key for key in known if getattr(vars(module)[key], "__module__", "") == module.__name__]
        raise ConfigError(
            f"program {name!r}: {place} has no function {function!r}; it defines {', '.join(made) or 'none'}"
        )
    return cast("Callable[..., Any]", found)


def checked(name: str, made: Any) -> Workload:
    """Return what the function of a program returned.

    Raises:
        ConfigError: it is no `Workload`.
    """
    if not isinstance(made, Workload):
        raise ConfigError(
            f"program {name!r}: {name.rpartition(':')[2]}() gave a {type(made).__name__}, expected a hotloop.Workload"
        )
    return made


def _load_module(place: str, name: str) -> types.ModuleType:
    """Import the file or module ``place``; ``name`` is the whole name of the program, for errors."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            raise ConfigError(
                f"program {name!r}: there is no module {place!r}; for a file write FILE.py:function"
            ) from error
    path = existing(place, name, "program")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: the file may import its neighbours
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import does: pickle finds its classes by the name of their module
    spec.loader.exec_module(module)
    return module
