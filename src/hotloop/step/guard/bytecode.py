"""What Python code may read: the globals and attributes that it names, the methods of a class, and whose code it is."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import operator
import re
import sys
import types
from typing import Any

from hotloop._torch.graphs import is_user_file

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL")
_PLACES = re.compile(r"%\w|\{[^}]*\}")
"""Where a text says that another one goes: ``"%s_weight"``, ``"{}_weight"``."""
_WRAPPERS = 6
"""Decorators around one function that are looked through."""
_MODULES_BY_NAME = frozenset({"modules", "import_module", "__import__"})
_JOINS = ("BUILD_STRING", "BINARY_OP")
_JOINED = 5
"""Within so many instructions a text becomes a part of another: what is put after it is a variable, seldom more."""


@functools.lru_cache(maxsize=1024)
def names(code: types.CodeType) -> tuple[str, ...]:
    """Give the globals that code reads or sets, that of functions defined inside it too; attributes are no globals."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _GLOBALS}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(found.union(*(names(one) for one in inner))))


@functools.lru_cache(maxsize=1024)
def attributes(code: types.CodeType) -> tuple[str, ...]:
    """Give the names of attributes that code reads, that of functions defined inside it too.

    A text counts as well: ``getattr(self, "weight")``, ``attrgetter("config.weight")``.
    """
    texts = {
        part
        for constant in code.co_consts
        if isinstance(constant, str) and all(part.isidentifier() for part in constant.split("."))
        for part in constant.split(".")
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(texts.union(code.co_names, *(attributes(one) for one in inner))))


@functools.lru_cache(maxsize=1024)
def evaluated(code: types.CodeType) -> tuple[str, ...]:
    """Give the names in the texts that code hands ``eval`` or ``exec``, as far as they stand in it."""
    if {"eval", "exec"}.isdisjoint(names(code)):
        return ()
    found: set[str] = set()
    for text in _texts(code):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # a docstring, say
            made = compile(text, "<text>", "exec", dont_inherit=True)
            found.update(names(made), attributes(made))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=1024)
def pieces(code: types.CodeType) -> tuple[str, ...]:
    """Give the texts of which code puts names together for ``getattr``, that of functions inside it too."""
    found: set[str] = set()
    if "getattr" in names(code):
        steps = list(dis.get_instructions(code))
        for index, one in enumerate(steps):
            made = any(map(_makes_a_name, steps[index + 1 : index + _JOINED]))
            if one.opname == "LOAD_CONST" and isinstance(one.argval, str) and made:
                found.update(piece for piece in _PLACES.split(one.argval) if piece.isidentifier())
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(found.union(*(pieces(one) for one in inner))))


@functools.lru_cache(maxsize=1024)
def asks_by_variable(code: types.CodeType) -> bool:
    """Tell whether code hands ``getattr`` a name that is no text of its own, that of functions inside it too.

    A ``case Settings(kind="a")`` does so as well: the names stand in a tuple, or in the class (``__match_args__``).
    """
    steps = list(dis.get_instructions(code))
    if any(one.opname == "MATCH_CLASS" for one in steps):
        return True
    for index, one in enumerate(steps):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval == "getattr":
            given = list(itertools.takewhile(lambda step: not step.opname.startswith("CALL"), steps[index + 1 :]))
            calls = any("NULL" in step.opname or "NULL" in step.argrepr for step in given)  # and so makes the name
            if calls or not any(_is_name(step, after) for step, after in itertools.pairwise((*given, one))):
                return True
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(asks_by_variable(one) for one in inner)


def _is_name(one: dis.Instruction, after: dis.Instruction) -> bool:
    """Tell whether an instruction loads a text as it is, which the next one does not put to something else."""
    put = after.opname in _JOINS or after.opname.startswith(("LOAD_METHOD", "LOAD_ATTR"))
    return one.opname == "LOAD_CONST" and isinstance(one.argval, str) and not put


def _makes_a_name(one: dis.Instruction) -> bool:
    """Tell whether an instruction puts texts together: ``+``, ``%``, an f-string, ``format``."""
    return one.opname in _JOINS or (one.opname.startswith(("LOAD_METHOD", "LOAD_ATTR")) and one.argval == "format")


def listed(code: types.CodeType) -> tuple[str, ...]:
    """Give the texts that stand in tuples and sets of code, that of functions defined inside it too."""
    held = (constant for constant in code.co_consts if isinstance(constant, tuple | frozenset))
    texts = (text for one in held for text in one if isinstance(text, str) and text.isidentifier())
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*texts, *(text for one in inner for text in listed(one)))


def asked_for(getter: operator.attrgetter[Any] | operator.methodcaller) -> tuple[str, ...]:
    """Give the names of the attributes that an ``attrgetter`` or ``methodcaller`` reads."""
    made: Any = getter.__reduce__()
    names = made[1]
    if isinstance(getter, operator.methodcaller):
        names = made[0].args if isinstance(made[0], functools.partial) else names[:1]
    return tuple(part for name in names if isinstance(name, str) for part in name.split("."))


def imports(function: types.FunctionType) -> list[types.ModuleType]:
    """Give the modules that a function imports as it runs, or takes by a text, where they are imported."""
    code, package = function.__code__, function.__globals__.get("__package__") or ""
    wanted = [f"{package}.{name}" if level else name for level, name in _imported(code)]
    if not _MODULES_BY_NAME.isdisjoint(attributes(code)):  # sys.modules["settings"], import_module("settings")
        own = [function.__globals__.get("__name__", "")] if "__name__" in names(code) else []
        wanted += [*_texts(code), *own]
    return [sys.modules[name] for name in dict.fromkeys(wanted) if name in sys.modules]


@functools.lru_cache(maxsize=1024)
def _texts(code: types.CodeType) -> tuple[str, ...]:
    """Give the texts that stand in code, that of functions defined inside it too."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*texts, *(text for one in inner for text in _texts(one)))


@functools.lru_cache(maxsize=1024)
def _imported(code: types.CodeType) -> tuple[tuple[int, str], ...]:
    """Give the modules that code imports, and how many packages up; further up than its own are left out."""
    steps = list(dis.get_instructions(code))
    found = [
        (steps[index - 2].argval, one.argval)
        for index, one in enumerate(steps)
        if one.opname == "IMPORT_NAME" and steps[index - 2].argval in (0, 1)
    ]
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*found, *(pair for one in inner for pair in _imported(one)))


def function_of(member: Any) -> Any:
    """Give the function behind an entry of a class: of a property its getter, of a class method the function itself."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member.func if isinstance(member, functools.cached_property) else member


def wrapped(function: Any) -> list[Any]:
    """Give a function and those that it wraps, as decorators leave them, the outermost first."""
    chain = [function]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None and len(chain) < _WRAPPERS:
        chain.append(inner)
    return chain


def file_of(function: Any) -> str:
    """Give the file that the innermost function is written in."""
    code = getattr(wrapped(function)[-1], "__code__", None)
    return code.co_filename if code is not None else "<built in>"


def is_users(function: Any) -> bool:
    """Tell whether a function is of the user's, or of a library that is neither torch nor ours."""
    return is_user_file(file_of(getattr(function, "__func__", function)))


def content(cell: types.CellType) -> Any:
    """Give what a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not set yet
        return None
