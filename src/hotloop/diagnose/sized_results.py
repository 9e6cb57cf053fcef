"""What to write in place of an operation whose result has no fixed size, or by which the host decides what runs."""

from __future__ import annotations

import re

_KEEP_THE_SIZE = (
    "keep the size: torch.where(mask, x, 0), or x times the mask; a mean is then the sum divided by mask.sum(). The "
    "mask needs as many dimensions as x: mask[:, None]"
)
_IN_THE_LOADER = "a size that depends on values cannot be captured: do it in the data loader, and pass the result"
_REMEDIES = {
    "index": _KEEP_THE_SIZE,
    "masked_select": _KEEP_THE_SIZE,
    "nonzero": f"{_IN_THE_LOADER}; where it only chooses rows, weight them instead by (condition).to(x.dtype)",
    "_unique2": _IN_THE_LOADER,
    "unique_dim": _IN_THE_LOADER,
    "unique_consecutive": _IN_THE_LOADER,
    "_coalesce": "coalesce it before the first step, or in the data loader: pass its indices and values, and make it "
    "in the step by torch.sparse_coo_tensor(..., is_coalesced=True)",
    "repeat_interleave": "say what the repeats come to, by output_size=, where that is the same in each step; else do "
    "it in the data loader, and pass the result",
    "bincount": "say how many there are: torch.zeros(n, device=y.device).index_add_(0, y, torch.ones(len(y), "
    "device=y.device))",
    "torch.cond": "compute both results, and choose by torch.where(condition, a, b); or train in a compiled tier "
    'without a graph: run="full"',
    "torch.while_loop": "write a loop of a fixed number of turns, which torch.where stops; or train in a compiled "
    'tier without a graph: run="full"',
}
_ONE_HOT = (
    "F.one_hot reads its numbers on the host: (y[..., None] == torch.arange(n, device=y.device)).to(x.dtype) is the "
    "same for n classes, and reads none"
)
_POSITION = re.compile(r"\bint\([\w.]*(ptr|pointer|cursor|position)\b|(ptr|pointer|cursor|position)(\[0\])?\.item\(")
_ON_THE_DEVICE = (
    "keep the position on the device, and write there: queue.index_copy_(0, (ptr + torch.arange(n, device=ptr.device)) "
    "% len(queue), keys), then ptr.add_(n).remainder_(len(queue)); index_copy_(1, ...) where the keys are columns"
)
_LAYER_DROP = re.compile(r"\bif\b.*<.*drop")
_WEIGHTED = (
    "the host draws which layers run: where the share is 0, ask for that first (if p > 0 and ...); else run each layer "
    "and weight it, keep = (torch.rand((), device=x.device) >= p).to(x.dtype); x = x + keep * (layer(x) - x)"
)


def remedy_of(reason: str, source: str) -> str:
    """Return what to write instead; empty where nothing special is known.

    Args:
        reason: why Python waits, as `hotloop._torch.host_reads` says it.
        source: the line of the program that waits.
    """
    if "one_hot(" in source and not reason.startswith("the size"):
        return _ONE_HOT
    if reason.startswith("a value is read"):
        return _ON_THE_DEVICE if _POSITION.search(source) else _WEIGHTED if _LAYER_DROP.search(source) else ""
    return _REMEDIES.get(reason.rpartition(": ")[2], "")
