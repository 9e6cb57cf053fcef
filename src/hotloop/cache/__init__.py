"""What outlives a process: the costs of earlier runs, and the child that fills the compile cache in the background."""

from hotloop.cache.background import BackgroundCompile, Done, Failed, Outcome
from hotloop.cache.costs import CostStore, TierCosts, Verdict
from hotloop.cache.keys import Key, key_of
from hotloop.cache.portable import BackgroundUnavailableError
from hotloop.cache.request import Recorder, Request

__all__ = [
    "BackgroundCompile",
    "BackgroundUnavailableError",
    "CostStore",
    "Done",
    "Failed",
    "Key",
    "Outcome",
    "Recorder",
    "Request",
    "TierCosts",
    "Verdict",
    "key_of",
]
