"""What `hotloop.Loop` does by itself about a problem, in the words that rules and reports share."""

from __future__ import annotations

from typing import Literal

Remedy = Literal["mark_dynamic", "buckets", "odd_batch_eager", "regions", "tier"]
"""What `hotloop.Loop` can do by itself: compile for any length from the first compile on; pad batches to a few sizes
(only if the user said with what); run the odd batch eager; choose other regions; choose another tier."""
REMEDIES: dict[Remedy, str] = {
    "mark_dynamic": "looks at the batches before it compiles, with Loop(batches=loader): frequent lengths get code of "
    "their own, many lengths one code for any length, and odd batches run eager",
    "buckets": "pads batches to sizes that it chooses from them, once it is told with what: Loop(batches=loader, "
    'buckets={"x": hotloop.Pad(dim=1, value=0)})',
    "odd_batch_eager": "runs the odd batch eager until its size has come three times and a compile for it pays",
    "regions": 'chooses regions and tier by what they take in the run, with run="auto"',
    "tier": 'chooses the tier by what its steps take in the run, with run="auto"',
}
"""Each remedy in words that follow the name of the loop."""
NOT_CHECKPOINTED = (
    "keep the layer that has it (BatchNorm) out of what torch.utils.checkpoint wraps, or make it with "
    "track_running_stats=False"
)
"""What to do where a checkpoint recomputes a forward that writes a buffer."""
