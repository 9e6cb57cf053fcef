"""Which kind of varying size it is: one odd batch, or lengths that vary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.diagnose.case import Case
    from hotloop.diagnose.guards import Guard

_PAIR = 2


def kind_of_sizes(guards: Sequence[Guard], case: Case) -> str:
    """Give ``ragged_batch`` where the first dimension had one size and an odd smaller one, else ``dynamic_lengths``.

    The census of shapes knows where the run kept one. torch alone tells of the first two sizes only, since it makes a
    size dynamic at its second value; there, a smaller second one in the first dimension is taken for the odd one.
    """
    dim = guards[0].dim
    if dim != 0:
        return "dynamic_lengths"
    known = _distinct(case.measurements.get("shapes"), guards)
    if known is not None:
        return "ragged_batch" if known == _PAIR else "dynamic_lengths"
    pairs = {guard.values for guard in guards}
    odd = all(len(pair) == _PAIR and _smaller(*pair) for pair in pairs)
    return "ragged_batch" if odd and len({value for pair in pairs for value in pair}) == _PAIR else "dynamic_lengths"


def _smaller(before: str, after: str) -> bool:
    return after == "1" or (before.isdigit() and after.isdigit() and int(after) < int(before))


def _distinct(shapes: object, guards: Sequence[Guard]) -> int | None:
    """Give how many sizes the first dimension of the steps' inputs had, where both sizes of a guard were among them."""
    sizes = [int(value) for guard in guards for value in guard.values if value.isdigit()]
    found = [one for one in _varying(shapes) if one.get("dim") == 0 and sizes and _within(one, sizes)]
    return max((int(one["distinct"]) for one in found), default=None)


def _varying(shapes: object) -> Iterable[Mapping[str, Any]]:
    for census in shapes.values() if isinstance(shapes, Mapping) else ():
        dims = census.get("varying_dims") if isinstance(census, Mapping) else None
        yield from (dim for dim in dims if isinstance(dim, Mapping)) if isinstance(dims, list | tuple) else ()


def _within(dim: Mapping[str, Any], sizes: Sequence[int]) -> bool:
    least, most, distinct = (dim.get(key) for key in ("least", "most", "distinct"))
    if not (isinstance(least, int) and isinstance(most, int) and isinstance(distinct, int)):
        return False
    return least <= min(sizes) and max(sizes) <= most
