"""What a code object reads by name: globals, attributes, modules; and whether it makes names as it runs."""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

from hotloop._torch.graphs import is_own_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL")
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_LOADS = ("LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_SETS = tuple(f"{verb}_{what}" for verb in ("STORE", "DELETE") for what in ("FAST", "DEREF", "GLOBAL", "NAME"))
_ALL_ATTRIBUTES = frozenset({"getmembers", "attrgetter", "methodcaller", "__getattribute__"})
BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars", "dir"})
"""Functions that read attributes by names that code may make as it runs."""
_CHOOSES = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]
_MODULES_BY_NAME = frozenset({"modules", "import_module", "__import__"})


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """The names in one code object.

    Attributes:
        words: names of attributes and of globals, and texts that could be such names.
        own: the code is the program's own, and no library's.
        outside: names of globals.
        texts: all texts.
        after: names of attributes that it reads of the object that it has by a name, and of any object.
        anywhere: names of attributes that it may read of any object.
        computed: it may read attributes by names that it makes: then all attributes count.
        every: names of objects of which it does so; an empty one stands for any object.
        asked: variables that it hands to ``getattr``, an object and a name, of which the values at each call count. The
            name is empty where only the object is in a variable, which holds several, one after another.
        whole: all names of the code, where these are what it reads by one name.
        environment: it may read environment variables, which its texts name.
        modules: names of modules that it imports, with how many packages up.
    """

    words: frozenset[str]
    own: bool = True
    outside: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    after: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    anywhere: frozenset[str] = frozenset()
    computed: bool = False
    every: frozenset[str] = frozenset()
    asked: frozenset[tuple[str, str]] = frozenset()
    whole: Names | None = None
    environment: bool = False
    modules: tuple[tuple[int, str], ...] = ()

    def by(self, name: str) -> Names:
        """Return what code may read of an object that it has by a name."""
        return _by(self.whole or self, name) if self.own else self

    def item(self) -> Names:
        """Return what code may read of an object that it has by no name: an item, a part."""
        return self.whole or self

    def reading(self, attribute: str) -> Names:
        """Return the same names and that of an attribute which the code has in a variable."""
        return _reading(self, attribute)

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
    # Its own name, as no code names the methods that Python calls: ``forward``, ``__call__``, operators.
    loose = {code.co_name, *(part for part in parts if part.isidentifier())}
    words = frozenset(loose.union(code.co_names))
    if not own:  # a config's may give another attribute in the place of the one that is asked for
        return Names(words, own=False, computed=code.co_name == "__getattribute__")
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
    changing, read = _changing(code, steps), collections.defaultdict[str, set[str]](set)
    every, asked = set[str](), set[tuple[str, str]]()
    for index, step in enumerate(steps):
        if step.opname in _ATTRIBUTES:
            read[_source(steps[index - 1], changing)].add(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in BY_NAME:
            given = itertools.takewhile(lambda one: not one.opname.startswith(("CALL", "PRECALL")), steps[index + 1 :])
            held, attribute = _asked(list(given))
            at_the_call = bool(attribute) and "NULL" in step.argrepr  # else it is handed on, to be called by others
            if attribute is not None and not at_the_call:
                every.add(held)
            if at_the_call or (attribute == "" and held in changing):
                asked.add((held, attribute or ""))
    loose |= read.pop("", set())
    anywhere = frozenset(words.difference(*read.values()) | loose)
    every |= {name for name, attributes in read.items() if "__dict__" in attributes}
    # The names of attributes that a pattern matches stand in the class (``__match_args__``).
    anything = not _ALL_ATTRIBUTES.isdisjoint(code.co_names) or "__dict__" in loose
    if anything or any(step.opname == "MATCH_CLASS" for step in steps):
        every.add("")
    return Names(
        words,
        outside=tuple(sorted(outside)),
        texts=texts,
        after={name: anywhere.union(attributes) for name, attributes in read.items()},
        anywhere=anywhere,
        computed=bool(every),
        every=frozenset(every),
        asked=frozenset(asked),
        environment=not {"environ", "getenv"}.isdisjoint(words),
        modules=tuple(imported),
    )


@functools.lru_cache(maxsize=2**14)
def _by(names: Names, name: str) -> Names:
    computed = not names.every.isdisjoint({"", name})
    return dataclasses.replace(names, words=names.after.get(name, names.anywhere), computed=computed, whole=names)


@functools.lru_cache(maxsize=1024)
def _reading(names: Names, attribute: str) -> Names:
    return dataclasses.replace(names, words=names.words | {attribute})


@functools.lru_cache(maxsize=1024)
def _computing(names: Names) -> Names:
    return dataclasses.replace(names, computed=True, every=frozenset({""}))


def _changing(code: types.CodeType, steps: list[dis.Instruction]) -> set[str]:
    """Return the variables that may hold several objects while the code runs: they are set anew, or in a loop."""
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    sets = collections.Counter([*given, *code.co_freevars, *code.co_names])
    loops = [(step.argval, step.offset) for step in steps if "BACKWARD" in step.opname]
    for step in steps:
        if step.opname.startswith(_SETS):
            looped = any(begin <= step.offset <= end for begin, end in loops)
            sets.update((step.argval if isinstance(step.argval, tuple) else (step.argval,)) * (1 + looped))
    return {name for name, count in sets.items() if count > 1}


def _source(step: dis.Instruction, changing: set[str]) -> str:
    """Return the name by which code has the object that it has just loaded; empty where no single name leads there."""
    name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    by_name = step.opname.startswith(_LOADS) and "NULL" not in step.argrepr
    return name if by_name and (step.opname == "LOAD_ATTR" or name not in changing) else ""


def _asked(given: list[dis.Instruction]) -> tuple[str, str | None]:
    """Return by which name code has the object that it hands to ``getattr`` and its like, and the attribute's name.

    Args:
        given: the steps from the function up to its call.

    Returns:
        The object is empty where nothing says which. The attribute is the variable that holds its name; empty where the
        name is made, None where it is a text as it stands in the code.
    """
    calls = any(step.opname == "LOAD_METHOD" or "NULL" in step.opname + step.argrepr for step in given)
    if calls or not given or not given[0].opname.startswith(_LOADS[1:]):
        return "", ""
    if isinstance(given[0].argval, tuple):  # two variables in one step
        return given[0].argval[0], given[0].argval[1] if len(given) == 1 else ""
    end = next((place for place, step in enumerate(given) if place and step.opname != "LOAD_ATTR"), len(given))
    held, rest = str(given[end - 1].argval), [step.opname for step in given[end:]]
    made = {"BUILD_STRING", "BINARY_OP"}.intersection(rest) or not all(op.startswith("LOAD_") for op in rest[:2])
    attribute: str | None = ""
    if rest and not made and rest[0] == "LOAD_CONST" and isinstance(given[end].argval, str):
        attribute = None
    elif end == 1 and rest and rest[0].startswith(_LOADS[1:3]) and {"LOAD_CONST", "LOAD_FAST"}.issuperset(rest[1:]):
        attribute = given[end].argval if isinstance(given[end].argval, str) else ""
    return held if not rest or rest[0].startswith("LOAD_") else "", attribute


def imported_modules(names: Names, space: dict[str, Any]) -> list[str]:
    """Return the names of modules that code imports as it runs, or takes by a text."""
    package = space.get("__package__") or ""
    wanted = [f"{package}.{name}" if level else name for level, name in names.modules]
    if "__name__" in names.words and not _MODULES_BY_NAME.isdisjoint(names.words):
        wanted.append(space.get("__name__", ""))
    return wanted


def function_of(member: Any) -> Any:
    """Return the function behind an entry of a class: of a property its getter, of a class method the function.

    Of a method that is chosen by the type of its argument it is what chooses, which holds the methods.
    """
    if isinstance(member, functools.singledispatchmethod):
        return member.dispatcher
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


def is_own_callable(value: Any) -> bool:
    """Return whether a value is a function of the program's own, or calls one: a loss that a library calls."""
    inner = value.func if isinstance(value, functools.partial) else value
    inner = inner.__func__ if isinstance(inner, types.MethodType) else inner
    if not isinstance(inner, types.FunctionType):
        inner = getattr(type(inner), "__call__", None)  # noqa: B004 - its function is asked for, not whether there is one
    return isinstance(inner, types.FunctionType) and is_own_file(inner.__code__.co_filename)


def chooses_by_type(function: types.FunctionType) -> bool:
    """Return whether a function calls another by the type of its argument (`functools.singledispatch`)."""
    return function.__code__ is _CHOOSES


def is_ours(hook: Any) -> bool:
    """Return whether a hook is hotloop's own."""
    inner = wrapped(getattr(hook, "func", hook))[-1]
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "hotloop"


def inner_codes(code: types.CodeType) -> set[types.CodeType]:
    """Return the code of functions that are defined inside: made anew in each run."""
    found = {constant for constant in code.co_consts if isinstance(constant, types.CodeType)}
    return found.union(*map(inner_codes, found))
