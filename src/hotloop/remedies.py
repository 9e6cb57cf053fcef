"""What `hotloop.Loop` does by itself about a problem: the rules name it, the report says it, in one wording."""

from __future__ import annotations

from typing import Literal

Remedy = Literal["mark_dynamic", "buckets", "odd_batch_eager", "regions", "tier"]
"""What `hotloop.Loop` can do by itself: code for any length from the first compile on; batches padded to a few sizes
(only where the user said with what); the odd batch run eager; another choice of regions; another tier."""
REMEDIES: dict[Remedy, str] = {
    "mark_dynamic": "looks at the batches before it compiles, with Loop(batches=loader): frequent lengths get code of "
    "their own, many lengths one code for any length, and odd batches run eager",
    "buckets": "pads batches to sizes that it chooses from them, once it is told with what: Loop(batches=loader, "
    'buckets={"x": hotloop.Pad(dim=1, value=0)})',
    "odd_batch_eager": "runs the odd batch eager until its size has come three times and a compile for it pays",
    "regions": 'chooses regions and tier by what they take in the run, with run="auto"',
    "tier": 'chooses the tier by what its steps take in the run, with run="auto"',
}
"""Each remedy as it is told to people: what follows the name of the loop."""
