"""Torch's precompiled header of its C++ code: built where a kernel is compiled, and not where all come from a store.

Torch builds the header before it looks whether the library of a kernel is there. In a process whose kernels are all
kept that is most of the first step, and nothing includes the header.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.settings import patched

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODECACHE = "torch._inductor:codecache"


@contextlib.contextmanager
def built_as_needed() -> Iterator[None]:
    """Leave the header out, while the block runs, for kernels whose library is there."""
    try:
        build = private("torch._inductor.codecache:_precompile_header")
    except CapabilityMissingError:  # a torch that builds it elsewhere
        yield
        return

    def as_needed(header: str, *given: Any, **named: Any) -> str:
        # The source of the kernel is a variable of the caller's; its library lies beside it.
        source = sys._getframe(1).f_locals.get("main_path")  # noqa: SLF001 - Python has no other way to it
        if source and Path(source).with_suffix(".so").is_file():
            return header  # nothing is compiled with it; should the library vanish, the compiler finds it by its name
        built: str = build(header, *given, **named)
        return built

    with patched(_CODECACHE, _precompile_header=as_needed):
        yield
