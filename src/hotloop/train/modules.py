"""A LightningModule and its LightningDataModule as one program, ``module.py:Module,data.py:Data``.

Its function makes both. The parameters of the module's ``__init__`` are its settings, and those of the data's are in a
group ``data`` below them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop.errors import ConfigError
from hotloop.step.workload import load_function
from hotloop.train import conf_files, signature
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

DATA, FOLD = "data", "fold"


class Made(NamedTuple):
    """What the program makes: a LightningModule and a LightningDataModule."""

    module: Any
    data: Any


def no_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a program, unless it is a LightningModule without data.

    Raises:
        ConfigError: it is.
    """
    if _inherits(function, "LightningModule"):
        place, own = name.rpartition(":")[0], vars(sys.modules[function.__module__])
        found = [one for one, value in own.items() if _inherits(value, "LightningDataModule")]
        here = [one for one in found if own[one].__module__ == function.__module__]
        which = " or ".join(f"data={place}:{one}" for one in here or found)
        missing = f"data=FILE.py:CLASS ({place} has none)"
        raise ConfigError(f"{name} is a LightningModule: name its LightningDataModule too, {which or missing}")
    return function


def _inherits(value: Any, name: str) -> bool:
    """Say whether a value is a class that inherits from a class of that name; Lightning may not be loaded."""
    return any(one.__name__ == name for one in getattr(value, "__mro__", ())[1:])


def pair(name: str) -> Callable[..., Made]:
    """Return the function that makes a module and its data; its signature has the parameters of both.

    Raises:
        ConfigError: one of them is of another class, or its parameters cannot be settings.
    """
    pl = require("lightning.pytorch", "Fitting a LightningModule")
    first, second = conf_files.pair(name)
    module, data = load_function(first), _of_same_file(first, second)
    for one, found, kind in ((first, module, pl.LightningModule), (second, data, pl.LightningDataModule)):
        if not (inspect.isclass(found) and issubclass(found, kind)):
            raise ConfigError(f"{one}: expected a class that inherits from {kind.__name__}, found {found!r}")
    own, others = signature.of(module).parameters, signature.of(data).parameters
    if DATA in own:
        raise ConfigError(f"{first}: its __init__ takes {DATA}, which is the group of the data's settings: rename it")
    hints, below = (signature.hints(one, each, also=(FOLD,)) for one, each in ((first, module), (second, data)))
    takes_fold = [each for each, found in ((module, hints), (data, below)) if found.pop(FOLD, None)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [own[one].replace(kind=keyword, annotation=hint) for one, hint in hints.items()]
    if takes_fold:
        parameters.append(inspect.Parameter(FOLD, keyword, default=None, annotation=Any))
    if below:
        model = signature.model(second, data, below)
        needed = [one for one in below if others[one].default is inspect.Parameter.empty]
        default = inspect.Parameter.empty if needed else model()
        parameters.append(inspect.Parameter(DATA, keyword, default=default, annotation=model))

    def make(*, fold: Any = None, data_settings: Any = None, **given: Any) -> Made:
        folds = [{FOLD: fold} if each in takes_fold and fold is not None else {} for each in (module, data)]
        settings = {one: getattr(data_settings, one) for one in below}
        return Made(module(**given, **folds[0]), data(**settings, **folds[1]))

    def made(**given: Any) -> Made:
        return make(data_settings=given.pop(DATA, None), **given)

    made.__doc__ = signature.doc(module)
    made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return made


def _of_same_file(first: str, second: str) -> Callable[..., Any]:
    """Return the second class: of the module that the first one's file was just run as, where it is the same file."""
    (place, _, _), (own, _, name) = first.rpartition(":"), second.rpartition(":")
    ran = sys.modules.get(Path(place).stem) if place == own and place.endswith(".py") else None
    found = getattr(ran, name, None)
    return found if callable(found) else load_function(second)
