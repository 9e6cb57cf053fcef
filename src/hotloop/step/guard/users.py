"""Which objects and classes are the program's, and looked into by their attributes."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

_LIBRARIES = ("torch", "numpy", "builtins", "hotloop", "logging", "threading", "lightning", "tqdm", "rich")


def package_of(made: Any) -> str:
    """Return the package that a class or function is from: "" where it names none by a text, as Cython's types do."""
    home = made.__module__
    return home.partition(".")[0] if isinstance(home, str) else ""


def is_users_object(value: Any) -> bool:
    """Return whether a value is looked into by its attributes."""
    if isinstance(value, type | types.ModuleType | torch.optim.Optimizer):
        return False
    return package_of(type(value)) not in _LIBRARIES and (hasattr(value, "__dict__") or bool(slots_of(type(value))))


def is_users_class(cls: type) -> bool:
    """Return whether the attributes of a class are looked at: those of Python's own classes and of torch's are not."""
    top = package_of(cls)
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the attributes that a class keeps in slots."""
    return tuple(
        name
        for base in cls.__mro__
        if is_users_class(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )
