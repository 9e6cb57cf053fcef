"""Reads that an earlier guard did not see, and reads that the docs list as not noticed: tricks as in `changed_tricks`."""

from __future__ import annotations

import builtins
import gc
import mmap
import os
import sys
import types
import xml.etree.ElementTree as ET

import torch
from changed_tricks import Held, put


def values_kept():
    table = {"one": 1.0}
    kept = table.values()
    return lambda: sum(kept), lambda: table.update(two=2.0)


def items_kept():
    table = {"one": 1.0}
    kept = table.items()
    return lambda: sum(value for _, value in kept), lambda: table.update(one=3.0)


def keys_kept():
    table = {"one": 1.0}
    kept = table.keys()
    return lambda: float(len(kept)), lambda: table.update(two=3.0)


def values_kept_on_an_object():
    table = {"one": 1.0}
    held = Held(table.values())
    return lambda: sum(held.weight), lambda: table.update(one=3.0)


def code_of_a_method_replaced():
    class Box:
        def weight(self):
            return 1.0

    def other(self):
        return 3.0

    box = Box()
    return lambda: box.weight(), lambda: setattr(Box.weight, "__code__", other.__code__)


def global_that_comes_later():
    globals().pop("COMES_LATER", None)

    def read():
        try:
            weight = COMES_LATER
        except NameError:
            weight = 1.0
        return weight

    return read, lambda: globals().update(COMES_LATER=3.0)


def module_that_is_loaded_later():
    sys.modules.pop("a_plugin", None)
    return lambda: 3.0 if "a_plugin" in sys.modules else 1.0, (
        lambda: sys.modules.__setitem__("a_plugin", types.ModuleType("a_plugin"))
    )


def subclasses_counted():
    class Base:
        pass

    kept = [type("One", (Base,), {})]
    return lambda: float(len(Base.__subclasses__())), lambda: kept.append(type("Two", (Base,), {}))


def signed_zero():
    box = Held(0.0)
    return lambda: torch.tensor(1.0).copysign(torch.tensor(box.weight)), put(box, "weight", -0.0)


def signed_zero_in_a_list():
    weights = [0.0]
    return lambda: torch.tensor(1.0).copysign(torch.tensor(weights[0])), lambda: weights.__setitem__(0, -0.0)


def element_of_xml():
    element = ET.Element("loss", weight="1.0")
    return lambda: float(element.get("weight")), lambda: element.set("weight", "3.0")


def mapped_memory():
    memory = mmap.mmap(-1, 16)
    memory[0] = 1
    return lambda: float(memory[0]), lambda: memory.__setitem__(0, 3)


def objects_that_gc_knows():
    class Box(list):
        pass

    kept = [Box()]
    return lambda: float(list(map(type, gc.get_objects())).count(Box)), lambda: kept.append(Box())


def number_of_threads():
    torch.set_num_threads(1)
    return lambda: float(torch.get_num_threads()), lambda: torch.set_num_threads(2)


# -- what the docs list as not seen ------------------------------------------------------------------------------------


def built_in_is_hidden_later():
    globals().pop("round", None)
    return lambda: round(1.4), lambda: globals().update(round=lambda x: 3.0)


def built_in_replaced():
    builtins.a_weight = 1.0
    return lambda: a_weight, put(builtins, "a_weight", 3.0)  # noqa: F821 - a name among the built-ins


def global_of_a_library():
    import torch.utils._pytree as library

    library.a_weight = 1.0
    return lambda: library.a_weight, put(library, "a_weight", 3.0)


def object_from_c_alone():
    box = Held()
    element = ET.Element("held")
    element.set("box", box)
    return lambda: element.get("box").weight, put(box, "weight", 3.0)


def folder_at_hand():
    os.chdir("/")
    return lambda: float(len(os.getcwd())), lambda: os.chdir("/tmp")
