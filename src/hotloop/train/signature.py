"""What a function says of its parameters: their types, their defaults, and what its docstring has of each."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import types
import typing
import warnings
from typing import TYPE_CHECKING, Any

import pydantic

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; empty where nothing is known of its arguments."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def hints(name: str, function: Callable[..., Any], also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the type of each parameter that is a setting; one without annotation has the type of its default.

    Args:
        name: of the function, for errors.
        function: whose parameters are read.
        also: parameters that need neither a type nor a default.

    Raises:
        ConfigError: nothing tells the type of a parameter.
    """
    parameters = of(function).parameters
    written = {
        one.name: one.annotation
        for one in parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and not one.name.startswith("_")
    }
    named = {one: hint for one, hint in written.items() if hint is not inspect.Parameter.empty}
    plain = inspect.unwrap(function)
    names = getattr(plain, "__globals__", None) or vars(sys.modules[plain.__module__])
    try:
        read = typing.get_type_hints(types.SimpleNamespace(__annotations__=named), names, include_extras=True)
    except NameError as error:
        raise cannot(name, f"{error}; import it outside of `if TYPE_CHECKING:`") from error
    found = {}
    for one in written:
        default = parameters[one].default
        if one not in read and default in (None, inspect.Parameter.empty) and one not in also:
            raise cannot(name, f"{one} has neither a type nor a default that tells it: write {one}: float")
        kind = read.get(one, type(default))
        # `lr: float = None` means a number or nothing.
        found[one] = kind | None if default is None and kind is not type(None) else kind
    return found


def model(name: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> Any:
    """Return a pydantic model of the parameters of a function that ``hints`` names."""
    parameters = of(function).parameters
    fields: dict[str, Any] = {
        one: (hint, ... if parameters[one].default is inspect.Parameter.empty else parameters[one].default)
        for one, hint in hints.items()
    }
    config = pydantic.ConfigDict(protected_namespaces=())
    with warnings.catch_warnings():
        # A parameter may be called `copy` or `schema`, as methods of pydantic's models are.
        warnings.filterwarnings("ignore", message="Field name .* shadows an attribute", category=UserWarning)
        return pydantic.create_model(name.rpartition(":")[2], __config__=config, __doc__=function.__doc__, **fields)


def documented(text: str) -> dict[str, str]:
    """Return what a docstring says of each parameter, in Google's style."""
    found: dict[str, str] = {}
    for section in re.finditer(r"^(?:Args|Arguments|Attributes):\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE):
        name = ""
        for line in textwrap.dedent(section[1]).splitlines():
            if begins := re.match(r"(\w+)(?: \(.*?\))?: *(.*)", line):
                name, found[begins[1]] = begins[1], begins[2]
            elif line.strip() and name:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def cannot(name: str, why: str) -> ConfigError:
    """Build the error of a parameter that cannot be a setting."""
    return ConfigError(
        f"{name}: its parameters cannot be settings: {why}. A setting is a number, text, true or false, a Literal, an "
        "Enum, a path, a list or a mapping of these, a dataclass or a pydantic model"
    )
