"""The benchmark suite: every way to run a training step, side by side on nine workloads.

``python -m benchmarks.suite --help``, from the root of the repository. Each row of the plan runs in a process and with
compile caches of its own, and is kept in one JSON file, so that the suite can be run in parts of a few minutes.
"""
