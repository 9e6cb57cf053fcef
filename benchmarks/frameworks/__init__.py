"""Each framework's own compile beside ours: same model, data, precision, and TF32 pinned.

Run it as ``python -m benchmarks.frameworks``.
"""
