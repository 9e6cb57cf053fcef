"""The ladder: which preset runs when one fails, as an explicit state machine, and the backend that walks it."""

from hotloop.fallback.availability import first_available, missing
from hotloop.fallback.backend import LadderBackend
from hotloop.fallback.ladder import Ladder, Move

__all__ = ["Ladder", "LadderBackend", "Move", "first_available", "missing"]
