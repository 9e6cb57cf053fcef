"""`hotloop.bench`: times a workload in several tiers side by side."""
