"""Ways in which a name in a step's code comes to hold an object whose weight is read: tricks as in `changed_tricks`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import types

from changed_tricks import Held, put


class Owner:
    def __init__(self):
        self.held, self.other, self.kind = Held(), Held(), "weight"


def by_a_variable():
    owner = Owner()

    def read():
        held = owner.held
        return held.weight

    return read, put(owner.held, "weight", 3.0)


def by_a_choice():
    owner = Owner()

    def read():
        held = owner.held if owner.kind else owner.other
        return held.weight

    return read, put(owner.held, "weight", 3.0)


def by_a_variable_set_twice():
    owner = Owner()

    def read():
        held = owner.held
        total = held.weight
        held = owner.other
        return total + held.weight

    return read, put(owner.held, "weight", 3.0)


def by_a_loop_over_a_tuple():
    owner = Owner()

    def read():
        total = 0.0
        for held in (owner.held, owner.other):
            total += held.weight
        return total

    return read, put(owner.held, "weight", 3.0)


def by_a_while_loop():
    owner = Owner()
    owner.held.next, owner.other.next = owner.other, None

    def read():
        held, total = owner.held, 0.0
        while held is not None:
            total += held.weight
            held = held.next
        return total

    return read, put(owner.held, "weight", 3.0)


def by_a_comprehension():
    owner = Owner()
    return lambda: sum([held.weight for held in (owner.held, owner.other)]), put(owner.held, "weight", 3.0)


def by_a_comprehension_over_pairs():
    owner = Owner()
    return (
        lambda: sum([held.weight * by for held, by in zip([owner.held, owner.other], (1.0, 2.0), strict=True)]),
        put(owner.held, "weight", 3.0),
    )


def by_a_comprehension_over_tuples():
    owner = Owner()
    return (
        lambda: sum([by * held.weight for _, (held, by) in enumerate(((owner.held, 1.0), (owner.other, 2.0)))]),
        put(owner.held, "weight", 3.0),
    )


def by_a_walrus():
    owner = Owner()
    return lambda: held.weight if (held := owner.held) else 1.0, put(owner.held, "weight", 3.0)


def by_a_context():
    owner = Owner()

    def read():
        with contextlib.nullcontext(owner.held) as held:
            return held.weight

    return read, put(owner.held, "weight", 3.0)


def by_an_argument_that_is_replaced():
    owner = Owner()

    def inner(held):
        held = held.held
        return held.weight

    return lambda: inner(owner), put(owner.held, "weight", 3.0)


def by_more_arguments():
    owner = Owner()

    def inner(*helds, last):
        return helds[0].weight + last.weight

    return lambda: inner(owner.held, last=owner.other), put(owner.held, "weight", 3.0)


def by_a_result():
    owner = Owner()
    owner.get = lambda: owner.held
    return lambda: owner.get().weight, put(owner.held, "weight", 3.0)


def by_an_item():
    owner = Owner()
    table = {"a": [owner.held]}
    return lambda: table["a"][0].weight, put(owner.held, "weight", 3.0)


def by_unpacking():
    owner = Owner()

    def read():
        (first, *rest), kind = (owner.other, owner.held), owner.kind
        return rest[0].weight * len(kind) / len("weight") * first.weight

    return read, put(owner.held, "weight", 3.0)


def by_a_variable_of_an_outer_function():
    owner = Owner()

    def read():
        held = owner.held

        def inner():
            return held.weight

        return inner()

    return read, put(owner.held, "weight", 3.0)


def by_a_deleted_variable():
    owner = Owner()

    def read():
        held = owner.held
        weight = held.weight
        del held
        return weight

    return read, put(owner.held, "weight", 3.0)


def by_a_property():
    class Owning(Owner):
        @property
        def mine(self):
            return self.held

    owner = Owning()
    return lambda: owner.mine.weight, put(owner.held, "weight", 3.0)


def by_getattr_of_a_choice():
    owner = Owner()
    return lambda: getattr(owner.held if owner.kind else owner.other, owner.kind), put(owner.held, "weight", 3.0)


def by_getattr_of_an_item():
    owner, names = Owner(), ["weight"]
    return lambda: getattr([owner.held][0], names[0]), put(owner.held, "weight", 3.0)


def by_getattr_in_a_loop():
    owner = Owner()

    def read():
        total = 0.0
        for held in (owner.held, owner.other):
            for name in ("weight", "missing"):
                total += getattr(held, name, 0.0)
        return total

    return read, put(owner.held, "missing", 3.0)


def by_getattr_of_what_getattr_gave():
    owner = Owner()

    def read():
        name = "held"
        return getattr(owner, name).weight

    return read, put(owner.held, "weight", 3.0)


def by_getattr_that_is_handed_on():
    owner = Owner()
    return lambda: sum(map(getattr, [owner.held], ["weight"])), put(owner.held, "weight", 3.0)


def by_vars_of_a_variable():
    owner = Owner()

    def read():
        held = owner.held
        return vars(held)["wei" + "ght"]

    return read, put(owner.held, "weight", 3.0)


def by_the_dictionary_of_an_attribute():
    owner = Owner()
    return lambda: owner.held.__dict__["wei" + "ght"], put(owner.held, "weight", 3.0)


def by_hasattr_in_a_loop():
    owner = Owner()
    owner.all = [owner.held, owner.other]

    def read(name="extra"):
        return 1.0 + sum(hasattr(held, name) for held in owner.all)

    return read, put(owner.held, "extra", 3.0)


def by_a_global():
    globals()["THE_OWNER"] = owner = Owner()

    def read():
        return THE_OWNER.held.weight  # noqa: F821 - it is put there by its name

    return read, put(owner.held, "weight", 3.0)


def by_a_module():
    module = types.ModuleType("owners")
    module.owner = Owner()
    return lambda: module.owner.held.weight, put(module.owner.held, "weight", 3.0)


def by_a_class_that_is_called():
    class Reads:
        def __init__(self, held):
            self.held = held

        def weight(self):
            return self.held.weight

    owner = Owner()
    return lambda: Reads(owner.held).weight(), put(owner.held, "weight", 3.0)


def by_a_caught_exception():
    owner = Owner()

    def read():
        try:
            raise LookupError(owner.held)
        except LookupError as error:
            return error.args[0].weight

    return read, put(owner.held, "weight", 3.0)


def by_a_generator():
    owner = Owner()

    def each():
        yield owner.held
        yield owner.other

    def read():
        total = 0.0
        for held in each():
            total += held.weight
        return total

    return read, put(owner.held, "weight", 3.0)


# -- objects that a helper gathers in something new ----------------------------------------------------------------------


def gathered(gather, count=20):
    parts = [Held() for _ in range(count)]

    def helper():
        return gather(parts)

    def read():
        total = 0.0
        for part in helper():
            total = total + part.weight
        return total / count

    return read, put(parts[2], "weight", 60.0)


def by_a_long_list():
    return gathered(lambda parts: [part for part in parts if part])


def by_a_long_table():
    def gather(parts):
        return dict(enumerate(parts)).values()

    return gathered(gather)


def by_a_deque():
    return gathered(collections.deque)


def by_a_filter():
    return gathered(lambda parts: filter(None, parts))


def by_a_chain():
    return gathered(lambda parts: itertools.chain(parts[:1], parts[1:]))


def by_a_slice_of_a_table():
    return gathered(lambda parts: itertools.islice(dict(enumerate(parts)).values(), 20))


def by_a_list_in_a_table():
    first, second = Held(), Held()

    def helper():
        return {"parts": [first, second]}

    def read():
        total = 0.0
        for part in helper()["parts"]:
            total = total + part.weight
        return total

    return read, put(first, "weight", 3.0)


def by_one_of_many():
    parts = [Held() for _ in range(2500)]
    return lambda: sum(part.weight for part in parts) / 2500, put(parts[2400], "weight", 2501.0)


def in_a_new_object(kind):
    owner = Owner()

    def weigh(context):
        return context.held.weight

    def read():
        return weigh(kind(owner.held))

    return read, put(owner.held, "weight", 3.0)


def by_a_new_object():
    @dataclasses.dataclass
    class Context:
        held: Held

    return in_a_new_object(Context)


def by_a_new_object_with_slots():
    @dataclasses.dataclass(slots=True)
    class Context:
        held: Held

    return in_a_new_object(Context)
