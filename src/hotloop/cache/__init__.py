"""What outlives a process: the costs of earlier runs, and the child that fills the compile cache in the background."""

from hotloop.cache.costs import CostStore, TierCosts, Verdict
from hotloop.cache.keys import Key, key_of

__all__ = ["CostStore", "Key", "TierCosts", "Verdict", "key_of"]
