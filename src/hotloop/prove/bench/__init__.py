"""`hotloop.bench`: a workload timed in several tiers side by side."""
