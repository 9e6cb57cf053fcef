"""What a code object reads by name: globals, attributes, modules; and whether it makes names as it runs."""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import sys
import types
from typing import Any

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL")
_ALL_ATTRIBUTES = frozenset({"vars", "__dict__", "dir", "getmembers", "attrgetter", "methodcaller", "__getattribute__"})
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_MODULES_BY_NAME = frozenset({"modules", "import_module", "__import__"})


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """The names in one code object.

    Attributes:
        words: names of attributes and of globals, and texts that could be such names.
        own: the code is the program's own, and no library's.
        outside: names of globals.
        texts: all texts.
        computed: it may read attributes by names that it makes: then all attributes count.
        environment: it may read environment variables, which its texts name.
        modules: names of modules that it imports, with how many packages up.
    """

    words: frozenset[str]
    own: bool = True
    outside: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    computed: bool = False
    environment: bool = False
    modules: tuple[tuple[int, str], ...] = ()

    def computing(self) -> Names:
        """Return the same names for a frame that was handed something that reads attributes by name."""
        return _computing(self)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType, *, own: bool = True) -> Names:
    """Return the names in a code object, without those of functions defined inside it: they run by themselves.

    Args:
        code: the code.
        own: it is the program's own; of a library's code only the names of attributes count.
    """
    constants = [*code.co_consts, *(item for held in code.co_consts if isinstance(held, tuple) for item in held)]
    texts = tuple(text for text in constants if isinstance(text, str))
    parts = (part for text in texts if len(text) < 100 for part in text.split("."))  # noqa: PLR2004 - no docstring
    words = frozenset((*code.co_names, *(part for part in parts if part.isidentifier())))
    if not own:
        return Names(words, own=False)
    steps = list(dis.get_instructions(code))
    outside = {step.argval for step in steps if step.opname in _GLOBALS}
    imported = [
        (steps[index - 2].argval, step.argval)
        for index, step in enumerate(steps)
        if step.opname == "IMPORT_NAME" and steps[index - 2].argval in (0, 1)
    ]
    if not _MODULES_BY_NAME.isdisjoint(words):
        imported += [(0, text) for text in texts]
    if "globals" in outside:
        outside |= words
    computed = not _ALL_ATTRIBUTES.isdisjoint(code.co_names) or _makes_names(steps)
    environment = not {"environ", "getenv"}.isdisjoint(words)
    return Names(words, own, tuple(sorted(outside)), texts, computed, environment, tuple(imported))


@functools.lru_cache(maxsize=1024)
def _computing(names: Names) -> Names:
    return dataclasses.replace(names, computed=True)


def _makes_names(steps: list[dis.Instruction]) -> bool:
    """Return whether code hands ``getattr`` a name that is no text of its own, or matches a class."""
    for index, step in enumerate(steps):
        if step.opname == "MATCH_CLASS":  # the names stand in the class (``__match_args__``)
            return True
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in _BY_NAME:
            given = itertools.takewhile(lambda one: not one.opname.startswith(("CALL", "PRECALL")), steps[index + 1 :])
            if not _second_is_text(list(given)):
                return True
    return False


def _second_is_text(given: list[dis.Instruction]) -> bool:
    """Return whether the second argument of a call is a text as it stands in the code."""
    pushed: list[tuple[int, dis.Instruction]] = []
    for place, step in enumerate(given):
        if step.opname == "LOAD_METHOD" or "NULL" in step.opname + step.argrepr:  # a call makes an argument
            return False
        if step.opname in ("BUILD_STRING", "BINARY_OP"):  # texts are put together
            return False
        if step.opname.startswith("LOAD_") and step.opname != "LOAD_ATTR":
            pushed += [(place, step)] * (2 if step.opname.count("LOAD_FAST") > 1 else 1)
    if len(pushed) < 2:  # noqa: PLR2004 - object and name
        return False
    place, step = pushed[1]
    alone = place + 1 == len(given) or given[place + 1].opname.startswith("LOAD_")
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str) and alone and given[place].opname != "LOAD_ATTR"


def imported_modules(names: Names, space: dict[str, Any]) -> list[types.ModuleType]:
    """Return the modules that code imports as it runs, or takes by a text, and that are imported."""
    package = space.get("__package__") or ""
    wanted = [f"{package}.{name}" if level else name for level, name in names.modules]
    if "__name__" in names.words and not _MODULES_BY_NAME.isdisjoint(names.words):
        wanted.append(space.get("__name__", ""))
    return [sys.modules[name] for name in dict.fromkeys(wanted) if name in sys.modules]


def function_of(member: Any) -> Any:
    """Return the function behind an entry of a class: of a property its getter, of a class method the function."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member.func if isinstance(member, functools.cached_property) else member


def wrapped(function: Any) -> list[Any]:
    """Return a function and those that it wraps, as decorators leave them, the outermost first."""
    chain = [function]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None and len(chain) < 6:  # noqa: PLR2004
        chain.append(inner)
    return chain


def file_of(function: Any) -> str:
    """Return the file that the innermost function is written in."""
    code = getattr(wrapped(function)[-1], "__code__", None)
    return code.co_filename if code is not None else "<built in>"


def inner_codes(code: types.CodeType) -> set[types.CodeType]:
    """Return the code of functions that are defined inside: made anew in each run."""
    found = {constant for constant in code.co_consts if isinstance(constant, types.CodeType)}
    return found.union(*map(inner_codes, found))
