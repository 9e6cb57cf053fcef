"""What outlives a process: the costs of earlier runs, compiled code, and the child that compiles in the background."""

from hotloop.cache.child_process import BackgroundCompile, Done, Failed, Outcome
from hotloop.cache.costs import CostStore, TierCosts, Verdict
from hotloop.cache.keys import Key, key_of
from hotloop.cache.portable import BackgroundUnavailableError
from hotloop.cache.process_folder import shared_compiles
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
    "shared_compiles",
]
