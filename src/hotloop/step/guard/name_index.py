"""The names that stand in code which a step can reach: attributes and methods count once code mentions them."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
"""Methods that run where code makes an object, of a class that it names."""
_NOT_IN_STEPS = (*CONSTRUCTORS, "__del__", "__repr__", "__str__", "__reduce__", "__getstate__")
"""Methods that Python calls by itself, but not of an object that a step uses."""
LOOKS_AT_ALL = frozenset({"vars", "__dict__"})
"""Code that names one of these may read any attribute."""
LOOKS_AT_CHILDREN = frozenset(
    {
        "children",
        "named_children",
        "modules",
        "named_modules",
        "_modules",
        "apply",
        "get_submodule",
        "__getattr__",
        "getmembers",
    }
)
"""Code that names one of these may reach any part of a model."""


class Mentions:
    """Tells which attributes the code that was reached may read, and follows others when their names come up."""

    def __init__(self) -> None:
        self._names: set[str] = {"forward"}  # which torch calls
        self._pieces: set[str] = set()
        """Of names that code puts together: ``getattr(self, f"{kind}_weight")``."""
        self._texts: set[str] = set()
        """Texts among the values that code reaches: names, where code asks for attributes whose names it keeps."""
        self._by_variable = False
        self._waiting: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)
        self._children: list[Callable[[], None]] = []

    def may_read(self, attribute: str) -> bool:
        """Tell whether code that was reached may read an attribute of this name."""
        if attribute in self._names or not LOOKS_AT_ALL.isdisjoint(self._names):
            return True
        if attribute.startswith("__"):
            return attribute not in _NOT_IN_STEPS
        return any(one in attribute for one in self._pieces)

    def follow(self, name: str, follow: Callable[[], None]) -> None:
        """Follow an attribute or method, now or when its name comes up."""
        if self.may_read(name):
            follow()
        else:
            self._waiting[name].append(follow)

    def follow_child(self, name: str, follow: Callable[[], None]) -> None:
        """Follow a part of a model, now or when its name comes up, or code that may reach any part."""
        if self._by_variable or not LOOKS_AT_CHILDREN.isdisjoint(self._names):
            follow()
        else:
            self._children.append(follow)
            self.follow(name, follow)

    def text(self, text: str) -> None:
        """Take a text that code reaches as a value: ``for name in self.names: getattr(self, name)``."""
        if text.isidentifier():
            self._texts.add(text)
            if self._by_variable:
                self.add((text,))

    def by_variable(self, texts: Iterable[str]) -> None:
        """Code was reached that asks for attributes by names that it keeps: all texts that it reaches, and these."""
        self._by_variable = True
        self.add((*self._texts, *texts))
        self.follow_children()

    def add(self, names: Iterable[str], pieces: Iterable[str] = ()) -> None:
        """Take names that stand in code, and pieces of others that it puts together."""
        self._pieces.update(pieces)
        fresh = set(names) - self._names
        self._names |= fresh
        every = not LOOKS_AT_ALL.isdisjoint(self._names)
        if not every and self._pieces:
            fresh |= {name for name in self._waiting if self.may_read(name)}
        for name in list(self._waiting) if every else sorted(fresh & self._waiting.keys()):
            for follow in self._waiting.pop(name, ()):
                follow()
        if not LOOKS_AT_CHILDREN.isdisjoint(fresh):
            self.follow_children()

    def follow_children(self) -> None:
        """Follow the parts of models that wait; one that was followed by its name is not looked at twice."""
        while self._children:
            self._children.pop(0)()
