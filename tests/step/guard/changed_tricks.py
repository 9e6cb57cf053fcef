"""Rarer ways to keep a number that a step reads. Each trick returns how a step reads the number, and what changes it."""

from __future__ import annotations

import abc
import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import heapq
import importlib
import inspect
import itertools
import json
import logging
import operator
import queue
import string
import struct
import sys
import threading
import types
import weakref

import numpy as np
import torch


class Held:
    def __init__(self, weight=1.0):
        self.weight = weight

    def double(self):
        return 2 * self.weight


def put(held, name, value):
    return lambda: setattr(held, name, value)


# -- objects and classes -----------------------------------------------------------------------------------------------


def attribute_that_fell_back():
    class Lazy:
        def __getattr__(self, name):
            return 1.0

    lazy = Lazy()
    return lambda: lazy.weight, put(lazy, "weight", 3.0)


def instance_hides_its_class():
    held = type("Box", (), {"weight": 1.0})()
    return lambda: held.weight, put(held, "weight", 3.0)


def attribute_deleted():
    held = type("Box", (), {"weight": 1.0})()
    held.weight = 2.0
    return lambda: held.weight, lambda: delattr(held, "weight")


def class_of_an_object_assigned():
    class Other(Held):
        def double(self):
            return 3 * self.weight

    held = Held()
    return lambda: held.double(), put(held, "__class__", Other)


def bases_of_a_class_assigned():
    one, other = (type("Base", (), {"weight": weight}) for weight in (1.0, 3.0))
    made = type("Made", (one,), {})
    held = made()
    return lambda: held.weight, put(made, "__bases__", (other,))


def attribute_of_a_metaclass():
    class Meta(type):
        weight = 1.0

    class Made(metaclass=Meta):
        pass

    return lambda: Made.weight, put(Meta, "weight", 3.0)


def descriptor_with_a_table():
    values = weakref.WeakKeyDictionary()

    class Weight:
        def __get__(self, held, owner):
            return values[held]

    class Box:
        weight = Weight()

    box = Box()
    values[box] = 1.0
    return lambda: box.weight, lambda: values.__setitem__(box, 3.0)


def property_replaced():
    class Box:
        weight = property(lambda self: 1.0)

    box = Box()
    return lambda: box.weight, put(Box, "weight", property(lambda self: 3.0))


def operators():
    class Box:
        def __len__(self):
            return 1

        def __mul__(self, by):
            return by

    box = Box()
    return lambda: (box * 2.0) * len(box), put(Box, "__mul__", lambda self, by: 3 * by)


def truth_of_an_object():
    class Box:
        full = False

        def __bool__(self):
            return self.full

    box = Box()
    return lambda: 1.0 if not box else 3.0, put(box, "full", True)


def kind_of_an_abstract_class():
    class Scaled(abc.ABC):  # noqa: B024 - a class is registered with it
        pass

    class Box:
        pass

    box = Box()
    return lambda: 3.0 if isinstance(box, Scaled) else 1.0, lambda: Scaled.register(Box)


def checked_by_a_metaclass():
    class Meta(type):
        known = ()

        def __instancecheck__(cls, one):
            return type(one).__name__ in cls.known

    class Any(metaclass=Meta):
        pass

    return lambda: 3.0 if isinstance(1, Any) else 1.0, put(Meta, "known", ("int",))


def name_of_a_class():
    box = type("Plain", (), {})
    held = box()
    return lambda: float(len(type(held).__name__)), put(box, "__name__", "Pl")


def registered_subclasses():
    class Base:
        known = []

        def __init_subclass__(cls, weight):
            Base.known.append(weight)

    type("One", (Base,), {}, weight=1.0)
    return lambda: sum(Base.known), lambda: type("Two", (Base,), {}, weight=2.0)


def slots_of_a_dataclass():
    @dataclasses.dataclass(slots=True)
    class Box:
        weight: float = 1.0

    box = Box()
    return lambda: dataclasses.asdict(box)["weight"], put(box, "weight", 3.0)


def copied_before_it_is_read():
    held = Held([1.0])
    return lambda: copy.deepcopy(held).weight[0], lambda: held.weight.__setitem__(0, 3.0)


def all_attributes_counted():
    held = Held()
    return lambda: float(sum(not name.startswith("_") for name in dir(held))), put(held, "other", 1.0)


def values_of_vars():
    held = Held()
    return lambda: sum(vars(held).values()), put(held, "other", 2.0)


# -- functions ---------------------------------------------------------------------------------------------------------


def attribute_of_a_function():
    def read():
        return read.weight

    read.weight = 1.0
    return read, put(read, "weight", 3.0)


def cell_of_a_closure():
    def make(weight):
        return lambda: weight

    read = make(1.0)
    return read, lambda: setattr(read.__closure__[0], "cell_contents", 3.0)


def mutable_default():
    def read(weights=[1.0]):  # noqa: B006 - what is tried
        return weights[0]

    return read, lambda: read.__defaults__[0].__setitem__(0, 3.0)


def single_dispatch():
    @functools.singledispatch
    def weight(one):
        return 1.0

    return lambda: weight(1), lambda: weight.register(int, lambda one: 3.0)


def cached_property_forgotten():
    class Box:
        base = 1.0

        @functools.cached_property
        def weight(self):
            return self.base

    box = Box()

    def change():
        box.base = 3.0
        del box.weight

    return lambda: box.weight, change


def cache_cleared():
    table = {"weight": 1.0}

    @functools.lru_cache(maxsize=None)  # noqa: UP033 - as people write it
    def weight():
        return table["weight"]

    def change():
        table["weight"] = 3.0
        weight.cache_clear()

    return lambda: weight(), change


def partial_of_a_partial():
    held = Held([1.0])
    read = functools.partial(functools.partial(lambda box, by: box.weight[0] * by, held), by=1.0)
    return read, lambda: held.weight.__setitem__(0, 3.0)


def partial_method():
    class Box:
        def scaled(self, by):
            return by

        weight = functools.partialmethod(scaled, by=1.0)

    box = Box()
    return lambda: box.weight(), put(Box, "weight", functools.partialmethod(Box.scaled, by=3.0))


def signature_of_a_function():
    def loss(weight=1.0):
        return weight

    return lambda: inspect.signature(loss).parameters["weight"].default, put(loss, "__defaults__", (3.0,))


def evaluated_text():
    table = {"weight": 1.0}
    return lambda: eval("table['weight']", {"table": table}), lambda: table.update(weight=3.0)


def global_by_name():
    globals()["SCALE_BY_NAME"] = 1.0
    return lambda: globals()["SCALE_BY_NAME"], lambda: globals().update(SCALE_BY_NAME=3.0)


def module_imported_in_the_step():
    module = sys.modules["settings_of_a_trick"] = types.ModuleType("settings_of_a_trick")
    module.weight = 1.0
    return lambda: importlib.import_module("settings_of_a_trick").weight, put(module, "weight", 3.0)


def module_with_getattr():
    module, table = types.ModuleType("lazy"), {"weight": 1.0}
    module.__getattr__ = lambda name: table[name]
    return lambda: module.weight, lambda: table.update(weight=3.0)


def context_manager():
    table = {"weight": 1.0}

    @contextlib.contextmanager
    def scaled():
        yield table["weight"]

    def read():
        with scaled() as weight:
            return weight

    return read, lambda: table.update(weight=3.0)


def text_of_an_exception():
    error = ValueError(1.0)
    return lambda: error.args[0], put(error, "args", (3.0,))


# -- containers --------------------------------------------------------------------------------------------------------


def chained_maps():
    last, first = {"weight": 1.0}, {}
    chain = collections.ChainMap(first, last)
    return lambda: chain["weight"], lambda: first.update(weight=3.0)


def read_only_view():
    table = {"weight": 1.0}
    proxy = types.MappingProxyType(table)
    return lambda: proxy["weight"], lambda: table.update(weight=3.0)


def default_of_a_dict():
    table = collections.defaultdict(lambda: 1.0)
    return lambda: table.get("other", 1.0), lambda: table.__setitem__("other", 3.0)


def order_of_a_dict():
    table = collections.OrderedDict(one=1.0, two=3.0)
    return lambda: next(iter(table.values())), lambda: table.move_to_end("one")


def key_is_in_a_set():
    names = frozenset({"one"})
    box = Held(names)
    return lambda: 3.0 if "two" in box.weight else 1.0, put(box, "weight", names | {"two"})


def smallest_of_a_heap():
    heap = [1.0, 2.0]
    return lambda: heapq.nsmallest(1, heap)[0], lambda: heapq.heappush(heap, 0.25)


def items_in_a_queue():
    jobs = queue.Queue()
    return lambda: 1.0 + jobs.qsize(), lambda: jobs.put(1)


def grouped_and_mapped():
    table = [("a", 1.0), ("b", 2.0)]
    return (
        lambda: sum(sum(v for _, v in group) for _, group in itertools.groupby(table, operator.itemgetter(0))),
        lambda: table.append(("b", 3.0)),
    )


def by_methodcaller():
    held = Held()
    return lambda: operator.methodcaller("double")(held), put(held, "weight", 3.0)


def slice_of_a_list():
    weights, part = [1.0, 2.0, 3.0], slice(0, 1)
    box = Held(part)
    return lambda: sum(weights[box.weight]), put(box, "weight", slice(0, 2))


def text_that_is_parsed():
    box = Held('{"weight": 1.0}')
    return lambda: json.loads(box.weight)["weight"], put(box, "weight", '{"weight": 3.0}')


def template():
    box = string.Template("1$rest")
    return lambda: float(box.substitute(rest="0")), put(box, "template", "2$rest")


# -- memory and numbers ------------------------------------------------------------------------------------------------


def one_or_true():
    box = Held(1)
    return lambda: 1.0 if box.weight is True else 3.0, put(box, "weight", True)


def whole_or_float():
    box = Held(3)
    return (
        lambda: (torch.ones(1, dtype=torch.long) * box.weight / 2).long().float().sum() + isinstance(box.weight, int),
        (put(box, "weight", 3.0)),
    )


def typed_array():
    weights = array.array("d", [1.0])
    return lambda: weights[0], lambda: weights.__setitem__(0, 3.0)


def packed_bytes():
    memory = bytearray(struct.pack("d", 1.0))
    return lambda: struct.unpack_from("d", memory)[0], lambda: struct.pack_into("d", memory, 0, 3.0)


def view_of_bytes():
    memory = bytearray([1, 2])
    view = memoryview(memory)
    return lambda: float(view[0]), lambda: memory.__setitem__(0, 3)


def structure_of_c():
    class Box(ctypes.Structure):
        _fields_ = (("weight", ctypes.c_double),)

    box = Box(1.0)
    return lambda: box.weight, put(box, "weight", 3.0)


def view_of_an_array():
    base = np.ones(4)
    view = base[1:3]
    return lambda: float(view.sum()), lambda: base.__setitem__(1, 3.0)


def objects_in_an_array():
    held = Held()
    rows = np.array([held], dtype=object)
    return lambda: rows[0].weight, put(held, "weight", 3.0)


def decimal_precision():
    context, number = decimal.getcontext(), decimal.Decimal(1)
    context.prec = 28
    return lambda: float(number / 3), put(context, "prec", 1)


def fraction():
    box = Held(fractions.Fraction(1, 2))
    return lambda: float(box.weight), put(box, "weight", fractions.Fraction(3, 2))


def flags():
    class Parts(enum.Flag):
        ONE = 1
        TWO = 2

    box = Held(Parts.ONE)
    return lambda: 3.0 if Parts.TWO in box.weight else 1.0, put(box, "weight", Parts.ONE | Parts.TWO)


# -- the process and torch ---------------------------------------------------------------------------------------------


def context_variable():
    weight = contextvars.ContextVar("weight", default=1.0)
    return lambda: weight.get(), lambda: weight.set(3.0)


def local_of_a_thread():
    local = threading.local()
    local.weight = 1.0
    return lambda: local.weight, put(local, "weight", 3.0)


def weak_reference():
    box = Held()
    refer = weakref.ref(box)
    return lambda: refer().weight, put(box, "weight", 3.0)


def level_of_a_logger():
    logger = logging.getLogger("trick")
    logger.setLevel(logging.INFO)
    return lambda: 3.0 if logger.isEnabledFor(logging.DEBUG) else 1.0, lambda: logger.setLevel(logging.DEBUG)


def attribute_of_a_tensor():
    weight = torch.ones(3)
    weight.scale = 1.0
    return lambda: weight.sum() * weight.scale, put(weight, "scale", 3.0)


def tensor_is_frozen():
    weight = torch.ones(1)
    return lambda: 3.0 if weight.requires_grad else 1.0, lambda: weight.requires_grad_(True)


def memory_of_a_tensor_in_numpy():
    weight = torch.ones(3)
    same = weight.numpy()
    return lambda: weight.sum(), lambda: same.__setitem__(0, 3.0)


def settings_of_torch():
    torch.backends.mkldnn.set_flags(True)
    return lambda: 1.0 if torch.backends.mkldnn.enabled else 3.0, lambda: torch.backends.mkldnn.set_flags(False)


def default_type():
    torch.set_default_dtype(torch.float32)
    return lambda: 3.0 if torch.get_default_dtype() == torch.bfloat16 else 1.0, (
        lambda: torch.set_default_dtype(torch.bfloat16)
    )


def subclass_of_tensor():
    class Scaled(torch.Tensor):
        scale = 1.0

        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {})) * cls.scale

    one = torch.ones(1).as_subclass(Scaled)
    return lambda: (one + 0).as_subclass(torch.Tensor).sum(), put(Scaled, "scale", 3.0)
