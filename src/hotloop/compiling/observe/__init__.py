"""Sees what torch does: its callbacks become events, and each executed graph is counted for its component."""

from hotloop.compiling.observe.collector import collector, compiling_since, watch
from hotloop.compiling.observe.ledger import NOBODY, Call, Cause, GraphInfo, Tally, active

__all__ = [
    "NOBODY",
    "Call",
    "Cause",
    "GraphInfo",
    "Tally",
    "active",
    "collector",
    "compiling_since",
    "watch",
]
