"""Names of settings that an integration passes on: an unknown name is refused before anything is done."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hotloop.compiling.control import compile as compile_in_place
from hotloop.errors import ConfigError
from hotloop.presets import expected
from hotloop.step import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OF_COMPILE = tuple(name for name in inspect.signature(compile_in_place).parameters if name not in ("model", "preset"))
"""The settings of `hotloop.compile` beside the model and its preset."""
OF_LOOP = tuple(name for name in inspect.signature(Loop).parameters if name not in ("model", "optimizer"))
"""The settings of `hotloop.Loop` beside model and optimizer."""


def check_names(
    call: str, settings: Mapping[str, Any], valid: Iterable[str] = OF_COMPILE, own: Iterable[str] = ()
) -> None:
    """Refuse settings that do not exist.

    Args:
        call: the call that was made, for the message.
        settings: the settings given to it by name, without its own.
        valid: the settings that it passes on.
        own: settings of the call itself, for the message.

    Raises:
        ConfigError: the message names the setting, its value and the nearest valid names.
    """
    valid = tuple(valid)
    for name, value in settings.items():
        if name in valid:
            continue
        hint = ""
        if name in ("backend", "mode"):
            hint = "; preset= names the way to compile"
        elif name == "run":
            hint = "; run= belongs to hotloop.Loop, which owns the step"
        if "run" in valid:
            hint = ""
        raise ConfigError(f"{call}({name}={value!r}): there is no such setting: {expected(name, (*own, *valid))}{hint}")
