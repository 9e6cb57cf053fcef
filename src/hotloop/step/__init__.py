"""The hot loop: tiers, whole-step graphs, undo, and the proof of a tier in the run."""
