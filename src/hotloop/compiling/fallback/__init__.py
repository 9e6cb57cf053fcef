"""The ladder: which preset runs when one fails, and the backend that walks it."""

from hotloop.compiling.fallback.availability import first_available, missing
from hotloop.compiling.fallback.ladder_backend import LadderBackend
from hotloop.compiling.fallback.rungs import Ladder

__all__ = ["Ladder", "LadderBackend", "first_available", "missing"]
