"""Faults that a user can meet, planted in each way to train.

``python -m benchmarks.faults`` makes docs/evidence/faults.md.
"""
