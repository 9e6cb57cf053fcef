"""What `hotloop.Loop` does by itself about a problem, in the words that rules and reports share."""

from __future__ import annotations

from typing import Literal

Remedy = Literal["mark_dynamic", "buckets", "odd_batch_eager", "tier"]
"""What `hotloop.Loop` can do by itself: compile for any length from the first compile on; pad batches to a few sizes
(only if the user said with what); run the odd batch eager; choose another tier."""
REMEDIES: dict[Remedy, str] = {
    "mark_dynamic": "lets a compiler see a size once it has come three times: from the second on it makes one code for "
    "any length, and sizes that come less often run eager",
    "buckets": 'pads batches to sizes that you declare: Loop(buckets={"x": hotloop.Pad(dim=1, value=0, to=(64, 128))})',
    "odd_batch_eager": "runs the odd batch eager until its size has come three times",
    "tier": 'chooses the tier by what its steps take in the run, with run="auto"',
}
"""Each remedy in words that follow the name of the loop."""
NOT_CHECKPOINTED = (
    "keep the layer that has it (BatchNorm) out of what torch.utils.checkpoint wraps, or make it with "
    "track_running_stats=False"
)
"""What to do where a checkpoint recomputes a forward that writes a buffer."""
