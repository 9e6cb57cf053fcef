"""Sees what torch does: its callbacks become events, and each executed graph is counted for its component."""

from hotloop.observe.collector import collector, compiling_since, watch
from hotloop.observe.ledger import Cause, GraphInfo, Tally, active

__all__ = ["Cause", "GraphInfo", "Tally", "active", "collector", "compiling_since", "watch"]
