"""The hot loop: tiers, whole-step graphs, undo, and the proof of a tier in the run."""

from hotloop.step.calls.buckets import Pad
from hotloop.step.loop.loop import Loop
from hotloop.step.loop.status import LoopStatus, TierStatus
from hotloop.step.workload import Workload

__all__ = ["Loop", "LoopStatus", "Pad", "TierStatus", "Workload"]
